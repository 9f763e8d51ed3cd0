"""Masks whose block rows repeat: exact, and built from few rows."""

import random
from typing import Any

import numpy as np
import pytest

import masks
from tests.masks.brute import brute_dense, check
from tests.masks.cases import composition


def transformed(rng: random.Random, n_q: int, n_k: int) -> masks.Mask:
    """A random mask, and half of the time more than that."""
    q, k = rng.choice([(0, 0), (0, 0), (rng.randrange(90), rng.randrange(90)), (-3, -20)])
    mask = composition(rng, n_q - q, n_k - k, rng.randrange(2)) >> masks.shift(q, k)
    match rng.randrange(6):
        case 0:
            return mask >> masks.snap(48)
        case 1:
            return masks.heads(mask, masks.fixed(24, 3, 2))
        case 2:
            return mask | masks.sinks(rng.randrange(50))
    return mask


@pytest.mark.parametrize("seed", range(16))
def test_long_compositions(seed: int):
    """Many rows of few kinds: other lengths of keys, odd ones, and blocks of any size."""
    rng = random.Random(2 * 10**6 + seed)
    n_q = rng.randrange(300, 800)
    n_k = rng.choice([n_q, rng.randrange(150, 900)])
    size = rng.choice([(16, 16), (48, 48), (32, 16), (16, 64), (128, 64), (256, 16)])
    mask = transformed(rng, n_q, n_k)
    blocks = mask.build(n_q, n_k, size)
    check(mask, blocks, brute_dense(mask, n_q, n_k, heads=blocks.heads))


def rules(d: int, e: int, f: int) -> list[Any]:
    return [
        lambda q, k: (q - k) % d < e,
        lambda q, k: (q // d) % (f % 5 + 1) == (k // d) % (f % 5 + 1),
        lambda q, k: (k <= q) & ((k % d >= e) | (q // f == k // f)),
        lambda q, k: (k < e) | (k >= 2 * f) & (abs(q - k) < e),
        lambda q, k: (q > f) & ((2 * q - 2 * k + e) // d % 3 == 1),
        lambda q, k: np.isin(k, [e, f]) | np.isin(q - k, [d, -e]) | (q == f),
        lambda q, k: (q >= 9 * d) & ((q - k) % 4 < 2) | (q - k == f),
        lambda q, k: (q == 48 * (1 + d % 9)) | ((q - k) % 4 == 0),  # a block begins there
        lambda q, k: (k == 48 * (1 + d % 4)) | ((q - k) % 4 == 0),
        lambda q, k: (q + k) // d % 3 == 0,  # repeats the other way: every row is looked at
    ]


@pytest.mark.parametrize("seed", range(4))
def test_rules(seed: int):
    """Divisors, differences and thresholds of a formula say how its rows repeat."""
    rng = random.Random(seed)
    for rule in rules(*(rng.randrange(1, 40) for _ in range(3))):
        n_q, n_k = rng.randrange(500, 900), rng.randrange(500, 900)
        dense = rule(np.arange(n_q)[:, None], np.arange(n_k))
        mask = masks.where(rule)
        check(mask, mask.build(n_q, n_k, rng.choice([16, 48])), dense[None, None])
