"""A mask given as data."""

import numpy as np
from numpy.typing import ArrayLike

from masks import runs as rl
from masks.checks import read_array
from masks.leaves.leaf import Leaf
from masks.registry import named
from masks.runs import Bools, Grid, Ints, Runs

__all__ = ["mask_from"]


def mask_from(array: ArrayLike) -> "ArrayMask":
    """Return the mask of a boolean array (n_q, n_k), (heads, n_q, n_k) or (batch, heads, n_q, n_k).

    True means allowed. The array is copied. The mask builds for these lengths only; an extent of 1
    fits any number of heads or batch entries.
    """
    data, text = read_array(array)
    batch, heads = (None if extent == 1 else extent for extent in data.shape[:2])
    return named(ArrayMask(data, batch, heads), text, "mask_from", {}, spelled=False)


class ArrayMask(Leaf):
    data: Bools  # (batch or 1, heads or 1, n_q, n_k)
    batch: int | None
    heads: int | None
    spelled = False

    @property
    def lengths(self) -> tuple[int, int]:
        """(n_q, n_k)"""
        return self.data.shape[2], self.data.shape[3]

    def __reduce__(self):
        return mask_from, (self.data,)

    def runs(self, grid: Grid) -> Runs:
        if (grid.n_q, grid.n_k) != self.lengths:
            if self.data.shape[2] == 1 and grid.n_k == self.data.shape[3]:
                raise ValueError(
                    f"the array has shape {self.data.shape}, which is a mask of one query: for "
                    "padding at the end give the numbers of keys as lengths= to "
                    "sparseflash.attention, for other padding broadcast the array to "
                    f"{(*self.data.shape[:2], grid.n_q, grid.n_k)}"
                )
            n_q, n_k = self.lengths
            remedy = ""
            if self.data.shape[:2] == (1, 1) and grid.n_k == n_k:
                remedy = (
                    f"; if its rows are {n_q} padded sequences, give the numbers of keys as "
                    f"lengths= to sparseflash.attention, or an array ({n_q}, 1, {grid.n_q}, {n_k})"
                )
            raise ValueError(
                f"n_q is {grid.n_q} and n_k {grid.n_k}: this mask comes from an array, "
                f"so build it for n_q={n_q}, n_k={n_k}{remedy}"
            )
        codes = np.empty((grid.slices * grid.rows, grid.cols), np.uint8)
        for line in range(len(codes)):
            b, h = divmod(line // grid.rows, grid.heads)
            row = line % grid.rows
            tokens = self.data[b, h, grid.q_first[row] : grid.q_last[row] + 1]
            tokens = tokens[:, : grid.k_last[-1] + 1]
            some = np.logical_or.reduceat(tokens.any(0), grid.k_first)
            every = np.logical_and.reduceat(tokens.all(0), grid.k_first)
            codes[line] = np.where(every, rl.FULL, np.where(some, rl.MIXED, rl.EMPTY))
        return Runs(*rl.joined(np.arange(grid.size), codes.ravel()))

    def allowed(self, grid: Grid, s: Ints, q: Ints, k: Ints) -> Bools:
        return self.data[s // grid.heads, s % grid.heads, q, k]
