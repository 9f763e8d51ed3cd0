"""Random block masks for the round trips."""

import random

import numpy as np

import masks
from masks import BlockMask
from tests.masks.cases import BLOCKS, LENGTHS, composition

SEEDS = range(40)


def any_blocks(rng: random.Random) -> BlockMask:
    """A composition, with heads and batch entries of its own where the seed is odd."""
    n_q, n_k = rng.choice(LENGTHS), rng.choice(LENGTHS)
    mask = composition(rng, n_q, n_k, rng.randrange(3))
    if rng.random() < 0.5:
        data = np.random.default_rng(rng.randrange(1 << 30))
        shape = rng.choice([1, 2]), rng.choice([1, 3]), n_q, n_k
        mask = mask & masks.mask_from(data.random(shape) < 0.9) | masks.local(20)
    return mask.build(n_q, n_k, (rng.choice(BLOCKS), rng.choice(BLOCKS)))
