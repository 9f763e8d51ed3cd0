"""Masks in another order of the tokens."""

import random

import numpy as np

import masks
from masks import Mask
from masks.algebra import Transform
from masks.transforms.base import Transformed
from masks.transforms.reorder import SIDES, Reorder, hilbert, morton, permuted, tiled
from tests.masks.oracles import LEAVES, leaf, oracle
from tests.masks.oracles.canvas import any_canvas, any_canvas_mask, any_per_axis


def any_reorder(rng: random.Random, canvas: tuple[int, ...], side: str) -> Transform:
    n = int(np.prod(canvas))
    match rng.randrange(4):
        case 0:
            return tiled(canvas, any_per_axis(rng, list(canvas)), side=side)
        case 1:
            return morton(canvas, side=side)
        case 2 if len(canvas) == 2:
            return hilbert(canvas, side=side)
        case _:
            return permuted(rng.sample(range(n), n), side=side)


@leaf
def _(rng: random.Random, n_q: int, n_k: int) -> Mask:
    side = rng.choice(SIDES) if n_q == n_k else rng.choice(["queries", "keys"])
    canvas = any_canvas(rng, n_q if side == "queries" else n_k)
    if n_q == n_k and rng.random() < 0.5:
        part = any_canvas_mask(rng, canvas)
        if rng.random() < 0.5:
            part |= any_canvas_mask(rng, canvas)
    else:
        part = rng.choice(LEAVES)(rng, n_q, n_k) - masks.global_tokens(rng.randrange(3))
    return part >> any_reorder(rng, canvas, side)


def order_of(transform: Reorder) -> list[int]:
    """The tokens in their new order, by sorting them."""
    if transform.kind in ("hilbert", "permuted"):  # which test_reorder looks at
        return transform.curve(*transform.shape).tolist()
    places = list(np.ndindex(transform.shape[0]))
    if transform.kind == "morton":
        keys = [[f"{x:020b}"[bit] for bit in range(20) for x in place] for place in places]
    else:
        tile = transform.shape[1]
        split = [[divmod(x, size) for x, size in zip(at, tile, strict=True)] for at in places]
        keys = [[pair[part] for part in (0, 1) for pair in pairs] for pairs in split]
    return sorted(range(len(places)), key=keys.__getitem__)


@oracle(Reorder)
def _(mask: Transformed, n_q: int, n_k: int, heads: int) -> np.ndarray:
    from tests.masks.brute import brute_dense

    # an array leaf may have a batch of its own
    dense = brute_dense(mask.part, n_q, n_k, mask.batch or 1, heads)
    order = order_of(mask.transform)
    if mask.transform.side != "keys":
        dense = dense[..., order, :]
    if mask.transform.side != "queries":
        dense = dense[..., order]
    return dense
