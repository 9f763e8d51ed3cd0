"""Random masks for the property tests."""

import random

import numpy as np

import masks
from masks import Mask

BLOCKS = (16, 32, 48, 64)
LENGTHS = (1, 15, 16, 63, 64, 97, 128, 161)


def leaf(rng: random.Random, n_q: int, n_k: int) -> Mask:
    """A random leaf; extents that vary are left to tests of their own."""
    align = rng.choice(["top_left", "bottom_right"])
    match rng.randrange(9):
        case 0:
            return masks.causal(align=align)
        case 1:
            return masks.local(rng.randrange(100), align=align)
        case 2:
            return masks.local(rng.randrange(100), rng.randrange(100), align=align)
        case 3:
            return masks.sliding(rng.randrange(1, 150), align=align)
        case 4:
            return masks.butterfly(
                rng.choice([1, 7, 16, 24, 32, 64]), rng.choice([None, 0, 1, 2, 9])
            )
        case 5:
            block = rng.choice([5, 16, 24, 32, 64])
            return masks.random_blocks(rng.random() or 1.0, block=block, seed=rng.randrange(100))
        case 6:
            return masks.global_tokens(rng.randrange(80))
        case 7:
            return masks.dense()
        case _:
            data = np.random.default_rng(rng.randrange(1 << 30))
            density = rng.choice([0.02, 0.5, 0.999])
            return masks.mask_from(data.random((n_q, n_k)) < density)


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
