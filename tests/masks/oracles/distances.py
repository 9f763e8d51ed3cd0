"""Patterns of the distance: dilated, diagonals, powers of two."""

import random

import numpy as np

from masks import Mask
from masks.patterns.distances import (
    Diagonals,
    Dilated,
    PowerOfTwo,
    PowerOfTwoBlocks,
    diagonals,
    dilated,
    power_of_two,
)
from tests.masks.oracles import any_align, distance, leaf, oracle, positions


@leaf
def _(rng: random.Random, n_q: int, n_k: int) -> Mask:
    extent, step = rng.choice([0, 5, 40, 99, 300]), rng.choice([1, 2, 3, 16, 31, 64, 200])
    return dilated(extent, step, align=any_align(rng))


@oracle(Dilated)
def _(mask: Dilated, n_q: int, n_k: int, heads: int) -> np.ndarray:
    d = distance(mask, n_q, n_k)
    return (-mask.extent <= d) & (d <= mask.extent) & (d // mask.step * mask.step == d)


@leaf
def _(rng: random.Random, n_q: int, n_k: int) -> Mask:
    count = rng.choice([0, 1, 4, 40, 150])
    return diagonals(tuple(rng.sample(range(-170, 170), count)), align=any_align(rng))


@oracle(Diagonals)
def _(mask: Diagonals, n_q: int, n_k: int, heads: int) -> np.ndarray:
    d = distance(mask, n_q, n_k)
    return np.any([d == x for x in (*mask.distances, 10**6)], axis=0)


@leaf
def _(rng: random.Random, n_q: int, n_k: int) -> Mask:
    if rng.random() < 0.5:
        return power_of_two(align=any_align(rng))
    return power_of_two(rng.choice([2, 7, 16, 24, 48]))


@oracle(PowerOfTwo)
def _(mask: PowerOfTwo, n_q: int, n_k: int, heads: int) -> np.ndarray:
    return is_power_or_zero(distance(mask, n_q, n_k))


@oracle(PowerOfTwoBlocks)
def _(mask: PowerOfTwoBlocks, n_q: int, n_k: int, heads: int) -> np.ndarray:
    q, k = positions(n_q, n_k)
    return is_power_or_zero(q // mask.block - k // mask.block)


def is_power_or_zero(d: np.ndarray) -> np.ndarray:
    allowed = d == 0
    for t in range(12):
        allowed |= (d == 2**t) | (d == -(2**t))
    return allowed
