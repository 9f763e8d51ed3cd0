"""Masks laid into documents, moved, rounded: laws."""

import numpy as np
import pytest

import masks
from masks.transforms.packed import packed
from masks.transforms.snap import snap
from tests.masks.brute import brute_dense
from tests.masks.helpers import dense


def test_documents_count_from_their_first_token():
    bottom_right = masks.causal(align="bottom_right") >> packed([3, 5], [4, 9])
    assert dense(bottom_right, 8, 13).sum(1).tolist() == [2, 3, 4, 5, 6, 7, 8, 9]


def test_documents_of_several_lengths_look_different():
    """Their blocks lie alike, but the random blocks depend on the length."""
    mask = masks.random_blocks(0.4, block=16) >> packed([96, 192, 64, 160])
    assert np.array_equal(mask.build(512, block_size=32).to_dense(), brute_dense(mask, 512, 512))


def test_batch_entries_do_not_mix():
    array = np.zeros((2, 1, 100, 100), bool)
    array[1] = True
    mask = masks.mask_from(array) >> packed([[100], [100]])
    assert np.array_equal(mask.build(100, block_size=16).to_dense(), array)


def test_snap_to_large_blocks_in_slabs(monkeypatch: pytest.MonkeyPatch):
    mask = masks.local(3) - masks.butterfly(24)
    expected = brute_dense(mask >> snap((50, 70)), 161, 161)
    monkeypatch.setattr("masks.transforms.snap.PAIRS_AT_ONCE", 300)
    assert np.array_equal((mask >> snap((50, 70))).build(161).to_dense(), expected)
