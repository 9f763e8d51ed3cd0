"""The block lists of FlashAttention-4."""

import random

import numpy as np
import pytest

import masks
from experiments.bench.peers.fa4 import to_fa4
from tests.masks.cases import any_blocks
from tests.notes import note

torch = pytest.importorskip("torch")


def lists_of(counts, indices) -> set[tuple[int, ...]]:
    """(batch, head, line, entry) of padded lists, entry by entry."""
    return {
        (*at, int(indices[(*at, i)]))
        for at in np.ndindex(*counts.shape)
        for i in range(int(counts[at]))
    }


def check_fa4(seed: int):
    blocks = any_blocks(random.Random(seed))
    layout = blocks.layout()
    mask = to_fa4(blocks)
    for tensors, codes in ((mask.forward, layout), (mask.backward, layout.swapaxes(-1, -2))):
        assert tensors.block_size == blocks.block_size
        for code, name in ((1, "mask"), (2, "full")):
            counts = getattr(tensors, f"{name}_block_cnt")
            indices = getattr(tensors, f"{name}_block_idx")
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


def test_fa4():
    for seed in range(15):
        with note(seed):
            check_fa4(seed)


def test_fa4_fields_and_errors():
    names = "mask_block_cnt mask_block_idx full_block_cnt full_block_idx cu_total_m_blocks "
    names += "cu_block_idx_offsets block_size dq_write_order dq_write_order_full spt"
    mask = to_fa4(masks.causal().build(100, block_size=32))
    assert " ".join(mask.forward._fields) == names
    with pytest.raises(ValueError, match="the lists would take"):
        to_fa4(masks.causal().build(100, block_size=32), limit_gib=0)
    assert to_fa4(masks.dense().build(100, block_size=32)).aux_tensors is None
