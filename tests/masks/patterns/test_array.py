"""Arrays as masks."""

import numpy as np
import pytest

import masks
from masks import BlockMask


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
