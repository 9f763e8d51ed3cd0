"""Whole rows and columns, and the compositions that are made of them."""

import random

import numpy as np

from masks import Mask
from masks.patterns.columns import (
    GlobalAt,
    GlobalRows,
    KeysAt,
    LastRows,
    Sinks,
    global_at,
    global_rows,
    keys_at,
    last_rows,
    prefix_lm,
    sinks,
)
from masks.patterns.streaming import streaming, tri_shape, vertical_slash
from tests.masks.oracles import leaf, oracle, positions


def tokens(rng: random.Random) -> tuple[int, ...]:
    return tuple(rng.sample(range(170), rng.choice([0, 1, 3, 60, 165])))


@leaf
def _(rng: random.Random, n_q: int, n_k: int) -> Mask:
    return sinks(rng.randrange(80))


@oracle(Sinks)
def _(mask: Sinks, n_q: int, n_k: int, heads: int) -> np.ndarray:
    return positions(n_q, n_k)[1] < mask.n


@leaf
def _(rng: random.Random, n_q: int, n_k: int) -> Mask:
    return keys_at(tokens(rng))


@oracle(KeysAt)
def _(mask: KeysAt, n_q: int, n_k: int, heads: int) -> np.ndarray:
    return np.array([[k in mask.tokens for k in range(n_k)]])


@leaf
def _(rng: random.Random, n_q: int, n_k: int) -> Mask:
    return rng.choice([global_rows, last_rows])(rng.randrange(80))


@oracle(GlobalRows)
def _(mask: GlobalRows, n_q: int, n_k: int, heads: int) -> np.ndarray:
    return positions(n_q, n_k)[0] < mask.n


@oracle(LastRows)
def _(mask: LastRows, n_q: int, n_k: int, heads: int) -> np.ndarray:
    return positions(n_q, n_k)[0] >= n_q - mask.n


@leaf
def _(rng: random.Random, n_q: int, n_k: int) -> Mask:
    return global_at(tokens(rng))


@oracle(GlobalAt)
def _(mask: GlobalAt, n_q: int, n_k: int, heads: int) -> np.ndarray:
    row = np.array([[q in mask.tokens] for q in range(n_q)])
    return row | np.array([[k in mask.tokens for k in range(n_k)]])


@leaf
def _(rng: random.Random, n_q: int, n_k: int) -> Mask:
    align = rng.choice(["top_left", "bottom_right"])
    first, window, last = rng.randrange(40), rng.randrange(1, 100), rng.randrange(40)
    return rng.choice(
        [
            prefix_lm(first, align=align),
            streaming(first, window, align=align),
            tri_shape(first, window, last, align=align),
            vertical_slash(tokens(rng), tokens(rng), align=align),
        ]
    )
