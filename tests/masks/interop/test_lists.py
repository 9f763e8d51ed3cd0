"""Round trips through FlashAttention-4's lists, FlashInfer's and SciPy's arrays, and tensors."""

import random

import numpy as np
import pytest

import masks
from masks import BlockMask, interop
from tests.masks.interop.test_flex import any_blocks

torch = pytest.importorskip("torch")
sparse = pytest.importorskip("scipy.sparse")

SEEDS = range(40)


def lists_of(counts, indices) -> set[tuple[int, ...]]:
    """(batch, head, line, entry) of padded lists, entry by entry."""
    return {
        (*at, int(indices[(*at, i)]))
        for at in np.ndindex(*counts.shape)
        for i in range(int(counts[at]))
    }


@pytest.mark.parametrize("seed", SEEDS)
def test_fa4(seed: int):
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


@pytest.mark.parametrize("seed", SEEDS)
def test_the_lookup_that_fa4_has_to_make(seed: int):
    """The words of the docstring, in Python's integers."""
    blocks = any_blocks(random.Random(seed))
    aux = interop.to_fa4(blocks).aux_tensors
    if aux is None:
        assert not (blocks.layout() == 1).any()
        return
    code, bits = (tensor.tolist() for tensor in aux)
    block_q, block_k = blocks.block_size
    dense = blocks.to_dense()
    for b, h, i, j in zip(*np.nonzero(blocks.layout() == 1), strict=True):
        q, k = i * block_q, j * block_k + block_k // 2
        if k >= blocks.n_k:
            continue
        tile = code[b][h][i][j]
        word = bits[tile][q % block_q][k % block_k // 32]
        allowed = tile == -1 or (tile >= 0 and word >> (k % block_k % 32) & 1)
        assert allowed == dense[b, h, q, k]


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
    with pytest.raises(ValueError, match="the lists would take"):
        interop.to_fa4(masks.causal().build(100, block_size=32), limit_gib=0)
    assert interop.to_fa4(masks.dense().build(100, block_size=32)).aux_tensors is None


@pytest.mark.parametrize("seed", SEEDS)
def test_bsr(seed: int):
    blocks = any_blocks(random.Random(seed))
    for b, h in np.ndindex(blocks.batch, blocks.heads):
        bsr = interop.to_bsr(blocks, b, h)
        assert bsr.indptr.dtype == bsr.indices.dtype == torch.int32
        assert (bsr.M, bsr.R, bsr.C) == (blocks.n_q, *blocks.block_size) and bsr.N % bsr.C == 0
        dense = blocks.to_dense()[b, h]
        # SciPy's BSR has the same form, for whole blocks.
        data = np.ones((len(bsr.indices), bsr.R, bsr.C), bool) if bsr.mask is None else bsr.mask
        shape = blocks.rows * bsr.R, bsr.N
        theirs = sparse.bsr_array(
            (np.asarray(data), bsr.indices.numpy(), bsr.indptr.numpy()), shape
        ).toarray()
        assert np.array_equal(theirs[: bsr.M, : blocks.n_k], dense)
        assert not theirs[:, blocks.n_k :].any()
        again = interop.from_bsr(
            bsr.indptr, bsr.indices, blocks.n_q, blocks.n_k, blocks.block_size, bsr.mask
        )
        assert again == BlockMask.from_dense(dense, blocks.block_size)
        packed = bsr.packed_mask()
        if packed is None:
            assert (blocks.layout()[b, h] != 1).all()
            continue
        at = 0
        for row in range(blocks.rows):  # one query after the other, over the blocks of its row
            begin, end = bsr.indptr[row : row + 2].tolist()
            bits = [
                bool(theirs[q, col * bsr.C + k])
                for q in range(row * bsr.R, min(bsr.M, (row + 1) * bsr.R))
                for col in bsr.indices[begin:end].tolist()
                for k in range(bsr.C)
            ]
            size = -(-len(bits) // 8)
            found = np.unpackbits(packed[at : at + size].numpy(), bitorder="little")
            assert found[: len(bits)].astype(bool).tolist() == bits
            at += size
        assert at == len(packed)


def test_bsr_without_a_mask_and_errors():
    blocks = masks.random_blocks(0.5, block=32).build(90, 128, 32)
    bsr = interop.to_bsr(blocks)
    assert bsr.mask is None and bsr.packed_mask() is None
    assert interop.to_bsr(masks.dense().build(64, 100, 32)).mask is not None  # for the padded keys
    again = interop.from_bsr(bsr.indptr.numpy(), bsr.indices.numpy(), 90, 128, 32)
    assert again == blocks
    with pytest.raises(ValueError, match="give 6 numbers that end with"):
        interop.from_bsr(bsr.indptr, bsr.indices, 160, 128, 32)
    with pytest.raises(ValueError, match=r"mask has shape \(1, 32, 32\): give"):
        interop.from_bsr(bsr.indptr, bsr.indices, 90, 128, 32, np.ones((1, 32, 32), bool))
    with pytest.raises(ValueError, match="listed twice"):
        interop.from_bsr(np.array([0, 2]), np.array([1, 1]), 32, 64, 32)
    with pytest.raises(ValueError, match="head is 1: give an integer <= 0"):
        interop.to_bsr(blocks, head=1)
    with pytest.raises(ValueError, match="FlashInfer's mask would take"):
        interop.to_bsr(masks.causal().build(100, block_size=32), limit_gib=0)


@pytest.mark.parametrize("seed", SEEDS)
def test_scipy(seed: int):
    blocks = any_blocks(random.Random(seed))
    dense, layout = blocks.to_dense(), blocks.layout()
    for b, h in np.ndindex(blocks.batch, blocks.heads):
        matrix = interop.to_scipy(blocks, b, h)
        assert matrix.dtype == bool and matrix.has_canonical_format
        assert np.array_equal(matrix.toarray(), dense[b, h])
        assert np.array_equal(interop.to_scipy_blocks(blocks, b, h).toarray(), layout[b, h])
        again = interop.from_scipy(matrix, blocks.block_size)
        assert again == BlockMask.from_dense(dense[b, h], blocks.block_size)


@pytest.mark.parametrize("form", ["csr_matrix", "coo_array", "csc_array", "bsr_array"])
def test_scipy_forms(form: str):
    dense = np.random.default_rng(0).random((96, 80)) < 0.02
    matrix = getattr(sparse, form)(dense.astype(np.float32))
    assert interop.from_scipy(matrix, 16) == BlockMask.from_dense(dense, 16)


def test_scipy_zeros_and_repetitions():
    data, q, k = np.array([1.0, 0.0, 2.0, 3.0]), [5, 6, 7, 7], [1, 1, 2, 2]
    dense = np.zeros((40, 30), bool)
    dense[[5, 7], [1, 2]] = True
    matrix = sparse.coo_array((data, (q, k)), (40, 30))
    assert interop.from_scipy(matrix, 16) == BlockMask.from_dense(dense, 16)
    assert interop.from_scipy(sparse.csr_array((40, 30), dtype=bool), 16).nnz == 0
    with pytest.raises(ValueError, match="matrix is ndarray of shape"):
        interop.from_scipy(dense)
    with pytest.raises(ValueError, match="the allowed pairs would take"):
        interop.to_scipy(masks.causal().build(1 << 20))


def test_scipy_at_many_tokens():
    """Nothing grows with the square of the length."""
    blocks = masks.local(1).build(1 << 18)
    matrix = interop.to_scipy(blocks)
    assert matrix.nnz == 3 * (1 << 18) - 2
    assert interop.from_scipy(matrix) == blocks


def test_tensors_are_arrays_too():
    dense = torch.rand(70, 60) < 0.3
    assert BlockMask.from_dense(dense, 32) == BlockMask.from_dense(dense.numpy(), 32)
    with pytest.raises(ValueError, match="float32"):
        BlockMask.from_dense(torch.rand(4, 4, requires_grad=True))
