"""Round trips through the sparse arrays of SciPy."""

import random

import numpy as np
import pytest

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
