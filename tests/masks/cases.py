"""Random masks for the property tests."""

import random

import numpy as np

import masks
from masks import BlockMask, Mask
from tests.masks.oracles import LEAVES

BLOCKS = (16, 32, 48, 64)
LENGTHS = (1, 15, 16, 63, 64, 97, 128, 161)


def composition(rng: random.Random, n_q: int, n_k: int, depth: int) -> Mask:
    """Random leaves, joined; extents that vary are left to tests of their own."""
    if depth == 0:
        return rng.choice(LEAVES)(rng, n_q, n_k)
    a = composition(rng, n_q, n_k, depth - 1)
    match rng.choice("|&-~"):
        case "|":
            return a | composition(rng, n_q, n_k, rng.randrange(depth))
        case "&":
            return a & composition(rng, n_q, n_k, rng.randrange(depth))
        case "-":
            return a - composition(rng, n_q, n_k, rng.randrange(depth))
        case _:
            return ~a


def any_blocks(rng: random.Random) -> BlockMask:
    """A composition, half of the time with heads, batch entries and blocks with holes."""
    n_q, n_k = rng.choice(LENGTHS), rng.choice(LENGTHS)
    mask = composition(rng, n_q, n_k, rng.randrange(3))
    if rng.random() < 0.5:
        data = np.random.default_rng(rng.randrange(1 << 30))
        shape = rng.choice([1, 2]), rng.choice([1, 3]), n_q, n_k
        mask = mask & masks.mask_from(data.random(shape) < rng.choice([0.9, 0.999]))
        mask |= masks.local(20)
    return mask.build(n_q, n_k, (rng.choice(BLOCKS), rng.choice(BLOCKS)))
