"""Presets of the Long Range Arena, as the published code has them."""

import random

import numpy as np

from experiments.lra import masks as lra
from masks import Mask
from tests.masks.oracles import leaf, oracle, varied
from tests.masks.oracles.graphs import tokens


@leaf
def _(rng: random.Random, n_q: int, n_k: int) -> Mask:
    size = rng.choice([1, 3, 8, 50])
    return rng.choice(
        [
            lra.lra_local(size, interleaved=rng.random() < 0.7),
            lra.lra_fixed(size, rng.randrange(size + 1)),
            lra.lra_strided(size),
            lra.lra_longformer(rng.randrange(1, 60), rng.randrange(5)),
        ]
    )


@varied
def _(rng: random.Random, n_q: int, n_k: int) -> Mask:
    return lra.lra_bigbird(rng.choice([5, 7, 16]), rng.choice([1, 3]), seed=rng.randrange(100))


@oracle("lra_local")
def _(mask: Mask, n_q: int, n_k: int, heads: int) -> np.ndarray:
    """The code's reshape: tokens are laid out as (block, chunks), padded by 1..block of them."""
    n = max(n_q, n_k)
    block = mask.arguments["block"]
    padded = n + block - n % block
    chunk = np.arange(padded).reshape(block, -1)
    column = np.empty(padded, int)
    for i in range(chunk.shape[1]):
        column[chunk[:, i]] = i
    return column[:n_q, None] == column[None, :n_k]


@oracle("lra_bigbird")
def _(mask: Mask, n_q: int, n_k: int, heads: int) -> np.ndarray:
    b, r, seed = (mask.arguments[name] for name in ("block", "random", "seed"))
    n = max(n_q, n_k)
    padded = n + b - n % b
    m = padded // b
    stream = np.random.RandomState(seed)
    a = np.arange(1, m - 1)
    focus = min(padded, 1024)
    last = focus // b - 1 if focus > 2 * b else m - 1
    blocks = np.zeros((heads, m, m), bool)
    blocks[:, [0, -1]] = blocks[:, :, [0, -1]] = True
    fits = m > 2
    for head in range(heads):
        for i in range(1, m - 1):
            blocks[head, i, i - 1 : i + 2] = True
            start, end = i - 2, i
            if i == 1:
                choices = a[2:last]
            elif i == 2:
                choices = a[3:last]
            elif i == m - 3:
                choices = a[: last - 4]
            elif i == m - 2:
                choices = a[: last - 3]
            elif start > last:
                choices = a[:last]
            elif end + 1 == last:
                choices = a[:start]
            else:
                choices = np.concatenate((a[:start], a[end + 1 : last]))
            fits &= len(choices) >= r
            if fits:
                blocks[head, i, stream.permutation(choices)[:r]] = True
    return tokens(blocks | (not fits), b, n_q, n_k)
