"""Bands, butterfly, everything, arrays."""

import random

import numpy as np

import masks
from masks import Mask
from masks.patterns.array import ArrayMask
from tests.masks.oracles import (
    BATCH,
    HEADS,
    any_align,
    distance,
    given,
    leaf,
    oracle,
    positions,
    varied,
)


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


@oracle("causal", "local", "sliding")
def _(mask: Mask, n_q: int, n_k: int, heads: int) -> np.ndarray:
    d, arguments = distance(mask, n_q, n_k), mask.arguments
    if mask.kind == "causal":
        return d >= 0
    if mask.kind == "sliding":
        return (d >= 0) & (d < arguments["window"])
    left, right = arguments["left"], arguments["right"]
    return (d <= left) & (-d <= (left if right is None else right))


@leaf
def _(rng: random.Random, n_q: int, n_k: int) -> Mask:
    return masks.butterfly(rng.choice([1, 7, 16, 24, 32, 64]), rng.choice([None, 0, 1, 2, 9]))


@oracle("butterfly")
def _(mask: Mask, n_q: int, n_k: int, heads: int) -> np.ndarray:
    q, k = positions(n_q, n_k)
    called = given(mask)
    block = -(-max(n_q, n_k) // called.size) if called.size else called.block
    strides = {0} | {2**t for t in range(20 if called.levels is None else called.levels)}
    return np.isin((q // block) ^ (k // block), list(strides))


@leaf
def _(rng: random.Random, n_q: int, n_k: int) -> Mask:
    return masks.dense()


@oracle("dense")
def _(mask: Mask, n_q: int, n_k: int, heads: int) -> np.ndarray:
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
