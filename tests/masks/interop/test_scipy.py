"""Round trips through the sparse arrays of SciPy."""

import random

import numpy as np
import pytest

import masks
from masks import BlockMask, interop
from tests.masks.cases import any_blocks
from tests.notes import note

sparse = pytest.importorskip("scipy.sparse")


def check_scipy(seed: int):
    blocks = any_blocks(random.Random(seed))
    dense, layout = blocks.to_dense(), blocks.layout()
    for b, h in np.ndindex(blocks.batch, blocks.heads):
        matrix = interop.to_scipy(blocks, b, h)
        assert matrix.dtype == bool and matrix.has_canonical_format
        assert np.array_equal(matrix.toarray(), dense[b, h])
        assert np.array_equal(interop.to_scipy_blocks(blocks, b, h).toarray(), layout[b, h])
        again = interop.from_scipy(matrix, blocks.block_size)
        assert again == BlockMask.from_dense(dense[b, h], blocks.block_size)


def test_scipy():
    for seed in range(15):
        with note(seed):
            check_scipy(seed)


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
    with pytest.raises(ValueError, match="n_k is 0: give an integer >= 1"):
        interop.from_scipy(sparse.csr_array((40, 0)))
    with pytest.raises(ValueError, match="the allowed pairs would take"):
        interop.to_scipy(masks.causal().build(1 << 20))


@pytest.mark.parametrize("form", ["coo_array", "csr_array", "csc_array"])
def test_scipy_sums_entries_at_one_place(form: str):
    """As `toarray` does: 1 and -1 allow nothing, True and True allow. The matrix stays as it is."""
    dense = np.zeros((40, 30), bool)
    dense[7, 2] = True
    data, q, k = np.array([1, -1, 2, 3]), np.array([5, 5, 7, 7]), np.array([1, 1, 2, 2])
    matrix = _with_repetitions(form, data, q, k)
    assert matrix.nnz == 4 and np.array_equal(matrix.toarray() != 0, dense)
    assert interop.from_scipy(matrix, 16) == BlockMask.from_dense(dense, 16)
    assert matrix.nnz == 4
    dense[5, 1] = True
    both = _with_repetitions(form, np.ones(4, bool), q, k)
    assert interop.from_scipy(both, 16) == BlockMask.from_dense(dense, 16)


def _with_repetitions(form: str, data: np.ndarray, q: np.ndarray, k: np.ndarray):
    """(40, 30), from entries that ascend by row and by column."""
    if form == "coo_array":
        return sparse.coo_array((data, (q, k)), (40, 30))
    major, minor, extent = (q, k, 40) if form == "csr_array" else (k, q, 30)
    ptr = np.searchsorted(major, np.arange(extent + 1))
    return getattr(sparse, form)((data, minor, ptr), (40, 30))


def test_scipy_at_many_tokens():
    """Nothing grows with the square of the length."""
    blocks = masks.local(1).build(1 << 18)
    matrix = interop.to_scipy(blocks)
    assert matrix.nnz == 3 * (1 << 18) - 2
    assert interop.from_scipy(matrix) == blocks
