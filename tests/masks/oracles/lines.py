"""Whole rows and columns, and the compositions that are made of them."""

import random

import numpy as np

from masks import Mask
from masks.leaves.lines import Lines
from masks.patterns.columns import (
    LastRows,
    global_at,
    global_rows,
    global_tokens,
    keys_at,
    last_rows,
    prefix_lm,
    sinks,
    streaming,
    tri_shape,
    vertical_slash,
)
from tests.masks.oracles import any_align, leaf, oracle, positions


def tokens(rng: random.Random) -> tuple[int, ...]:
    return tuple(rng.sample(range(170), rng.choice([0, 1, 3, 60, 165])))


@leaf
def _(rng: random.Random, n_q: int, n_k: int) -> Mask:
    make = rng.choice([sinks, global_tokens, global_rows, last_rows, keys_at, global_at])
    return make(tokens(rng) if make in (keys_at, global_at) else rng.randrange(80))


@oracle(Lines)
def _(mask: Lines, n_q: int, n_k: int, heads: int) -> np.ndarray:
    """From the arguments of the call: columns, rows or both."""
    chosen = mask.arguments.get("tokens", range(mask.arguments.get("n", 0)))
    row = np.array([[q in chosen] for q in range(n_q)])
    col = np.array([[k in chosen for k in range(n_k)]])
    return (row & (mask.kind not in ("sinks", "keys_at"))) | (col & (mask.kind != "global_rows"))


@oracle(LastRows)
def _(mask: LastRows, n_q: int, n_k: int, heads: int) -> np.ndarray:
    return positions(n_q, n_k)[0] >= n_q - mask.n


@leaf
def _(rng: random.Random, n_q: int, n_k: int) -> Mask:
    align = any_align(rng)
    first, window, last = rng.randrange(40), rng.randrange(1, 100), rng.randrange(40)
    return rng.choice(
        [
            prefix_lm(first, align=align),
            streaming(first, window, align=align),
            tri_shape(first, window, last, align=align),
            vertical_slash(tokens(rng), tokens(rng), align=align),
        ]
    )
