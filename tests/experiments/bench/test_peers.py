"""Kernels of other libraries: what is refused, and the lists and intervals that they get."""

import random
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from experiments.bench.cases import CAUSAL, DENSE, Case
from experiments.bench.peers import cudnn, fa4
from experiments.bench.peers.fa4 import to_fa4
from experiments.bench.providers import find
from tests.experiments.bench.bench_cases import CASE, CPU
from tests.masks.helpers import any_blocks
from tests.notes import each_seed

CUDA = torch.device("cuda")
OWN = "block_diagonal(64)"  # so that no row or column is empty
BLOCKS = Case(f"random_blocks(0.5, block=64) | {OWN}", 1, 4, 4, 256, 256, 128, "bfloat16", 64, 64)
WIDE = {"block_q": 128, "block_k": 128}
HOLE = {"mask": f"{OWN} & ~global_rows(64)"}  # no block in the first row


@pytest.mark.parametrize(
    "changes", [{}, {"n_k": 200}, HOLE, {"mask": "random_blocks(0.5, block=64, per_head=True)"},
                {"block_q": 256, "block_k": 256, "mask": "random_blocks(0.5, block=128)"}]
)  # fmt: skip
def test_lists_name_the_blocks_of_the_mask(changes):
    case = replace(BLOCKS, **changes)
    lists, blocks = cudnn.block_lists(case, CPU), cudnn.fine(case)
    kept = torch.from_numpy(blocks.layout() > 0).expand(1, 4, -1, -1)
    sizes = lists.get("block_sizes", torch.full((blocks.cols,), blocks.block_size[1]))
    assert sizes.sum() == case.n_k and ("block_sizes" in lists) == ("n_k" in changes)
    listed = lists["q2k_block_index"]
    number = lists.get("q2k_block_nums", torch.full(listed.shape[:3], listed.shape[3]))
    assert listed.is_contiguous() and torch.equal(number, kept.sum(-1))
    for place in np.ndindex(*number.shape):
        wanted = kept[place].nonzero().ravel().int()
        assert torch.equal(listed[place][: number[place]], wanted)


MASKS = [
    "causal()", "local(40)", "local(3, 70)", "sliding(33)", "dense()", "causal() & ~causal()",
    "documents((80, 0, 120))", "documents((80, 0, 120)) & causal()",
    "documents(((80, 120), (100, 100)))", "local(40) | global_tokens(10)",
    "(sinks(4) | sliding(51)) & causal()", "local(25) | global_at((13, 100, 150))",
    "hstu((100, 100), targets=(50, 50))", "prefix_tree((0, 48, 80, 150), (200, 150, 150, 200))",
    "random_blocks(0.3, block=32, per_head=True)",
]  # fmt: skip
SMALL = replace(BLOCKS, batch=2, n_q=200, n_k=200, head_dim=16, dtype="float32")


@pytest.mark.parametrize("mask", MASKS)
def test_intervals_are_the_mask(mask):
    for n_q, n_k, block_q, block_k in ((200, 200, 32, 32), (131, 200, 64, 16), (200, 131, 16, 128)):
        case = replace(SMALL, mask=mask, n_q=n_q, n_k=n_k, block_q=block_q, block_k=block_k)
        ends = cudnn.intervals(case)
        assert ends is not None and ends.dtype == np.int32 and ends.flags.c_contiguous
        if mask in ("causal()", "sliding(33)"):
            assert ends.shape[1] == {"causal()": 1, "sliding(33)": 3}[mask]
        ends = np.concatenate([np.zeros_like(ends[:, :1]), ends], axis=1)
        assert (np.diff(ends, axis=1) >= 0).all() and ends.max() <= n_k
        keys = np.arange(n_k)
        seen = (ends[:, ::2, :, None] <= keys) & (keys < ends[:, 1::2, :, None])
        assert seen.sum(1).max() <= 1  # no key is in two intervals
        wanted = np.broadcast_to(case.blocks.to_dense(), (2, len(ends), n_q, n_k)).swapaxes(0, 1)
        assert (seen.any(1) == wanted.reshape(len(ends), -1, n_k)).all()


@pytest.mark.parametrize("mask", ["keys_at({})", "random_blocks(count={}, block=32)"])
def test_too_many_intervals_are_none(mask):
    def case(count):
        # Every other key or block: none of them touch.
        text = mask.format(tuple(range(1, 2 * count, 2)) if "keys" in mask else count)
        return replace(SMALL, mask=text, n_q=96, n_k=6400, block_q=32, block_k=32)

    found = cudnn.intervals(case(cudnn.MOST))
    assert found is not None and found.shape[1] <= 2 * cudnn.MOST + 1
    assert cudnn.intervals(case(cudnn.MOST + 6)) is None


def test_flash_attention_4_gets_full_blocks_as_full_and_bits_for_partial_ones(monkeypatch):
    calls = []
    attend = lambda q, k, v, **options: calls.append(options) or (q, None)  # noqa: E731
    module = SimpleNamespace(BlockSparseTensorsTorch=dict, flash_attn_func=attend)
    monkeypatch.setattr(fa4.importlib, "import_module", lambda _: module)
    monkeypatch.setattr(fa4, "bit_lookup", lambda *sizes: sizes)

    def options(mask, name="fa4"):
        q = torch.zeros(2, 4, 256, 16)
        case = replace(CASE, mask=mask, n_q=256, n_k=256)
        assert find(name).prepare(case, CPU)(q, q, q).shape == q.shape
        return calls.pop()

    assert "takes bfloat16" in (find("fa4").unsupported(CASE, CUDA, "forward") or "")
    assert options(DENSE) == {"deterministic": False}
    assert options(CAUSAL) == {"deterministic": False, "causal": True}
    for mask, window in (("sliding(5)", (4, 0)), ("local(3, 7)", (3, 7))):
        assert options(mask, "fa4_window") == {"deterministic": False, "window_size": window}
    found = options("random:0.5:block=32")
    lists = found["block_sparse_tensors"]
    assert "mask_mod" not in found and lists["block_size"] == (32, 32)
    assert not lists["mask_block_cnt"].any()
    assert set(lists["full_block_cnt"].flatten().tolist()) == {4}

    found = options("local:40")
    code, bits = found["aux_tensors"]
    assert found["mask_mod"] == (32, 32, False, False)
    q, k = torch.meshgrid(torch.arange(256), torch.arange(256), indexing="ij")
    word = bits[code[0, 0, q // 32, k // 32].long(), q % 32, k % 32 // 32]
    assert torch.equal((word >> (k % 32) & 1).bool(), (q - k).abs() <= 40)


def test_packed_documents_of_all_batch_entries_are_joined():
    case = replace(CASE, mask="documents((80, 0, 120)) & causal()", layout="token_major")
    assert find("fa4_varlen").concerns(case)
    assert not find("fa4_varlen").concerns(replace(case, mask="sliding(3)"))
    found = fa4.varlen_arguments(case, CPU)
    assert found["cu_seqlens_k"].tolist() == [0, 80, 80, 200, 280, 280, 400]
    assert found["max_seqlen_q"] == 120 and found["causal"]
    half = replace(case, dtype="float16", layout="head_major")
    assert "token_major" in (find("fa4_varlen").unsupported(half, CUDA, "forward") or "")


# ---- the block lists of FlashAttention-4


def lists_of(counts, indices) -> set[tuple[int, ...]]:
    """(batch, head, line, entry) of padded lists, entry by entry."""
    return {
        (*at, int(indices[(*at, i)]))
        for at in np.ndindex(*counts.shape)
        for i in range(int(counts[at]))
    }


@each_seed(15)
def test_fa4(seed: int):
    blocks = any_blocks(random.Random(seed))
    layout = blocks.layout()
    mask = to_fa4(blocks)
    for tensors, codes in ((mask.forward, layout), (mask.backward, layout.swapaxes(-1, -2))):
        assert tensors["block_size"] == blocks.block_size
        for code, name in ((1, "mask"), (2, "full")):
            counts, indices = (tensors[f"{name}_block_{what}"] for what in ("cnt", "idx"))
            assert counts.dtype == indices.dtype == torch.int32
            assert indices.shape[-1] == max(1, int(counts.max()))  # compact
            wanted = set(zip(*np.nonzero(codes == code), strict=True))
            assert lists_of(counts, indices) == wanted
    dense = blocks.to_dense()
    if mask.aux_tensors is None:
        assert not (layout == 1).any()
        return
    # The lookup that FlashAttention-4 has to make, in Python's integers.
    code, bits = (tensor.tolist() for tensor in mask.aux_tensors)
    block_q, block_k = blocks.block_size
    for b, h, i, j in zip(*np.nonzero(layout == 1), strict=True):
        q, k = i * block_q, min(j * block_k + block_k // 2, blocks.n_k - 1)
        tile = code[b][h][i][j]
        word = bits[tile][q % block_q][k % block_k // 32]
        allowed = tile == -1 or (tile >= 0 and word >> (k % block_k % 32) & 1)
        assert allowed == dense[b, h, q, k]
