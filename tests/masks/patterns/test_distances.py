"""Patterns of the distance: counts of the literature, conventions, errors, a million tokens."""

import tracemalloc

import numpy as np
import pytest

import masks
from masks import Mask
from masks.patterns.distances import diagonals, dilated, power_of_two
from masks.patterns.sparse_transformer import strided
from tests.masks.build_time import LONG, assert_builds_within
from tests.masks.patterns.token_graphs import B


def pairs(mask: Mask, n: int) -> int:
    return int(mask.build(n, block_size=32).to_dense().sum())


@pytest.mark.parametrize(("extent", "step"), [(64, 4), (65, 16), (15, 16), (99, 1)])
def test_dilated_counts(extent: int, step: int):
    w, n = extent // step, 200
    assert pairs(dilated(extent, step), n) == n * (2 * w + 1) - step * w * (w + 1)
    middle = dilated(extent, step).build(n, block_size=32).to_dense()[0, 0, n // 2]
    assert middle.sum() == 2 * w + 1  # the extent is a distance: both ends are in


def test_dilated_stays_in_its_residue_class():
    reach = dilated(12, 4).build(64, block_size=16).to_dense()[0, 0]
    for _ in range(7):
        reach = (reach.astype(int) @ reach) > 0
    q, k = np.nonzero(reach)
    assert (q % 4 == k % 4).all() and len(q) == 64 * 16


def test_dilated_by_one_is_local():
    assert dilated(40, 1).build(300, 250) == masks.local(40).build(300, 250)


@pytest.mark.parametrize("levels", [2, 5, 8])
def test_power_of_two_counts(levels: int):
    n = 1 << levels
    assert pairs(power_of_two() & masks.causal(), n) == n * levels + 1
    assert pairs(power_of_two(), n) == n + 2 * (n * (levels - 1) + 1)
    blocks = power_of_two(B).build(n * B, block_size=B)
    assert blocks.nnz == n + 2 * (n * (levels - 1) + 1) and len(blocks.bits) == 0


def test_power_of_two_of_256_blocks():
    mask = power_of_two(B)
    assert mask.build(256 * B, block_size=B).nnz == 3842
    assert (mask & masks.causal()).build(256 * B, block_size=B).nnz == 2049


def test_power_of_two_reaches_everything_earlier():
    """In as many layers as the distance has one bits; `butterfly & causal` never does."""
    reach = (power_of_two() & masks.causal()).build(64, block_size=16).to_dense()[0, 0]
    after = np.eye(64, dtype=bool)
    d = np.subtract.outer(np.arange(64), np.arange(64))
    bits = np.vectorize(lambda x: x.bit_count() if x >= 0 else 99)(d)
    for layers in range(1, 7):
        after = (after.astype(int) @ reach) > 0
        assert np.array_equal(after, bits <= layers)


def test_diagonals():
    dense = diagonals((0, 7, -3, 1000)).build(50, block_size=16).to_dense()[0, 0]
    q, k = np.nonzero(dense)
    assert set(q - k) == {0, 7, -3} and len(q) == 50 + 43 + 47
    assert diagonals((3, 1)) == diagonals((1, 3)) == diagonals(np.array([3, 1]))
    assert not diagonals(()).build(50).to_dense().any()
    past = diagonals(tuple(range(300)))
    assert past.build(300) == masks.causal().build(300)


@pytest.mark.parametrize("make", [lambda **a: dilated(64, 8, **a), lambda **a: strided(8, **a)])
def test_alignment(make):
    whole = make().build(120, block_size=16).to_dense()[0, 0]
    last = make(align="bottom_right").build(20, 120, block_size=16).to_dense()[0, 0]
    assert np.array_equal(last, whole[100:])


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: dilated(-1, 2), "extent is -1: give an integer >= 0"),
        (lambda: dilated(5, 0), "step is 0: give an integer >= 1"),
        (lambda: dilated(5, 1, align="left"), "align is 'left'"),
        (lambda: power_of_two(0), "block is 0"),
        (lambda: power_of_two(16, align="bottom_right"), "leave one of them out"),
        (lambda: diagonals(5), "distances is 5: give a tuple"),
        (lambda: diagonals((1, 2.5)), "a number in distances is 2.5"),
        (lambda: diagonals("12"), "a number in distances is '1'"),
        (lambda: diagonals((1, 3, 1)), "distances has 1 twice"),
        (lambda: strided(0), "stride is 0"),
    ],
)
def test_errors_name_value_and_remedy(make, message: str):
    with pytest.raises(ValueError, match=message):
        make()


def test_numbers_beyond_any_token():
    everything = masks.dense().build(300)
    assert dilated(2**60, 1).build(300) == everything
    assert dilated(2**60, 2**60).build(300) == masks.local(0).build(300)
    assert power_of_two(2**60).build(300) == everything
    assert strided(2**60).build(300) == masks.causal().build(300)
    assert not diagonals((2**60, -(2**60))).build(300).to_dense().any()


@pytest.mark.parametrize(
    ("mask", "milliseconds", "tiles"),
    [
        (dilated(4096, 4), 300, 3),
        (power_of_two() & masks.causal(), 300, 3),
        (power_of_two(128) & masks.causal(), 300, 1),
        (diagonals((0, 3, 1000, 100_000)), 300, 6),
    ],
    ids=str,
)
def test_a_million_tokens(mask: Mask, milliseconds: float, tiles: int):
    assert_builds_within(mask, milliseconds, tiles)
    assert len(mask.build(1 << 14).bits) <= tiles


def test_a_million_tokens_golden():
    blocks = (power_of_two() & masks.causal()).build(LONG)
    assert blocks.nnz == 106_497 and (blocks.tiles != -1).all()
    blocks = power_of_two(128).build(LONG)
    assert blocks.nnz == 8192 + 2 * (8192 * 12 + 1) and len(blocks.bits) == 0


def test_memory():
    mask = power_of_two() & masks.causal()
    mask.build(LONG // 2)  # what the first call loads
    tracemalloc.start()
    mask.build(LONG - 5)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 100 << 20
