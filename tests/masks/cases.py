"""Random masks for the property tests."""

import random

from masks import Mask
from tests.masks.oracles import LEAVES

BLOCKS = (16, 32, 48, 64)
LENGTHS = (1, 15, 16, 63, 64, 97, 128, 161)


def leaf(rng: random.Random, n_q: int, n_k: int) -> Mask:
    """A random leaf; extents that vary are left to tests of their own."""
    return rng.choice(LEAVES)(rng, n_q, n_k)


def composition(rng: random.Random, n_q: int, n_k: int, depth: int) -> Mask:
    if depth == 0:
        return leaf(rng, n_q, n_k)
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
