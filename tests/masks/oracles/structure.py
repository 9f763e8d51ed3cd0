"""Masks by head."""

import random

import numpy as np

import masks
from masks import Mask
from masks.structure import Heads
from tests.masks.oracles import HEADS, LEAVES, oracle, varied


@varied
def _(rng: random.Random, n_q: int, n_k: int) -> Mask:
    count = rng.choice([1, 2, HEADS])
    return masks.heads(*[rng.choice(LEAVES)(rng, n_q, n_k) for _ in range(count)])


@varied
def _(rng: random.Random, n_q: int, n_k: int) -> Mask:
    varying = masks.random_blocks(count=1, block=48, seed=rng.randrange(9), per_head=True)
    return masks.heads(masks.causal() | varying, masks.local(3), ~varying, masks.dense())


@oracle(Heads)
def _(mask: Heads, n_q: int, n_k: int, heads: int) -> np.ndarray:
    from tests.masks.brute import brute_dense

    parts = [brute_dense(part, n_q, n_k, 1, heads)[0] for part in mask.parts]
    return np.stack([parts[h % len(parts)][h] for h in range(heads)])
