"""Bands, everything, arrays, butterflies, rows and columns, and other patterns of the distance."""

import math
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


def tokens(rng: random.Random) -> tuple[int, ...]:
    return tuple(rng.sample(range(170), rng.choice([0, 1, 3, 60, 165])))


@leaf
def _(rng: random.Random, n_q: int, n_k: int) -> Mask:
    of_count = [masks.sinks, masks.global_tokens, masks.global_rows, masks.last_rows]
    make = rng.choice([*of_count, masks.keys_at, masks.global_at])
    return make(rng.randrange(80) if make in of_count else tokens(rng))


@oracle("sinks", "keys_at", "global_tokens", "global_at", "global_rows")
def _(mask: Mask, n_q: int, n_k: int, heads: int) -> np.ndarray:
    """From the arguments of the call: columns, rows or both."""
    chosen = mask.arguments.get("tokens", range(mask.arguments.get("n", 0)))
    row = np.array([[q in chosen] for q in range(n_q)])
    col = np.array([[k in chosen for k in range(n_k)]])
    return (row & (mask.kind not in ("sinks", "keys_at"))) | (col & (mask.kind != "global_rows"))


@oracle("last_rows")
def _(mask: Mask, n_q: int, n_k: int, heads: int) -> np.ndarray:
    return positions(n_q, n_k)[0] >= n_q - mask.arguments["n"]


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


@oracle("dilated")
def _(mask: Mask, n_q: int, n_k: int, heads: int) -> np.ndarray:
    d, called = distance(mask, n_q, n_k), given(mask)
    return (abs(d) <= called.extent) & (d // called.step * called.step == d)


@leaf
def _(rng: random.Random, n_q: int, n_k: int) -> Mask:
    count = rng.choice([0, 1, 4, 40, 150])
    return masks.diagonals(tuple(rng.sample(range(-170, 170), count)), align=any_align(rng))


@oracle("diagonals")
def _(mask: Mask, n_q: int, n_k: int, heads: int) -> np.ndarray:
    d = distance(mask, n_q, n_k)
    return np.any([d == x for x in (*mask.arguments["distances"], 10**6)], axis=0)


@leaf
def _(rng: random.Random, n_q: int, n_k: int) -> Mask:
    if rng.random() < 0.5:
        return masks.power_of_two(align=any_align(rng))
    return masks.power_of_two(rng.choice([2, 7, 16, 24, 48]))


@oracle("power_of_two")
def _(mask: Mask, n_q: int, n_k: int, heads: int) -> np.ndarray:
    block = mask.arguments["block"]
    if block == 1:
        return is_power_or_zero(distance(mask, n_q, n_k))
    q, k = positions(n_q, n_k)
    return is_power_or_zero(q // block - k // block)


def is_power_or_zero(d: np.ndarray) -> np.ndarray:
    allowed = d == 0
    for t in range(12):
        allowed |= (d == 2**t) | (d == -(2**t))
    return allowed


@leaf
def _(rng: random.Random, n_q: int, n_k: int) -> Mask:
    window = rng.choice([1, 5, 16, 64, 97, 300])
    return masks.log_sparse(window, rng.choice([2, 3, 5, 6, 11, 16, 20, 37, 64, 100]))


@oracle("log_sparse")
def _(mask: Mask, n_q: int, n_k: int, heads: int) -> np.ndarray:
    window = mask.arguments["window"]
    restart = mask.arguments["restart"] or window
    return np.array([log_sparse_row(q, window, restart, n_k) for q in range(n_q)])


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


@leaf
def _(rng: random.Random, n_q: int, n_k: int) -> Mask:
    stride = rng.choice([1, 2, 7, 16, 24, 50, 64, 200])
    return masks.strided(stride, align=any_align(rng))


@oracle("strided")
def _(mask: Mask, n_q: int, n_k: int, heads: int) -> np.ndarray:
    d, stride = distance(mask, n_q, n_k), mask.arguments["stride"]
    multiples = np.isin(d, range(0, 1000, stride))
    return multiples | ((d >= 0) & (d < stride))


@leaf
def _(rng: random.Random, n_q: int, n_k: int) -> Mask:
    stride = rng.choice([1, 2, 7, 16, 24, 50, 64, 200, 2**60])
    return masks.fixed(stride, min(stride, rng.choice([0, 1, 8, 20, 64, 2**60 - 9])))


@varied
def _(rng: random.Random, n_q: int, n_k: int) -> Mask:
    stride, vertices = rng.choice([8, 16, 24, 50, 64]), rng.choice([1, 2, 4])
    return masks.fixed(stride, rng.randrange(stride // vertices + 1), vertices)


@oracle("fixed")
def _(mask: Mask, n_q: int, n_k: int, heads: int) -> np.ndarray:
    q, k = positions(n_q, n_k)
    dense, called = [], given(mask)
    for head in range(heads if called.vertices > 1 else 1):
        end = called.stride - head % called.vertices * called.summary
        group = (k % called.stride < end) & (k % called.stride >= end - called.summary)
        dense.append((k <= q) & ((q // called.stride == k // called.stride) | group))
    return np.array(dense)
