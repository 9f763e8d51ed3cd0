"""Random blocks: reproducible, distinct and uniform."""

import itertools
import math
import random

import numpy as np
import pytest

import masks
from masks.patterns.random_blocks import hubs
from tests.masks.patterns.token_graphs import B, graph


def drawn(mask: masks.Mask, rows: int, cols: int, heads: int | None = None) -> np.ndarray:
    """bool (heads or 1, rows, cols)"""
    return mask.build(rows * B, cols * B, B, heads=heads).layout()[0] > 0


def test_golden_values():
    """The same on every platform and in every version."""
    blocks = drawn(masks.random_blocks(count=3, block=B, seed=5), 10, 10)[0]
    assert [np.flatnonzero(row).tolist() for row in blocks[:3]] == [[0, 5, 8], [2, 3, 6], [1, 5, 9]]


def test_golden_values_of_the_options():
    causal = drawn(masks.random_blocks(count=3, block=B, seed=5, causal=True), 8, 8)[0]
    rows = [[0], [0, 1], [0, 1, 2], [0, 1, 3]]
    assert [np.flatnonzero(row).tolist() for row in causal[:4]] == rows
    layer = masks.random_blocks(count=3, block=B, seed=5, per_layer=True).layer(2)
    rows = [[0, 1, 5], [2, 3, 6]]
    assert [np.flatnonzero(row).tolist() for row in drawn(layer, 10, 10)[0, :2]] == rows


@pytest.mark.parametrize("cols", [1, 2, 5, 64, 100])
def test_counts(cols: int):
    for count in {1, 2, cols // 2, cols // 2 + 1, cols - 1, cols} & set(range(1, cols + 1)):
        blocks = drawn(masks.random_blocks(count=count, block=B, seed=count), 50, cols)
        assert (blocks.sum(-1) == count).all()
    for density in (0.001, 0.1, 0.5, 0.9, 1.0):
        blocks = drawn(masks.random_blocks(density, block=B), 50, cols)
        assert (blocks.sum(-1) == max(1, round(density * cols))).all()


def test_every_set_is_equally_likely():
    """Chi-square over the 20 subsets of 3 of 6, from both sides of one half; 99.9 % limit."""
    for count, limit in ((2, 36.1), (3, 43.8), (4, 36.1)):
        sets = {frozenset(c): 0 for c in itertools.combinations(range(6), count)}
        rows = drawn(masks.random_blocks(count=count, block=B, seed=1), 20_000, 6)[0]
        for row in rows:
            sets[frozenset(np.flatnonzero(row).tolist())] += 1
        expected = len(rows) / len(sets)
        assert sum((n - expected) ** 2 / expected for n in sets.values()) < limit


def test_rows_heads_and_seeds_are_independent():
    """Shared key blocks of two draws of 8 of 64: 1 in the mean, so about 500 in 500 rows."""

    def draw(seed: int) -> np.ndarray:
        return drawn(
            masks.random_blocks(count=8, block=B, seed=seed, per_head=True), 500, 64, heads=4
        )

    a, b = draw(0), draw(1)
    for x, y in ((a[0], a[1]), (a[2], a[3]), (a[0], b[0]), (a[0, 1:], a[0, :-1]), (a[1], b[0])):
        assert 0.8 < (x & y).sum() / len(x) < 1.2


def test_no_global_state():
    random.seed(3)
    np.random.seed(3)
    before = random.getstate(), np.random.get_state()[1].tobytes()  # type: ignore[index]
    first = masks.random_blocks(0.3, block=B).build(1000, block_size=B)
    assert before == (random.getstate(), np.random.get_state()[1].tobytes())  # type: ignore[index]
    np.random.seed(4)
    assert masks.random_blocks(0.3, block=B).build(1000, block_size=B) == first


def test_heads_share_unless_asked():
    assert masks.random_blocks(0.3).build(1000, heads=5).heads == 1
    per_head = masks.random_blocks(0.3, per_head=True)
    blocks = per_head.build(1000, heads=5)
    assert blocks.heads == 5 and len({head.tobytes() for head in blocks.layout()[0]}) == 5
    assert np.array_equal(per_head.build(1000, heads=3).layout(), blocks.layout()[:, :3])


def test_causal_counts():
    i = np.arange(100)
    for count in (1, 7, 99):
        blocks = drawn(masks.random_blocks(count=count, block=B, causal=True), 100, 100)[0]
        assert not np.triu(blocks, 1).any() and (blocks.sum(1) == np.minimum(i + 1, count)).all()
    blocks = drawn(masks.random_blocks(0.3, block=B, causal=True), 100, 100)[0]
    shares = [max(1, round(0.3 * (row + 1))) for row in i.tolist()]
    assert not np.triu(blocks, 1).any() and blocks.sum(1).tolist() == shares


@pytest.mark.parametrize("options", [{"count": 5}, {"density": 0.3}, {"density": 0.9}], ids=str)
def test_a_longer_sequence_keeps_causal_draws(options: dict):
    mask = masks.random_blocks(**options, block=B, causal=True, seed=4)
    long = drawn(mask, 90, 90)[0]
    for rows, cols in ((60, 60), (90, 20), *((x + 1, x) for x in range(1, 20)), (33, 90)):
        short = np.zeros((rows, cols), bool)
        short[mask.pairs(0, np.arange(rows), cols)] = True  # `build` would crop the long one
        assert np.array_equal(short, long[:rows, :cols])


def test_causal_draws_are_uniform():
    """Row 9 draws 4 of 10 columns in 500 layers."""
    mask = masks.random_blocks(count=4, block=B, causal=True, per_layer=True)
    total = sum(drawn(mask.layer(i), 10, 10)[0, 9].astype(int) for i in range(500))
    assert np.abs(total - 200).max() < 5 * np.sqrt(500 * 0.4 * 0.6) and total.sum() == 2000


def test_layers():
    mask = masks.random_blocks(0.1, per_layer=True, per_head=True)
    assert mask.per_layer and str(mask.layer(3)) == (
        "random_blocks(0.1, per_head=True, per_layer=True, layer=3)"
    )
    assert not mask.layer(3).per_layer and mask.layer(3).layer(5) == mask.layer(3)
    assert masks.parse(str(mask.layer(3))) == mask.layer(3) != mask.layer(4)
    joined = masks.causal() & ~mask
    assert joined.per_layer and joined.layer(2) == masks.causal() & ~mask.layer(2)
    with pytest.raises(ValueError, match=r"layer to layer: build mask\.layer\(i\)"):
        joined.build(512, heads=2)
    with pytest.raises(ValueError, match="layer is 3: a layer needs per_layer=True"):
        masks.random_blocks(0.1, layer=3)
    plain = drawn(masks.random_blocks(count=8, block=B), 500, 64)[0]
    layers = [
        drawn(masks.random_blocks(count=8, block=B, per_layer=True).layer(i), 500, 64)[0]
        for i in range(3)
    ]
    for a, b in itertools.combinations([plain, *layers], 2):
        assert 0.8 < (a & b).sum() / 500 < 1.2


def test_hubs():
    mask = hubs(block=B, seed=1)
    blocks = graph(mask, 200)[0]
    assert np.array_equal(blocks, blocks.T) and blocks.diagonal().all()
    load = np.sort(blocks.sum(0))[::-1]
    assert load[0] == 200 and 100 < load[1] < 125 and load[-1] < 20
    # The first hub is global; the second one draws 25, perhaps the first or itself among them.
    few = graph(hubs(2, block=B, alpha=3.0), 200)[0]
    assert few.sum() in {2 * 200 - 1 + 199 + 2 * new for new in (23, 24, 25)}


def test_hubs_expected_count():
    n, count, alpha = 60, 12, 0.8
    c = np.array([max(1, round(n * rank**-alpha)) for rank in range(1, count + 1)])
    pairs = sum(c[r] * c[s] for r in range(count) for s in range(r + 1, count))
    expected = n + 2 * (n - 1) / n * c.sum() - 2 / n**2 * pairs
    found = [graph(hubs(count, alpha=alpha, block=B, seed=seed), n).sum() for seed in range(300)]
    assert abs(np.mean(found) - expected) < 4 * np.std(found) / math.sqrt(len(found))
