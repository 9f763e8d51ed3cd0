"""Bands, everything, arrays, butterflies, rows and columns, and other patterns of the distance."""

import random

import numpy as np

import masks
from masks import Mask
from masks.patterns.array import ArrayMask
from tests.masks.oracles import BATCH, HEADS, any_align, given, leaf, oracle, positions, varied


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


def tokens(rng: random.Random) -> tuple[int, ...]:
    return tuple(rng.sample(range(170), rng.choice([0, 1, 3, 60, 165])))


@leaf
def _(rng: random.Random, n_q: int, n_k: int) -> Mask:
    of_count = [masks.sinks, masks.global_tokens, masks.global_rows, masks.last_rows]
    make = rng.choice([*of_count, masks.keys_at, masks.global_at])
    return make(rng.randrange(80) if make in of_count else tokens(rng))


@leaf
def _(rng: random.Random, n_q: int, n_k: int) -> Mask:
    align = any_align(rng)
    first, window, last = rng.randrange(40), rng.randrange(1, 100), rng.randrange(40)
    return rng.choice(
        [
            masks.prefix_lm(first, align=align),
            masks.streaming(first, window, align=align),
            masks.tri_shape(first, window, last, align=align),
            masks.vertical_slash(tokens(rng), tokens(rng), align=align),
        ]
    )


@leaf
def _(rng: random.Random, n_q: int, n_k: int) -> Mask:
    extent, step = rng.choice([0, 5, 40, 99, 300]), rng.choice([1, 2, 3, 16, 31, 64, 200])
    return masks.dilated(extent, step, align=any_align(rng))


@leaf
def _(rng: random.Random, n_q: int, n_k: int) -> Mask:
    count = rng.choice([0, 1, 4, 40, 150])
    return masks.diagonals(tuple(rng.sample(range(-170, 170), count)), align=any_align(rng))


@leaf
def _(rng: random.Random, n_q: int, n_k: int) -> Mask:
    if rng.random() < 0.5:
        return masks.power_of_two(align=any_align(rng))
    return masks.power_of_two(rng.choice([2, 7, 16, 24, 48]))


@leaf
def _(rng: random.Random, n_q: int, n_k: int) -> Mask:
    stride = rng.choice([1, 2, 7, 16, 24, 50, 64, 200])
    return masks.strided(stride, align=any_align(rng))


@leaf
def _(rng: random.Random, n_q: int, n_k: int) -> Mask:
    stride = rng.choice([1, 2, 7, 16, 24, 50, 64, 200, 2**60])
    return masks.fixed(stride, min(stride, rng.choice([0, 1, 8, 20, 64, 2**60 - 9])))


@varied
def _(rng: random.Random, n_q: int, n_k: int) -> Mask:
    stride, vertices = rng.choice([8, 16, 24, 50, 64]), rng.choice([1, 2, 4])
    return masks.fixed(stride, rng.randrange(stride // vertices + 1), vertices)
