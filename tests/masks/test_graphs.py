"""Graphs of token blocks: golden draws, uniformity, spectral gaps."""

import itertools
import math
import random
from dataclasses import replace

import numpy as np
import pytest

import masks
from masks import Mask
from masks.patterns.graphs import butterfly, expander, random_blocks, random_regular, spectral_gap
from masks.registry import named
from tests.masks.helpers import B, graph


@pytest.mark.parametrize(
    ("mask", "n", "rows"),
    [
        (random_blocks(count=3, block=B, seed=5), 10, [[0, 5, 8], [2, 3, 6], [1, 5, 9]]),
        (random_blocks(count=3, block=B, seed=5, causal=True), 8, [[0], [0, 1], [0, 1, 2]]),
        (
            random_blocks(count=3, block=B, seed=5, per_layer=True).layer(2),
            10,
            [[0, 1, 5], [2, 3, 6]],
        ),
        (random_regular(4, B, seed=3), 20, [[0, 7, 12, 16, 17], [1, 2, 8, 14, 16]]),
    ],
    ids=str,
)
def test_golden_draws(mask: Mask, n: int, rows: list[list[int]]):
    """The same on every platform and in every version."""
    blocks = graph(mask, n)[0]
    assert [np.flatnonzero(row).tolist() for row in blocks[: len(rows)]] == rows


@pytest.mark.parametrize("mask", [random_blocks(0.3), masks.bigbird()], ids=str)
def test_no_global_state(mask: Mask):
    random.seed(3)
    np.random.seed(3)
    before = random.getstate(), np.random.get_state()[1].tobytes()  # type: ignore[index]
    first = mask.build(8192, heads=2)
    assert before == (random.getstate(), np.random.get_state()[1].tobytes())  # type: ignore[index]
    np.random.seed(4)
    assert (mask & masks.dense()).build(8192, heads=2) == first


def test_every_set_is_equally_likely():
    """Chi-square over the 20 subsets of 3 of 6, from both sides of one half; 99.9 % limit."""
    for count, limit in ((2, 36.1), (3, 43.8), (4, 36.1)):
        sets = {frozenset(c): 0 for c in itertools.combinations(range(6), count)}
        rows = graph(random_blocks(count=count, block=B, seed=1), 20_000, cols=6)[0]
        for row in rows:
            sets[frozenset(np.flatnonzero(row).tolist())] += 1
        expected = len(rows) / len(sets)
        assert sum((n - expected) ** 2 / expected for n in sets.values()) < limit


def test_rows_heads_layers_and_seeds_are_independent():
    """Shared key blocks of two draws of 8 of 64: 1 in the mean, so about 500 in 500 rows."""
    options = {"count": 8, "block": B}
    a, b = (
        graph(random_blocks(**options, seed=seed, per_head=True), 500, 4, cols=64)
        for seed in (0, 1)
    )
    layered = random_blocks(**options, per_layer=True)
    c, d = (graph(layered.layer(i), 500, cols=64)[0] for i in (0, 1))
    pairs = [(a[0], a[1]), (a[2], a[3]), (a[0], b[0]), (a[0, 1:], a[0, :-1]), (a[1], b[0])]
    for x, y in [*pairs, (a[0], c), (c, d)]:
        assert 0.8 < (x & y).sum() / len(x) < 1.2


@pytest.mark.parametrize("options", [{"count": 5}, {"density": 0.3}, {"density": 0.9}], ids=str)
def test_a_longer_sequence_keeps_causal_draws(options: dict):
    mask = random_blocks(**options, block=B, causal=True, seed=4)
    long = graph(mask, 90)[0]
    for rows, cols in ((60, 60), (90, 20), *((x + 1, x) for x in range(1, 20)), (33, 90)):
        short = np.zeros((rows, cols), bool)
        short[mask.pairs(0, np.arange(rows), cols)] = True  # `build` would crop the long one
        assert np.array_equal(short, long[:rows, :cols])


@pytest.mark.parametrize(
    ("size", "factors", "density"),
    [(32, 3, 0.125), (16, 2, 0.1875), (16, 3, 0.25), (16, 4, 0.3125), (8, 2, 0.375), (8, 3, 0.5)],
)
def test_butterfly_of_a_size_is_the_published_one(size: int, factors: int, density: float):
    """`butterfly_size`, `n_factors` and the densities of its tests, at any length."""
    mask = butterfly(size=size, levels=factors)
    for n in (1000, 1024, 4096):
        assert mask.build(n) == butterfly(-(-n // size), factors).build(n)
    assert mask.build(4096, block_size=B).density == density


def laplacian_gap(adjacency: np.ndarray) -> float:
    """By the definition, self loops aside."""
    edges = adjacency.astype(float) - np.eye(len(adjacency))
    return float(np.linalg.eigvalsh(np.diag(edges.sum(1)) - edges)[1])


def test_regular_is_uniform():
    """In 400 draws every pair of 9 blocks is as likely as the next: within five deviations."""
    total = sum(graph(random_regular(2, B, seed=seed), 9)[0].astype(int) for seed in range(400))
    pairs = total[np.triu_indices(9, 1)]
    expected = 400 * 2 / 8
    assert np.abs(pairs - expected).max() < 5 * math.sqrt(expected)


@pytest.mark.parametrize(("degree", "n"), [(4, 11), (4, 100), (6, 30), (8, 200)])
def test_expander(degree: int, n: int):
    blocks = graph(expander(degree, B), n)[0]
    assert laplacian_gap(blocks) >= degree - 2 * math.sqrt(degree - 1) - 0.1
    assert (blocks.sum(0) == degree + 1).all()


def test_expander_is_drawn_again():
    """With a bound that a fifth of the draws meets; `random_regular` takes the first draw."""
    rejected = 0
    for seed in range(20):
        regular = random_regular(4, B, seed=seed)
        first = graph(regular, 40)[0]
        again = named(replace(regular, gap=0.75), f"again {seed}", "expander", {}, spelled=True)
        blocks = graph(again, 40)[0]
        assert laplacian_gap(blocks) >= 0.75
        assert np.array_equal(first, blocks) == (laplacian_gap(first) >= 0.75)
        rejected += laplacian_gap(first) < 0.75
    assert 2 < rejected < 20
    hopeless = named(replace(regular, gap=2.0), "too much", "expander", {}, spelled=True)
    with pytest.raises(ValueError, match=r"no graph of 40 .* in 100 draws: give another seed"):
        hopeless.build(40 * B, block_size=B)


@pytest.mark.parametrize("degree", [4, 8, 16])
def test_spectral_gap_by_lanczos(degree: int):
    blocks = graph(random_regular(degree, B), 700)[0]
    exact = laplacian_gap(blocks)
    neighbours = np.nonzero(blocks & ~np.eye(700, dtype=bool))[1].reshape(700, degree)
    assert exact - 1e-6 <= spectral_gap(neighbours) < exact + 0.05
