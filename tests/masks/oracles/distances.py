"""Patterns of the distance; and LogSparse as the copied code makes it, anchor by anchor."""

import math
import random

import numpy as np

import masks
from masks import Mask
from masks.patterns.distances import Diagonals, Dilated, LogSparse, PowerOfTwo, PowerOfTwoBlocks
from tests.masks.oracles import any_align, distance, leaf, oracle, positions


@leaf
def _(rng: random.Random, n_q: int, n_k: int) -> Mask:
    extent, step = rng.choice([0, 5, 40, 99, 300]), rng.choice([1, 2, 3, 16, 31, 64, 200])
    return masks.dilated(extent, step, align=any_align(rng))


@oracle(Dilated)
def _(mask: Dilated, n_q: int, n_k: int, heads: int) -> np.ndarray:
    d = distance(mask, n_q, n_k)
    return (-mask.extent <= d) & (d <= mask.extent) & (d // mask.step * mask.step == d)


@leaf
def _(rng: random.Random, n_q: int, n_k: int) -> Mask:
    count = rng.choice([0, 1, 4, 40, 150])
    return masks.diagonals(tuple(rng.sample(range(-170, 170), count)), align=any_align(rng))


@oracle(Diagonals)
def _(mask: Diagonals, n_q: int, n_k: int, heads: int) -> np.ndarray:
    d = distance(mask, n_q, n_k)
    return np.any([d == x for x in (*mask.distances, 10**6)], axis=0)


@leaf
def _(rng: random.Random, n_q: int, n_k: int) -> Mask:
    if rng.random() < 0.5:
        return masks.power_of_two(align=any_align(rng))
    return masks.power_of_two(rng.choice([2, 7, 16, 24, 48]))


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


@leaf
def _(rng: random.Random, n_q: int, n_k: int) -> Mask:
    window = rng.choice([1, 5, 16, 64, 97, 300])
    return masks.log_sparse(window, rng.choice([2, 3, 5, 6, 11, 16, 20, 37, 64, 100]))


@oracle(LogSparse)
def _(mask: LogSparse, n_q: int, n_k: int, heads: int) -> np.ndarray:
    return np.array([log_sparse_row(q, mask.window, mask.restart, n_k) for q in range(n_q)])


def log_sparse_row(q: int, window: int, restart: int, n_k: int) -> list[bool]:
    near = math.ceil(math.log2(restart))
    if q < window // restart * 2 * near:
        return [k <= q for k in range(n_k)]
    seen: set[int] = set()
    for anchor in range(q, -1, -restart):
        if anchor < near - 1:
            seen |= set(range(anchor))
        else:
            seen |= set(range(anchor - near + 1, anchor + 1))
            reach = [near - 1 + 2**i for i in range(near)]
            seen |= {anchor - d for d in reach if d <= restart and d <= anchor}
    return [k in seen for k in range(n_k)]
