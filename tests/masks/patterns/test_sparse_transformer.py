"""Strided and fixed attention: counts of the published code, two layers, a million tokens."""

import numpy as np
import pytest

import masks
from masks.patterns.sparse_transformer import fixed, strided
from tests.masks.build_time import assert_builds_within


def reference(n: int, stride: int, groups: range | None) -> np.ndarray:
    """Query by query: the strided mask, or with `groups` of keys in a chunk the fixed one."""
    dense = np.zeros((n, n), bool)
    for q in range(n):
        if groups is None:
            dense[q, max(0, q - stride + 1) : q + 1] = True
            dense[q, q % stride : q + 1 : stride] = True
        else:
            dense[q, q - q % stride : q + 1] = True
            for place in groups:
                dense[q, place : q + 1 : stride] = True
    return dense


@pytest.mark.parametrize(("n", "stride", "count"), [(64, 8, 708), (1024, 32, 48144)])
def test_strided(n: int, stride: int, count: int):
    dense = strided(stride).build(n).to_dense()[0, 0]
    assert np.array_equal(dense, reference(n, stride, None))
    closed = n * stride - stride * (stride - 1) // 2 + n * (n // stride - 1) // 2
    assert dense.sum() == count == closed


def test_strided_of_the_published_size():
    assert strided(128).build(1024).to_dense().sum() == 126_528


@pytest.mark.parametrize(
    ("n", "stride", "summary", "count"),
    [(64, 8, 1, 512), (1024, 32, 8, 143_872), (1024, 128, 8, 94_720)],
)
def test_fixed(n: int, stride: int, summary: int, count: int):
    dense = fixed(stride, summary).build(n).to_dense()[0, 0]
    assert np.array_equal(dense, reference(n, stride, range(stride - summary, stride)))
    closed = n * (stride + 1) // 2 + summary * n * (n // stride - 1) // 2
    assert dense.sum() == count == closed


@pytest.mark.parametrize("mask", [strided(8), fixed(8, 1)], ids=str)
def test_two_layers_reach_everything_earlier(mask: masks.Mask):
    once = mask.build(64, block_size=16).to_dense()[0, 0].astype(int)
    assert np.array_equal(once @ once > 0, np.tri(64, dtype=bool))


def test_heads_take_turns():
    """Head h has the h-th group of keys from the end of the chunk."""
    blocks = fixed(16, 3, vertices=4).build(100, block_size=16, heads=8)
    assert blocks.heads == 8
    dense = blocks.to_dense()[0]
    for head, first in enumerate([13, 10, 7, 4, 13, 10, 7, 4]):
        assert np.array_equal(dense[head], reference(100, 16, range(first, first + 3)))
    assert fixed(16, 3, vertices=4).build(100).heads == 4  # after which it repeats
    assert not fixed(16, 3).per_head and fixed(16, 3).build(100, heads=8).heads == 1


def test_extremes():
    causal = masks.causal().build(300)
    assert fixed(7, 7).build(300) == causal
    assert fixed(2**60, 0).build(300) == causal
    assert fixed(1, 0).build(300) == masks.local(0).build(300)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: fixed(0, 0), "stride is 0"),
        (lambda: fixed(8, 9), "summary is 9: give an integer <= 8"),
        (lambda: fixed(8, -1), "summary is -1"),
        (lambda: fixed(8, 1, 0), "vertices is 0"),
        (lambda: fixed(8, 3, 3), "vertices is 3: give at most 2"),
        (lambda: fixed(8, 1, 2).build(64, heads=3), "repeats after 2"),
    ],
)
def test_errors_name_value_and_remedy(make, message: str):
    with pytest.raises(ValueError, match=message):
        make()


@pytest.mark.parametrize("mask", [fixed(65536, 128), fixed(262144, 20, vertices=2)], ids=str)
def test_a_million_tokens(mask: masks.Mask):
    assert_builds_within(mask, 300, tiles=9)
