"""A mask placed once for all slices that it is the same in."""

from collections.abc import Callable
from dataclasses import replace

import numpy as np

from masks import runs as rl
from masks.algebra import Mask
from masks.runs import Bools, Grid, Ints
from masks.types import Placed


def place_own(mask: Mask, grid: Grid, place: Callable[[Grid], Placed]) -> Placed:
    """`place` on the grid with the extents of `mask` itself, spread over the slices of `grid`."""
    heads = mask.heads or (grid.heads if mask.per_head else 1)
    own = replace(grid, batch=mask.batch or 1, heads=heads)
    placed = place(own)
    if own == grid:
        return placed
    b, h = np.divmod(np.arange(grid.slices), grid.heads)
    own_slice = np.minimum(b, own.batch - 1) * own.heads + np.minimum(h, own.heads - 1)

    def allowed(s: Ints, q: Ints, k: Ints) -> Bools:
        return placed.allowed(own_slice[s], q, k)

    def signature(x: Ints) -> list[Ints]:
        s, place = np.divmod(x, grid.area)
        return placed.signature(own_slice[s] * grid.area + place)

    return Placed(rl.spread(placed.runs, grid.area, own_slice), allowed, signature)
