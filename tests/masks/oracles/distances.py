"""Bands, everything, arrays, butterflies, rows and columns, and other patterns of the distance."""

import random

import numpy as np

import masks
from masks import Mask
from masks.patterns.array import ArrayMask
from tests.masks.oracles import BATCH, HEADS, any_align, given, leaf, oracle, positions, varied


def array(rng: random.Random, shapes: list[tuple[int, ...]], shares: list[float]) -> Mask:
    data = np.random.default_rng(rng.randrange(1 << 30))
    return masks.mask_from(data.random(rng.choice(shapes)) < rng.choice(shares))


def tokens(rng: random.Random) -> tuple[int, ...]:
    return tuple(rng.sample(range(170), rng.choice([0, 1, 3, 60, 165])))


STRIDES = [1, 2, 7, 16, 24, 50, 64, 200]
OF_COUNT = [masks.sinks, masks.global_tokens, masks.global_rows, masks.last_rows]
leaf(
    lambda rng, n_q, n_k: rng.choice(
        [
            masks.causal(align=any_align(rng)),
            masks.local(rng.randrange(100), align=any_align(rng)),
            masks.local(rng.randrange(100), rng.randrange(100), align=any_align(rng)),
            masks.sliding(rng.randrange(1, 150), align=any_align(rng)),
        ]
    ),
    lambda rng, n_q, n_k: masks.butterfly(
        rng.choice([1, 7, 16, 24, 32, 64]), rng.choice([None, 0, 1, 2, 9])
    ),
    lambda rng, n_q, n_k: masks.dense(),
    lambda rng, n_q, n_k: array(rng, [(n_q, n_k)], [0.02, 0.5, 0.999]),
    lambda rng, n_q, n_k: rng.choice(
        [
            *(make(rng.randrange(80)) for make in OF_COUNT),
            masks.keys_at(tokens(rng)),
            masks.global_at(tokens(rng)),
        ]
    ),
    lambda rng, n_q, n_k: rng.choice(
        [
            masks.prefix_lm(rng.randrange(40), align=any_align(rng)),
            masks.streaming(rng.randrange(40), rng.randrange(1, 100), align=any_align(rng)),
            masks.tri_shape(
                rng.randrange(40), rng.randrange(1, 100), rng.randrange(40), align=any_align(rng)
            ),
            masks.vertical_slash(tokens(rng), tokens(rng), align=any_align(rng)),
        ]
    ),
    lambda rng, n_q, n_k: masks.dilated(
        rng.choice([0, 5, 40, 99, 300]),
        rng.choice([1, 2, 3, 16, 31, 64, 200]),
        align=any_align(rng),
    ),
    lambda rng, n_q, n_k: masks.diagonals(
        tuple(rng.sample(range(-170, 170), rng.choice([0, 1, 4, 40, 150]))), align=any_align(rng)
    ),
    lambda rng, n_q, n_k: rng.choice(
        [
            masks.power_of_two(align=any_align(rng)),
            masks.power_of_two(rng.choice([2, 7, 16, 24, 48])),
        ]
    ),
    lambda rng, n_q, n_k: masks.strided(rng.choice(STRIDES), align=any_align(rng)),
    lambda rng, n_q, n_k: masks.fixed(
        stride := rng.choice([*STRIDES, 2**60]),
        min(stride, rng.choice([0, 1, 8, 20, 64, 2**60 - 9])),
    ),
)
varied(
    lambda rng, n_q, n_k: array(
        rng, [(BATCH, 1, n_q, n_k), (HEADS, n_q, n_k), (BATCH, HEADS, n_q, n_k)], [0.1, 0.5, 0.9]
    ),
    lambda rng, n_q, n_k: masks.fixed(
        stride := rng.choice([8, 16, 24, 50, 64]),
        rng.randrange(stride // (vertices := rng.choice([1, 2, 4])) + 1),
        vertices,
    ),
)


@oracle("butterfly")
def _(mask: Mask, n_q: int, n_k: int, heads: int) -> np.ndarray:
    q, k = positions(n_q, n_k)
    called = given(mask)
    block = -(-max(n_q, n_k) // called.size) if called.size else called.block
    strides = {0} | {2**t for t in range(20 if called.levels is None else called.levels)}
    return np.isin((q // block) ^ (k // block), list(strides))


@oracle(ArrayMask)
def _(mask: ArrayMask, n_q: int, n_k: int, heads: int) -> np.ndarray:
    return mask.data
