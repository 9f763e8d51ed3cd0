"""Strided and fixed attention of the Sparse Transformer."""

import random

import numpy as np

from masks import Mask
from masks.patterns.sparse_transformer import Fixed, Strided, fixed, strided
from tests.masks.oracles import any_align, distance, leaf, oracle, positions, varied


@leaf
def _(rng: random.Random, n_q: int, n_k: int) -> Mask:
    stride = rng.choice([1, 2, 7, 16, 24, 50, 64, 200])
    return strided(stride, align=any_align(rng))


@oracle(Strided)
def _(mask: Strided, n_q: int, n_k: int, heads: int) -> np.ndarray:
    d = distance(mask, n_q, n_k)
    multiples = np.isin(d, range(0, 1000, mask.stride))
    return multiples | ((d >= 0) & (d < mask.stride))


@leaf
def _(rng: random.Random, n_q: int, n_k: int) -> Mask:
    stride = rng.choice([1, 2, 7, 16, 24, 50, 64, 200, 2**60])
    return fixed(stride, min(stride, rng.choice([0, 1, 8, 20, 64, 2**60 - 9])))


@varied
def _(rng: random.Random, n_q: int, n_k: int) -> Mask:
    stride, vertices = rng.choice([8, 16, 24, 50, 64]), rng.choice([1, 2, 4])
    return fixed(stride, rng.randrange(stride // vertices + 1), vertices)


@oracle(Fixed)
def _(mask: Fixed, n_q: int, n_k: int, heads: int) -> np.ndarray:
    q, k = positions(n_q, n_k)
    dense = []
    for head in range(heads if mask.vertices > 1 else 1):
        end = mask.stride - head % mask.vertices * mask.summary
        group = (k % mask.stride < end) & (k % mask.stride >= end - mask.summary)
        dense.append((k <= q) & ((q // mask.stride == k // mask.stride) | group))
    return np.array(dense)
