"""Masks laid into documents, moved, rounded: laws."""

import random

import numpy as np
import pytest

import masks
from masks.transforms.packed import packed
from masks.transforms.snap import snap
from tests.masks.brute import brute_dense
from tests.masks.cases import BLOCKS, composition
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


@pytest.mark.parametrize("seed", range(40))
def test_snap_encloses(seed: int):
    rng = random.Random(seed)
    n_q, n_k = rng.choice([50, 97, 128]), rng.choice([64, 130])
    size = rng.choice([1, 9, 16, 48]), rng.choice([7, 16, 32])
    mask = composition(rng, n_q, n_k, 2)
    block_size = rng.choice(BLOCKS), rng.choice(BLOCKS)
    outer, middle, inner = (
        m.build(n_q, n_k, block_size).to_dense()
        for m in (mask >> snap(size), mask, mask >> snap(size, "inward"))
    )
    assert (inner <= middle).all() and (middle <= outer).all()
    for cells in (mask >> snap(size), mask >> snap(size, "inward")):
        assert (
            brute_dense(cells >> snap(size), n_q, n_k).sum()
            == cells.build(n_q, n_k).to_dense().sum()
        )


def test_snap_to_the_blocks_of_the_grid_has_no_tiles():
    mask = masks.causal() & masks.local(300)
    blocks = (mask >> snap(128)).build(1000)
    assert len(blocks.bits) == 0 and blocks.nnz == mask.build(1000).nnz
    inward = (mask >> snap(128, "inward")).build(1000)
    assert inward.nnz == (mask.build(1000).layout() == 2).sum()


def test_snap_to_large_blocks_in_slabs(monkeypatch: pytest.MonkeyPatch):
    mask = masks.local(3) - masks.butterfly(24)
    expected = brute_dense(mask >> snap((50, 70)), 161, 161)
    monkeypatch.setattr("masks.transforms.snap.PAIRS_AT_ONCE", 300)
    assert np.array_equal((mask >> snap((50, 70))).build(161).to_dense(), expected)


def test_attributes():
    rows = masks.random_blocks(0.5, per_head=True) >> packed([[30, 40], [10, 60]])
    assert rows.batch == 2 and rows.per_head
    assert rows.build(70, heads=3).layout().shape == (2, 3, 1, 1)
