"""Round trips through the block lists of FlashAttention-4."""

import random

import numpy as np
import pytest

import masks
from masks import interop
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
    mask = interop.to_fa4(blocks)
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
    formula = torch.from_numpy(dense)
    again = interop.from_fa4(
        mask.forward, blocks.n_q, blocks.n_k, mask_mod=lambda b, h, q, k: formula[b, h, q, k]
    )
    assert again == blocks
    tables = {"aux_tensors": mask.aux_tensors}
    assert interop.from_fa4(mask.forward, blocks.n_q, blocks.n_k, **tables) == blocks
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
    mask = interop.to_fa4(masks.causal().build(100, block_size=32))
    assert " ".join(mask.forward._fields) == names
    with pytest.raises(ValueError, match="4 blocks are partial: give aux_tensors, or the mask_mod"):
        interop.from_fa4(mask.forward, 100, 100)
    with pytest.raises(ValueError, match="block_size is None"):
        interop.from_fa4(mask.forward._replace(block_size=None), 100, 100)
    with pytest.raises(ValueError, match="4 query blocks, but 900 queries need 29"):
        interop.from_fa4(mask.forward, 900, 100, aux_tensors=mask.aux_tensors)
    with pytest.raises(ValueError, match="no tile"):
        none = torch.full_like(mask.aux_tensors[0], -2)
        interop.from_fa4(mask.forward, 100, 100, aux_tensors=[none, mask.aux_tensors[1]])
    larger = interop.to_fa4(masks.local(9).build(200, block_size=32)).aux_tensors
    code, bits = mask.aux_tensors
    for aux in (larger, [code, bits[:, :16]], [code, bits[:1]]):  # they would be taken for others
        with pytest.raises(ValueError, match=r"give those of these lists, \(1, 1, 4, 4\)"):
            interop.from_fa4(mask.forward, 100, 100, aux_tensors=aux)
    with pytest.raises(ValueError, match="the lists would take"):
        interop.to_fa4(masks.causal().build(100, block_size=32), limit_gib=0)
    assert interop.to_fa4(masks.dense().build(100, block_size=32)).aux_tensors is None
