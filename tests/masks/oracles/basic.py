"""Bands, butterfly, everything, arrays."""

import random

import numpy as np

import masks
from masks import Mask
from masks.patterns.array import ArrayMask
from masks.patterns.bands import Band, Dense
from masks.patterns.butterfly import Butterfly, SizedButterfly
from tests.masks.oracles import BATCH, HEADS, any_align, distance, leaf, oracle, positions, varied


@leaf
def _(rng: random.Random, n_q: int, n_k: int) -> Mask:
    align = any_align(rng)
    return rng.choice(
        [
            masks.causal(align=align),
            masks.local(rng.randrange(100), align=align),
            masks.local(rng.randrange(100), rng.randrange(100), align=align),
            masks.sliding(rng.randrange(1, 150), align=align),
        ]
    )


@oracle(Band)
def _(mask: Band, n_q: int, n_k: int, heads: int) -> np.ndarray:
    d = distance(mask, n_q, n_k)
    return (d >= mask.low) & (d <= mask.high)


@leaf
def _(rng: random.Random, n_q: int, n_k: int) -> Mask:
    return masks.butterfly(rng.choice([1, 7, 16, 24, 32, 64]), rng.choice([None, 0, 1, 2, 9]))


@oracle(Butterfly)
@oracle(SizedButterfly)
def _(mask: Butterfly | SizedButterfly, n_q: int, n_k: int, heads: int) -> np.ndarray:
    q, k = positions(n_q, n_k)
    sized = isinstance(mask, SizedButterfly)
    block = -(-max(n_q, n_k) // mask.size) if sized else mask.block
    strides = {0} | {2**t for t in range(20 if mask.levels is None else mask.levels)}
    return np.isin((q // block) ^ (k // block), list(strides))


@leaf
def _(rng: random.Random, n_q: int, n_k: int) -> Mask:
    return masks.dense()


@oracle(Dense)
def _(mask: Dense, n_q: int, n_k: int, heads: int) -> np.ndarray:
    return np.ones((n_q, n_k), bool)


@leaf
def _(rng: random.Random, n_q: int, n_k: int) -> Mask:
    data = np.random.default_rng(rng.randrange(1 << 30))
    return masks.mask_from(data.random((n_q, n_k)) < rng.choice([0.02, 0.5, 0.999]))


@varied
def _(rng: random.Random, n_q: int, n_k: int) -> Mask:
    data = np.random.default_rng(rng.randrange(1 << 30))
    shape = rng.choice([(BATCH, 1, n_q, n_k), (HEADS, n_q, n_k), (BATCH, HEADS, n_q, n_k)])
    return masks.mask_from(data.random(shape) < rng.choice([0.1, 0.5, 0.9]))


@oracle(ArrayMask)
def _(mask: ArrayMask, n_q: int, n_k: int, heads: int) -> np.ndarray:
    return mask.data
