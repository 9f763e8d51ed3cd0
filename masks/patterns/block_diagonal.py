"""Token blocks that see themselves only, and their causal form."""

from dataclasses import dataclass

import numpy as np

from masks.algebra import Leaf, Mask
from masks.checks import integer
from masks.patterns.band import causal
from masks.patterns.rectangles import rectangle_runs
from masks.runs import Bools, Grid, Ints, Runs
from masks.spec import call_text, pattern


@pattern()
def block_diagonal(size: int, offset: int = 0) -> Mask:
    """Token blocks that see themselves only: (q + offset) // size == (k + offset) // size.

    This is "local attention" in Long Range Arena (arXiv 2011.04006; there size is 50), and windows
    that do not overlap elsewhere; two of them, the second with offset size // 2, make the shifted
    windows of Swin (arXiv 2103.14030) in one dimension. With `& causal()` a block is causal inside.
    With blocks of `size` tokens and no offset, n of n x n are allowed.

    Args:
        size: tokens of a token block, >= 1.
        offset: tokens that the first token block is short of, 0 <= offset < size.
    """
    size = integer("size", size, least=1)
    offset = integer("offset", offset, least=0, most=size - 1)
    return BlockDiagonal(call_text("block_diagonal", size, offset=(offset, 0)), size, offset)


@pattern()
def block_causal(size: int) -> Mask:
    """Token blocks that see themselves and all before them: k // size <= q // size.

    This is the mask of block diffusion (arXiv 2503.09573) among clean tokens. The same as
    `block_diagonal(size) | causal()`, which is its text. With blocks of `size` tokens, n(n+1)/2 of
    n x n are allowed, all of them full.
    """
    return block_diagonal(size) | causal()


@dataclass(frozen=True, repr=False, eq=False)
class BlockDiagonal(Leaf):
    key: str
    size: int
    offset: int
    prefix_stable = True

    def runs(self, grid: Grid) -> Runs:
        number = self._blocks(grid)
        start = number * self.size - self.offset
        stop = start + self.size
        return rectangle_runs(grid, np.zeros_like(start), start, stop, start, stop)

    def _blocks(self, grid: Grid) -> Ints:
        """Numbers of the token blocks that have queries and keys in the grid."""
        low = max(int(grid.q_first[0]), int(grid.k_first[0]))
        high = min(grid.n_q, grid.n_k) - 1
        first, last = ((token + self.offset) // self.size for token in (low, high))
        return np.arange(first, last + 1, dtype=np.int64)

    def allowed(self, grid: Grid, s: Ints, q: Ints, k: Ints) -> Bools:
        return (q + self.offset) // self.size == (k + self.offset) // self.size

    def signature(self, grid: Grid, s: Ints, row: Ints, col: Ints) -> Ints:
        # Where the first token block ends, which is where the others do, and how far apart the
        # first token blocks of the two sides are.
        q_block, q_phase = np.divmod(grid.q_token(row) + self.offset, self.size)
        k_block, k_phase = np.divmod(grid.k_token(col) + self.offset, self.size)
        q_left = np.minimum(self.size - q_phase, grid.block_q)
        k_left = np.minimum(self.size - k_phase, grid.block_k)
        return ((q_block - k_block) * (grid.block_q + 1) + q_left) * (grid.block_k + 1) + k_left
