"""Round trips through the sparse arrays of SciPy."""

import random

import numpy as np
import pytest

import masks
from masks import BlockMask, interop
from tests.masks.cases import any_blocks

sparse = pytest.importorskip("scipy.sparse")


@pytest.mark.parametrize("seed", range(40))
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
