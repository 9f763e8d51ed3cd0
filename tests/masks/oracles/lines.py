"""Whole rows and columns, and the compositions that are made of them."""

import random

import numpy as np

import masks
from masks import Mask
from tests.masks.oracles import any_align, leaf, oracle, positions


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
