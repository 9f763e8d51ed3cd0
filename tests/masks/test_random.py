"""Random blocks: reproducible, distinct and uniform."""

import itertools
import random

import numpy as np
import pytest

import masks

B = 16


def drawn(mask: masks.Mask, rows: int, cols: int, heads: int | None = None) -> np.ndarray:
    """bool (heads or 1, rows, cols)"""
    return mask.build(rows * B, cols * B, B, heads=heads).layout()[0] > 0


def test_golden_values():
    """The same on every platform and in every version."""
    blocks = drawn(masks.random_blocks(count=3, block=B, seed=5), 10, 10)[0]
    assert [np.flatnonzero(row).tolist() for row in blocks[:3]] == [[0, 5, 8], [2, 3, 6], [1, 5, 9]]


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
