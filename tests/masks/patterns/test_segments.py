"""Dilated segments: golden counts, heads that take turns, few tiles."""

import numpy as np
import pytest

from masks.patterns.segments import block_diagonal, longnet


def test_golden_count():
    dense = longnet(16, 4).build(64, block_size=16).to_dense()[0, 0]
    assert dense.sum() == 64 and dense.any(1).sum() == 16


@pytest.mark.parametrize(("n", "w", "r"), [(256, 32, 2), (256, 64, 8), (512, 512, 16), (96, 32, 1)])
def test_count(n: int, w: int, r: int):
    dense = longnet(w, r, offset=r - 1).build(n, block_size=32).to_dense()
    assert dense.sum() == n * w // r**2 and dense.any(3).sum() == n // r


def test_ratio_1_is_block_diagonal():
    assert longnet(50, 1).build(333) == block_diagonal(50).build(333)


def test_heads_take_turns():
    mask = longnet(32, 4, offset=1, per_head=True)
    blocks = mask.build(100, block_size=16)
    assert blocks.heads == 4
    dense = blocks.to_dense()[0]
    for head in range(4):
        alone = longnet(32, 4, offset=(1 + head) % 4).build(100, block_size=16)
        assert np.array_equal(dense[head], alone.to_dense()[0, 0])
    assert dense.any((0, 2)).all()  # together they cover every query
    assert mask.build(100, heads=8).heads == 8
    with pytest.raises(ValueError, match="repeats after 4"):
        mask.build(100, heads=6)


def test_empty_blocks_are_known():
    """A ratio beyond the block leaves whole rows and columns of blocks empty."""
    blocks = longnet(1 << 20, 1024).build(1 << 20)
    assert blocks.nnz == 1024**2 and len(blocks.bits) == 1


@pytest.mark.parametrize(("w", "r", "tiles"), [(2048, 2, 1), (4096, 8, 1), (2000, 4, 48)])
def test_as_many_tiles_at_any_length(w: int, r: int, tiles: int):
    """One where blocks divide segments, and else as many as ways to lie across their ends."""
    for n in (1 << 17, 1 << 19):
        assert len(longnet(w, r).build(n).bits) == tiles


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: longnet(0, 1), "segment is 0"),
        (lambda: longnet(8, 0), "ratio is 0"),
        (lambda: longnet(8, 2, 2), "offset is 2: give an integer <= 1"),
        (lambda: longnet(8, 2, per_head=1), "per_head is 1: give True or False"),
    ],
)
def test_errors(make, message: str):
    with pytest.raises(ValueError, match=message):
        make()
