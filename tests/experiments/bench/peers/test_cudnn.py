"""cuDNN Frontend: what is refused, and the lists and intervals that it gets."""

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from experiments.bench import provider
from experiments.bench.cases import DENSE, LAYOUTS, Case
from experiments.bench.peers import cudnn
from experiments.bench.providers import find
from sparseflash.testing import make_qkv, oracle
from tests.experiments.bench.bench_cases import CPU, exact

CUDA = torch.device("cuda")
CASE = Case("random_blocks(0.5, block=64)", 2, 4, 4, 256, 256, 128, "bfloat16", 64, 64)
SMALL = replace(CASE, head_dim=16, dtype="float32")


@pytest.fixture
def hopper(monkeypatch):
    monkeypatch.setattr(provider, "nvidia_capability", lambda device: (9, 0))
    monkeypatch.setattr(provider, "why_missing", lambda *_: None)


@pytest.mark.parametrize("direction", ["forward", "backward"])
@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({}, None),
        ({"block_q": 128, "block_k": 128, "mask": "random_blocks(0.5)"}, None),
        ({"block_q": 256, "block_k": 256, "mask": "random_blocks(0.5)"}, None),
        ({"dtype": "float32"}, "not float32"),
        ({"head_dim": 32}, "not 32, 32"),
        ({"v_dim": 256}, "not 128, 256"),
        ({"block_q": 32, "block_k": 32}, "blocks of 64, 128 and 256, not 32 x 32"),
        ({"block_k": 128, "mask": "dense()"}, "blocks of 64, 128 and 256, not 64 x 128"),
        ({"n_q": 250}, "multiples of 64 queries with blocks of 64, not 250"),
        ({"mask": "causal()"}, "whole blocks only, and the mask has partial ones"),
        ({"mask": "random_blocks(0.5)", "n_q": 250, "block_q": 128, "block_k": 128}, None),
    ],
)  # fmt: skip
def test_blocks_says_what_it_does_not_take(changes, reason, direction, hopper):
    found = find("cudnn_blocks").unsupported(replace(CASE, **changes), CUDA, direction)
    assert found is None if reason is None else reason in (found or "")


def test_the_backward_of_blocks_takes_less(hopper):
    peer = find("cudnn_blocks")
    for changes, reason in (
        ({"dtype": "float16"}, "takes bfloat16, not float16"),
        ({"head_dim": 64}, "backward takes head dims of (128,), not 64, 64"),
        ({"kv_heads": 2}, "no backward for 4 query and 2 key heads"),
    ):
        case = replace(CASE, **changes)
        assert peer.unsupported(case, CUDA, "forward") is None
        assert reason in (peer.unsupported(case, CUDA, "backward") or "")


@pytest.mark.parametrize("name", ["cudnn_blocks", "cudnn_flex", "flashinfer"])
def test_peers_for_hopper_refuse_other_devices(name, monkeypatch):
    peer = find(name)
    assert peer.unsupported(CASE, CPU, "forward") == "needs a CUDA device, not cpu"
    for capability, reason in (((10, 0), "this one has 10.0"), (None, "this is an AMD GPU")):
        monkeypatch.setattr(provider, "nvidia_capability", lambda device, found=capability: found)
        assert reason in (peer.unsupported(CASE, CUDA, "forward") or "")
    monkeypatch.setattr(provider, "nvidia_capability", lambda device: (9, 0))
    remedy = peer.unsupported(replace(CASE, batch=1), CUDA, "forward")
    assert remedy is None or "nvidia-cutlass-dsl[cu13]==4.8.1" in remedy


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({}, None),
        ({"mask": DENSE, "block_q": 0, "block_k": 0}, None),
        ({"mask": "causal()", "head_dim": 72, "v_dim": 8, "kv_heads": 2, "n_q": 250}, None),
        ({"head_dim": 192}, None),  # with a v_dim of 128, below
        ({"head_dim": 160}, "multiples of 8 up to 128 as head dims, not 160"),
        ({"head_dim": 12}, "multiples of 8 up to 128 as head dims, not 12"),
        ({"dtype": "float32"}, "not float32"),
        ({"mask": "random_blocks(0.5, block=2)"}, "some query has more than 16"),
    ],
)
def test_flex_says_what_it_does_not_take(changes, reason, hopper):
    changes = {"v_dim": 128} | changes if changes.get("head_dim") == 192 else changes
    found = find("cudnn_flex").unsupported(replace(CASE, **changes), CUDA, "backward")
    assert found is None if reason is None else reason in (found or "")


class FakeBlocks:
    """`block_sparse_attention` by its contract, computed densely; the layouts are checked."""

    def __init__(self):
        self.options = []

    def _mask(self, q, k, lists):
        size, index = lists["sparse_block_size"], lists["q2k_block_index"]
        counts = lists.get("q2k_block_nums")
        prefix = (*q.shape[:2], -(-q.shape[2] // size))
        assert index.dtype == torch.int32 and index.shape[:3] == prefix and index.is_contiguous()
        if counts is None:
            counts = torch.full(prefix, index.shape[-1])
        else:
            assert counts.dtype == torch.int32 and counts.shape == prefix
        cols = -(-k.shape[2] // size)
        kept = torch.zeros(*prefix, cols, dtype=torch.bool)
        for place in np.ndindex(*prefix):
            listed = index[place][: counts[place]].long()
            assert len(listed.unique()) == len(listed) and (listed < cols).all()
            kept[place][listed] = True
        sizes = lists.get("block_sizes")
        if sizes is None:
            assert k.shape[2] % size == 0
        else:
            assert sizes.dtype == torch.int32 and sizes.shape == (cols,)
            assert sizes.sum() == k.shape[2] and (sizes[:-1] == size).all()
        mask = kept.repeat_interleave(size, 2).repeat_interleave(size, 3)
        if sizes is not None:
            mask &= (torch.arange(size) < sizes[:, None]).flatten()
        return mask[:, :, : q.shape[2], : k.shape[2]]

    def block_sparse_attention_forward(
        self, q, k, v, *, kv_splits=1, allow_empty_block_nums, **lists
    ):
        self.options.append((kv_splits, allow_empty_block_nums, lists))
        turned = lists["layout"] == "bshd"
        q, k, v = (t.transpose(1, 2) if turned else t for t in (q, k, v))
        mask = self._mask(q, k, lists)
        assert allow_empty_block_nums or mask.any(-1).all()
        out, lse = oracle(q, k, v, mask)
        out = out.to(q.dtype)
        return (out.transpose(1, 2) if turned else out).contiguous(), lse.float()

    def block_sparse_attention_backward(self, dout, q, k, v, out, lse, **lists):
        assert lse.dtype == torch.float32 and dout.shape == out.shape
        with torch.enable_grad():
            qkv = [t.detach().requires_grad_() for t in (q, k, v)]
            inputs = {"kv_splits": 1, "allow_empty_block_nums": True}
            again, _ = self.block_sparse_attention_forward(*qkv, **inputs, **lists)
            self.options.pop()
            torch.testing.assert_close(again, out)
            return torch.autograd.grad(again, qkv, dout)


class FakeFlex:
    """`cudnn.flex_attention` by its contract, computed densely from the intervals."""

    def create_mask_plan(self, mask_func, q, k, v, *, build_backward):
        heads, width, total = mask_func.shape
        assert mask_func.dtype == torch.int32 and mask_func.is_contiguous() and width % 2
        assert heads in (1, q.shape[2]) and total == q.shape[0] * q.shape[1] and build_backward
        ends = torch.cat([torch.zeros_like(mask_func[:, :1]), mask_func], 1)
        assert (ends.diff(dim=1) >= 0).all() and ends.max() <= k.shape[1]
        keys = torch.arange(k.shape[1])
        seen = (ends[:, ::2, :, None] <= keys) & (keys < ends[:, 1::2, :, None])
        mask = seen.any(1).unflatten(1, q.shape[:2]).transpose(0, 1)
        return mask, [t.shape for t in (q, k, v)], q.dtype

    def flex_attn_func(self, q, k, v, *, mask_plan):
        mask, shapes, dtype = mask_plan
        assert [t.shape for t in (q, k, v)] == shapes and q.dtype == dtype
        out, _ = oracle(*(t.transpose(1, 2) for t in (q, k, v)), mask)
        return out.to(q.dtype).transpose(1, 2)


@pytest.fixture
def fakes(monkeypatch):
    found = SimpleNamespace(block_sparse_attention=FakeBlocks(), flex_attention=FakeFlex())
    module = lambda name: getattr(found, name.removeprefix("cudnn."))  # noqa: E731
    monkeypatch.setattr(cudnn.importlib, "import_module", module)
    return found


def agrees(peer, case):
    """Whether output and gradients are those of the mask itself."""
    extents = case.batch, case.heads, case.n_q, case.n_k, case.head_dim
    inputs = make_qkv(*extents, kv_heads=case.kv_heads, dtype=torch.float32, device=CPU)
    if case.layout == LAYOUTS[1]:
        inputs = [t.transpose(1, 2).contiguous().transpose(1, 2) for t in inputs]
    qkv = [t.detach().requires_grad_() for t in inputs]
    dout = torch.randn(qkv[0].shape, generator=torch.Generator().manual_seed(1))
    results = []
    for run in (peer.prepare(case, CPU), exact(case)):
        out = run(*qkv)
        results.append([out, *torch.autograd.grad(out, qkv, dout)])
    torch.testing.assert_close(*results, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(
    ("changes", "splits", "keys"),
    [
        ({}, "auto", set()),
        ({"mask": "random_blocks(0.5, block=64, per_head=True)", "batch": 1}, "auto", set()),
        ({"mask": "random_blocks(0.5, block=64, causal=True)"}, "auto", {"q2k_block_nums"}),
        ({"mask": "random_blocks(0.5, block=64) & ~global_rows(64)"}, "auto", {"q2k_block_nums"}),
        ({"n_k": 200}, "auto", {"block_sizes"}),
        ({"block_q": 128, "block_k": 128, "mask": "random_blocks(0.5)", "n_q": 250}, 1, set()),
        ({"block_q": 256, "block_k": 256, "mask": "random_blocks(0.5, block=128)", "n_k": 300}, 1,
         {"block_sizes"}),
    ],
)  # fmt: skip
def test_blocks_gets_the_mask_of_the_case(changes, splits, keys, layout, fakes):
    case = replace(SMALL, layout=layout, **changes)
    agrees(find("cudnn_blocks"), case)
    (found, allows_empty, lists), *_ = fakes.block_sparse_attention.options
    assert found == splits and allows_empty == ("global_rows" in case.mask)
    expected = {"q2k_block_index", "sparse_block_size", "layout", *keys}
    assert set(lists) == expected and lists["sparse_block_size"] == min(case.block_q, 128)
    assert lists["layout"] == {"head_major": "bhsd", "token_major": "bshd"}[layout]


MASKS = [
    "causal()", "local(40)", "local(3, 70)", "sliding(33)", "dense()", "causal() & ~causal()",
    "documents((80, 0, 120))", "documents((80, 0, 120)) & causal()",
    "documents(((80, 120), (100, 100)))", "local(40) | global_tokens(10)",
    "(sinks(4) | sliding(51)) & causal()", "local(25) | global_at((13, 100, 150))",
    "hstu((100, 100), targets=(50, 50))", "prefix_tree((0, 48, 80, 150), (200, 150, 150, 200))",
    "random_blocks(0.3, block=32, per_head=True)",
]  # fmt: skip


@pytest.mark.parametrize("blocks", [(32, 32), (64, 16), (16, 128)])
@pytest.mark.parametrize("mask", MASKS)
def test_intervals_are_the_mask(mask, blocks):
    for n_q, n_k in ((200, 200), (131, 200), (200, 131)):
        block_q, block_k = blocks
        case = replace(SMALL, mask=mask, n_q=n_q, n_k=n_k, block_q=block_q, block_k=block_k)
        ends = cudnn.intervals(case)
        assert ends is not None and ends.dtype == np.int32 and ends.flags.c_contiguous
        ends = np.concatenate([np.zeros_like(ends[:, :1]), ends], axis=1)
        assert (np.diff(ends, axis=1) >= 0).all() and ends.max() <= n_k
        keys = np.arange(n_k)
        seen = (ends[:, ::2, :, None] <= keys) & (keys < ends[:, 1::2, :, None])
        assert seen.sum(1).max() <= 1  # no key is in two intervals
        wanted = np.broadcast_to(case.blocks.to_dense(), (2, len(ends), n_q, n_k)).swapaxes(0, 1)
        assert (seen.any(1) == wanted.reshape(len(ends), -1, n_k)).all()


def test_intervals_are_as_few_as_the_mask_needs():
    case = replace(SMALL, n_q=200, n_k=200)
    width = {mask: cudnn.intervals(replace(case, mask=mask)).shape[1] for mask in MASKS}
    assert width["causal()"] == width["dense()"] == 1
    assert width["sliding(33)"] == width["documents((80, 0, 120)) & causal()"] == 3


@pytest.mark.parametrize("mask", ["keys_at({})", "random_blocks(count={}, block=32)"])
def test_too_many_intervals_are_none(mask):
    def case(count):
        # Every other key or block: none of them touch.
        text = mask.format(tuple(range(1, 2 * count, 2)) if "keys" in mask else count)
        return replace(SMALL, mask=text, n_q=96, n_k=6400, block_q=32, block_k=32)

    found = cudnn.intervals(case(cudnn.MOST))
    assert found is not None and found.shape[1] <= 2 * cudnn.MOST + 1
    assert cudnn.intervals(case(cudnn.MOST + 6)) is None
    if "keys" in mask:
        assert cudnn.intervals(case(cudnn.MOST + 1)) is None


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(
    "changes",
    [
        {"mask": DENSE, "block_q": 0, "block_k": 0},
        {"mask": "documents((80, 0, 176)) & causal()", "kv_heads": 2},
        {"mask": "documents(((80, 176), (100, 156)))"},
        {"mask": "sliding(30) | global_at((13, 100))", "n_q": 200, "n_k": 131},
        {"mask": "random_blocks(0.5, block=64, per_head=True)"},
    ],
)
def test_flex_gets_the_mask_of_the_case(changes, layout, fakes):
    agrees(find("cudnn_flex"), replace(SMALL, layout=layout, **changes))
