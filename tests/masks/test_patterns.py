"""Patterns and presets: golden rows, formulas, and the ways to give them."""

import numpy as np
import pytest

import masks
from masks import BlockMask
from masks.patterns.canvas import neighborhood
from masks.patterns.documents import documents, documents_from_ids, documents_from_offsets
from tests.masks.helpers import dense


def test_a_padding_array_says_what_to_give_instead():
    padding = np.ones((2, 1, 1, 64), bool)
    padding[1, ..., 50:] = False
    with pytest.raises(ValueError) as error:
        masks.mask_from(padding).build(64)
    text = str(error.value)
    assert "shape (2, 1, 1, 64), which is a mask of one query" in text
    assert "lengths= to sparseflash.attention" in text
    assert "broadcast the array to (2, 1, 64, 64)" in text
    wide = masks.mask_from(np.broadcast_to(padding, (2, 1, 64, 64)))
    assert wide.build(64, block_size=16).nnz == 2 * 16
    assert masks.mask_from(padding).build(1, 64).nnz == 2  # one query is a mask, too
    with pytest.raises(ValueError, match="build it for n_q=1, n_k=64"):
        masks.mask_from(padding).build(64, 80)


def test_an_array_of_padded_sequences_says_so():
    """(B, n_k) cannot be told from a mask of B queries."""
    with pytest.raises(ValueError) as error:
        masks.mask_from(np.ones((2, 64), bool)).build(64)
    text = str(error.value)
    assert "build it for n_q=2, n_k=64; if its rows are 2 padded sequences" in text
    assert "as lengths= to sparseflash.attention, or an array (2, 1, 64, 64)" in text
    for other in (np.ones((2, 63), bool), np.ones((3, 2, 64), bool)):
        with pytest.raises(ValueError, match=r"build it for n_q=2, n_k=6\d$"):
            masks.mask_from(other).build(64)


def test_tensors_are_arrays_too():
    torch = pytest.importorskip("torch")
    dense = torch.rand(70, 60) < 0.3
    assert BlockMask.from_dense(dense, 32) == BlockMask.from_dense(dense.numpy(), 32)
    with pytest.raises(ValueError, match="float32"):
        BlockMask.from_dense(torch.rand(4, 4, requires_grad=True))


@pytest.mark.parametrize("as_array", [list, tuple, np.array])
def test_ways_to_give_documents(as_array):
    mask = documents((3, 5, 8))
    assert documents(as_array([3, 5, 8])) == mask
    assert documents_from_offsets(as_array([0, 3, 8, 16])) == mask
    assert documents_from_ids(as_array([7] * 3 + [9] * 5 + [2] * 8)) == mask
    cross = documents((3, 5, 8), key_lengths=(1, 0, 4))
    assert documents_from_offsets(as_array([0, 3, 8, 16]), as_array([0, 1, 1, 5])) == cross
    assert documents(16) == documents([16]) == documents([[16]])
    rows = documents(as_array([[3, 5], [8, 0]]))
    assert rows.batch == 2 and rows == documents_from_offsets([[0, 3, 8], [0, 8, 8]])


def natten_start(i: int, kernel: int, stride: int, length: int) -> int:
    """Reference 1.11: the formula of NATTEN's kernels."""
    left, right = kernel // 2, kernel // 2 + kernel % 2 - 1
    leader = min(i // stride * stride + stride // 2, length - 1)
    return max(leader - left, 0) + (leader + right >= length) * (length - right - leader - 1)


@pytest.mark.parametrize("length", [1, 2, 7, 16, 23])
def test_formula_of_natten(length: int):
    for kernel in range(1, length + 1):
        for stride in range(1, kernel + 1):
            for i, row in enumerate(dense(neighborhood((length,), kernel, stride=stride), length)):
                start = natten_start(i, kernel, stride, length)
                assert np.flatnonzero(row).tolist() == list(range(start, start + kernel))
