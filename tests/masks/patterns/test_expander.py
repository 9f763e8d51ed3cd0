"""Butterflies of a given size, regular graphs, expanders, hubs, windows with global tokens."""

import math
from dataclasses import replace

import numpy as np
import pytest

from masks import Mask, causal
from masks.patterns.bigbird import bigbird, etc_, longformer
from masks.patterns.butterfly import butterfly, pixelfly
from masks.patterns.expander import expander, random_regular, spectral_gap
from masks.patterns.random_blocks import hubs
from masks.registry import named
from tests.masks.build_time import assert_builds_within
from tests.masks.patterns.token_graphs import B, graph


def laplacian_gap(adjacency: np.ndarray) -> float:
    """By the definition, self loops aside."""
    edges = adjacency.astype(float) - np.eye(len(adjacency))
    return float(np.linalg.eigvalsh(np.diag(edges.sum(1)) - edges)[1])


@pytest.mark.parametrize("degree", [2, 4, 8, 12])
@pytest.mark.parametrize("n", [25, 26, 64, 255])
def test_regular(degree: int, n: int):
    for seed in range(5):
        blocks = graph(random_regular(degree, B, seed=seed), n)[0]
        assert np.array_equal(blocks, blocks.T) and blocks.diagonal().all()
        assert (blocks.sum(0) == degree + 1).all() and blocks.sum() == n * (degree + 1)


def test_regular_of_few_blocks_is_complete():
    assert graph(random_regular(8, B), 16).all() and not graph(random_regular(8, B), 17).all()
    assert graph(random_regular(2, B), 4).all() and not graph(random_regular(2, B), 5).all()
    assert graph(expander(4, B), 10).all() and not graph(expander(4, B), 11).all()


def test_regular_golden():
    """The same on every platform and in every version."""
    blocks = graph(random_regular(4, B, seed=3), 20)[0]
    rows = [np.flatnonzero(row).tolist() for row in blocks[:3]]
    assert rows == [[0, 7, 12, 16, 17], [1, 2, 8, 14, 16], [1, 2, 8, 10, 19]]


def test_regular_is_uniform():
    """In 4000 draws every pair of 9 blocks is as likely as the next: within five deviations."""
    total = sum(graph(random_regular(2, B, seed=seed), 9)[0].astype(int) for seed in range(1000))
    pairs = total[np.triu_indices(9, 1)]
    expected = 1000 * 2 / 8
    assert np.abs(pairs - expected).max() < 5 * math.sqrt(expected)


def test_heads_and_layers_differ():
    for make in (random_regular, expander):
        blocks = graph(make(4, B, per_head=True), 40, heads=3)
        assert len({head.tobytes() for head in blocks}) == 3
    mask = hubs(3, block=B, per_layer=True)
    assert mask.per_layer and not mask.layer(2).per_layer
    assert str(mask.layer(2)) == "hubs(3, block=16, per_layer=True, layer=2)"
    assert (graph(mask.layer(0), 40) != graph(mask.layer(1), 40)).any()


@pytest.mark.parametrize(("degree", "n"), [(4, 11), (4, 100), (6, 30), (8, 200)])
def test_expander(degree: int, n: int):
    bound = degree - 2 * math.sqrt(degree - 1) - 0.1
    for seed in range(4):
        blocks = graph(expander(degree, B, seed=seed), n)[0]
        assert laplacian_gap(blocks) >= bound and (blocks.sum(0) == degree + 1).all()


def test_expander_is_drawn_again():
    """With a bound that a fifth of the draws meets; `random_regular` takes the first draw."""
    rejected = 0
    for seed in range(20):
        regular = random_regular(4, B, seed=seed)
        first = graph(regular, 40)[0]
        again = named(
            replace(regular, gap=0.75), f"drawn again {seed}", "expander", {}, spelled=True
        )
        blocks = graph(again, 40)[0]
        assert laplacian_gap(blocks) >= 0.75
        assert np.array_equal(first, blocks) == (laplacian_gap(first) >= 0.75)
        rejected += laplacian_gap(first) < 0.75
    assert 2 < rejected < 20
    with pytest.raises(ValueError, match=r"no graph of 40 .* in 100 draws: give another seed"):
        named(replace(regular, gap=2.0), "too much", "expander", {}, spelled=True).build(
            40 * B, block_size=B
        )


def test_expander_connects_in_four_layers():
    """256 blocks, degree 8; `butterfly` needs eight."""
    blocks = graph(expander(8, B), 256)[0].astype(float)
    three, four = (np.linalg.matrix_power(blocks, t) > 0 for t in (3, 4))
    assert 0.7 < three.mean() < 0.95 and four.all()


@pytest.mark.parametrize("degree", [4, 8, 16])
def test_spectral_gap_by_lanczos(degree: int):
    blocks = graph(random_regular(degree, B), 700)[0]
    exact = laplacian_gap(blocks)
    neighbours = np.nonzero(blocks & ~np.eye(700, dtype=bool))[1].reshape(700, degree)
    assert exact - 1e-6 <= spectral_gap(neighbours) < exact + 0.05


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: butterfly(64, size=8), "block is 64 and size is 8: give one of them"),
        (lambda: butterfly(size=24), "size is 24: give a power of two"),
        (lambda: butterfly(size=16, levels=5), "levels is 5: 16 blocks have 4"),
        (lambda: pixelfly(global_blocks=-1), "global_blocks is -1"),
        (lambda: random_regular(3), "degree is 3: give an even number"),
        (lambda: random_regular(0), "degree is 0"),
        (lambda: expander(2), "degree is 2: give an integer >= 4"),
        (lambda: expander(seed=-1), "seed is -1"),
        (lambda: expander(layer=3), "layer is 3: a layer needs per_layer=True"),
        (lambda: expander(per_layer=True).build(512), "layer to layer"),
        (lambda: expander(per_head=True).build(512), "give heads= to build"),
        (lambda: hubs(0), "count is 0"),
        (lambda: hubs(alpha=0), "alpha is 0: give a number > 0"),
        (lambda: hubs(alpha="1"), "alpha is '1'"),
        (lambda: bigbird(window=2), "window is 2: give an odd number"),
        (lambda: bigbird(random=-1), "random is -1"),
        (lambda: longformer(0), "window is 0"),
        (lambda: longformer(8, 0), "dilation is 0"),
        (lambda: longformer(8, 1, (-1,)), "-1"),
        (lambda: etc_(4, -1), "radius is -1"),
    ],
)
def test_errors(make, message: str):
    with pytest.raises(ValueError, match=message):
        make()


@pytest.mark.parametrize(
    ("mask", "milliseconds", "tiles"),
    [
        (butterfly(size=8192), 300, 0),
        (pixelfly(), 300, 0),
        (bigbird(128), 300, 0),
        (random_regular(8), 300, 0),
        (expander(8), 300, 0),
        (hubs(), 300, 0),
        (longformer(512) & causal(), 300, 9),
        (etc_(256, 512), 300, 2),
    ],
    ids=str,
)
def test_a_million_tokens(mask: Mask, milliseconds: float, tiles: int):
    assert_builds_within(mask, milliseconds, tiles, heads=1)
