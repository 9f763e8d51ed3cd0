"""Butterflies: the closed-form counts of the literature, and the graph that they are."""

import numpy as np
import pytest

import masks
from masks import global_tokens
from masks.patterns.butterfly import butterfly, pixelfly
from tests.masks.patterns.token_graphs import B, graph, nnz


@pytest.mark.parametrize(
    ("n", "count"), [(2, 4), (8, 32), (16, 80), (32, 192), (64, 448), (256, 2304), (4096, 53248)]
)
def test_butterfly(n: int, count: int):
    levels = n.bit_length() - 1
    assert nnz(masks.butterfly(B), n) == count == n * (levels + 1)
    for f in range(levels):
        assert nnz(masks.butterfly(B, f), n) == n * (f + 1)


@pytest.mark.parametrize(("n", "count"), [(8, 20), (16, 48), (64, 256), (512, 2816)])
def test_causal_butterfly(n: int, count: int):
    assert nnz(masks.butterfly(B) & masks.causal(), n) == count == n * n.bit_length() // 2 + n // 2


def test_butterfly_is_a_hypercube():
    """After t layers a block reaches those at most t bits away."""
    reach = masks.butterfly(B).build(64 * B, block_size=B).layout()[0, 0] > 0
    after = np.eye(64, dtype=bool)
    for count in (7, 22, 42, 57, 63, 64):
        after = (after.astype(int) @ reach) > 0
        assert (after.sum(1) == count).all()
    assert np.array_equal(reach, reach.T)


@pytest.mark.parametrize(
    ("size", "factors", "density"),
    [(32, 3, 0.125), (16, 2, 0.1875), (16, 3, 0.25), (16, 4, 0.3125), (8, 2, 0.375), (8, 3, 0.5)],
)
def test_butterfly_of_a_size_is_the_published_one(size: int, factors: int, density: float):
    """`butterfly_size`, `n_factors` and the densities of its tests, at any length."""
    for n in (1024, 4096):
        blocks = butterfly(size=size, levels=factors).build(n, block_size=B)
        assert blocks.density == density and len(blocks.bits) == 0
        assert butterfly(B, factors).build(size * B, block_size=B).density == density
        assert blocks == butterfly(n // size, factors).build(n, block_size=B)
    dense = butterfly(size=size, levels=factors).build(1000, block_size=B).to_dense()[0, 0]
    assert np.array_equal(dense, butterfly(-(-1000 // size), factors).build(1000).to_dense()[0, 0])


@pytest.mark.parametrize(("n", "count"), [(8, 40), (16, 102), (64, 562), (512, 6124)])
def test_pixelfly(n: int, count: int):
    levels = n.bit_length() - 1
    assert graph(pixelfly(B), n).sum() == count == n * (levels + 3) - 2 * levels - 2
    assert pixelfly(B, 2, 3) == butterfly(B, 2) | global_tokens(3 * B)


def test_truncated_butterfly_falls_apart():
    for levels in range(6):
        parts = np.linalg.matrix_power(graph(butterfly(B, levels), 32)[0].astype(float), 8) > 0
        assert (parts == (np.arange(32)[:, None] >> levels == np.arange(32) >> levels)).all()
