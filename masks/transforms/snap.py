"""A mask rounded to whole blocks of tokens."""

from dataclasses import replace

import numpy as np

from masks import runs as rl
from masks.algebra import Mask
from masks.build import settle
from masks.checks import choice, integer
from masks.leaves.token_blocks import Cells
from masks.registry import canonical, transform
from masks.runs import Bools, Codes, Grid, Ints, Runs
from masks.tiles import PAIRS_AT_ONCE
from masks.transforms.base import Transform
from masks.types import Placed, Repeats

__all__ = ["snap"]


@transform("local(20) >> snap(16)", "rounded to whole blocks, outward")
def snap(block: int | tuple[int, int], how: str = "outward") -> "Snap":
    """Round a mask to whole token blocks (q // block, k // block), as kernels without tiles do.

    `mask >> snap(b, "inward")` is a subset of the mask, and the mask one of `mask >> snap(b)`.

    Args:
        block: tokens of a token block, one size or (queries, keys), each >= 1.
        how: "outward" allows all of a token block in which any pair of tokens is; "inward" only the
            token blocks of which every pair is. Only tokens that exist count.
    """
    sizes = block if isinstance(block, tuple | list) else (block, block)
    if len(sizes) != 2:
        raise ValueError(f"block is {block!r}: give one size or (queries, keys)")
    q, k = (integer("block", size, min=1) for size in sizes)
    how = choice("how", how, ("outward", "inward"))
    return canonical(Snap(q, k, how), block=q if q == k else (q, k))


class Snap(Transform):
    q: int
    k: int
    how: str

    def repeats(self, part: Mask, grid: Grid) -> Repeats | None:
        same = (self.q, self.k) == (grid.block_q, grid.block_k)
        return part.repeats(grid) if same and grid.q_origin == 0 == grid.k_origin else None

    def place(self, part: Mask, grid: Grid) -> Placed:
        q, k = min(self.q, grid.n_q), min(self.k, grid.n_k)
        q_origin, k_origin = max(grid.q_origin, 0) // q * q, max(grid.k_origin, 0) // k * k
        rows, cols = int(grid.q_last[-1]) - q_origin, int(grid.k_last[-1]) - k_origin
        sizes = {"block_q": q, "block_k": k, "q_blocks": rows // q + 1, "k_blocks": cols // k + 1}
        cells = replace(grid, **sizes, q_origin=q_origin, k_origin=k_origin)
        return Cells(grid, cells, decided(part.place(cells), cells, self.how)).placed()


def decided(placed: Placed, grid: Grid, how: str) -> Runs:
    """No MIXED codes: such blocks become FULL where any or, inward, every pair is allowed."""

    def look(x: Ints) -> Codes:
        full = _full(placed, grid, x, how == "inward")
        return np.where(full, rl.FULL, rl.EMPTY).astype(np.uint8)

    return Runs(*settle(placed, grid, np.arange(3, dtype=np.uint8), look))


def _full(placed: Placed, grid: Grid, x: Ints, inward: bool) -> Bools:
    """(T,) whether every, or any, pair of existing tokens is allowed in the blocks at `x`."""
    height = max(1, min(grid.block_q, PAIRS_AT_ONCE // grid.block_k))
    step = max(1, PAIRS_AT_ONCE // (height * grid.block_k))
    full = np.full(len(x), inward)
    for begin in range(0, len(x), step):
        part = slice(begin, begin + step)
        s, row, col = (i[:, None, None] for i in grid.split(x[part]))
        # A token beyond the ends is taken for the nearest one, which is in the same block.
        k = np.clip(grid.k_token(col) + np.arange(grid.block_k), 0, grid.n_k - 1)
        for top in range(0, grid.block_q, height):
            q = grid.q_token(row) + np.arange(top, min(top + height, grid.block_q))[:, None]
            allowed = placed.allowed(s, np.clip(q, 0, grid.n_q - 1), k)
            if inward:
                full[part] &= allowed.all((1, 2))
            else:
                full[part] |= allowed.any((1, 2))
    return full
