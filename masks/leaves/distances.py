"""Base of the patterns that depend on the distance q - k alone."""

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view

from masks.algebra import Mask
from masks.checks import choice
from masks.leaves.geometry import code, from_profiles, row_numbers
from masks.leaves.leaf import Leaf
from masks.runs import Bools, Grid, Ints, Runs, quotient

ALIGNMENTS = ("top_left", "bottom_right")
DISTANCES_AT_ONCE = 1 << 18  # bounds the memory for them


class Distances(Leaf):
    """A pattern with `distance`; queries are counted as `align` says."""

    align: str

    def __post_init__(self):
        choice("align", self.align, ALIGNMENTS)

    def distance(self, d: Ints) -> Bools:
        """Whether the distances d = q - k are allowed, elementwise; any number may come."""
        raise NotImplementedError

    def shift(self, grid: Grid) -> int:
        """Return what is added to the number of a query before its distance is taken."""
        return grid.n_k - grid.n_q if self.align == "bottom_right" else 0

    def offset(self, grid: Grid, row: Ints, col: Ints) -> Ints:
        """Distance of the first query from the first key of a block, as if no end cut it."""
        return grid.q_token(row) - grid.k_token(col) + self.shift(grid)

    def moves(self) -> tuple[int, ...]:
        return (1,)

    def laid(self, start: Ints, stop: Ints) -> Mask | None:
        return super().laid(start, stop) if self.align == "top_left" else None

    def runs(self, grid: Grid) -> Runs:
        # The code of a whole block follows from its offset, so all rows in one phase look the same
        # but for a move. A block that an end cuts may be MIXED where its tokens are all alike.
        rows, block_q, block_k = np.arange(grid.rows), grid.block_q, grid.block_k
        moved, phase = quotient(rows * block_q, block_k)
        phases, which = np.unique(phase, return_inverse=True)
        origin = int(self.offset(grid, rows[:1], rows[:1])[0])
        lowest = origin - grid.cols * block_k + 1
        counts = self._counts(lowest, origin + grid.rows * block_q)
        profiles = []
        for number, start in enumerate((origin - lowest + phases).tolist()):
            first = -int(moved[which == number].max())
            offset = start - np.arange(first, grid.cols) * block_k
            inside = counts[offset + block_q] - counts[offset - block_k + 1]
            profiles.append((first, code(inside, block_q + block_k - 1)))
        return from_profiles(grid, profiles, which, moved)

    def _counts(self, low: int, stop: int) -> np.ndarray:
        """Entry i is the number of allowed distances among the first i of low..stop-1."""
        counts = np.zeros(stop - low + 1, np.int32)  # differences of it are right if it overflows
        for begin in range(low, stop, DISTANCES_AT_ONCE):
            d = np.arange(begin, min(begin + DISTANCES_AT_ONCE, stop))
            counts[begin - low + 1 :][: len(d)] = self.distance(d)
        return np.cumsum(counts, dtype=np.int32, out=counts)

    def allowed(self, grid: Grid, s: Ints, q: Ints, k: Ints) -> Bools:
        q = q + self.shift(grid)
        size = np.broadcast(q, k).size
        if not size:
            return self.distance(q - k)
        lowest, highest = int(np.min(q) - np.max(k)), int(np.max(q) - np.min(k))
        if highest - lowest >= size:
            return self.distance(q - k)
        here = self.distance(np.arange(highest, lowest - 1, -1))  # pairs share distances
        if np.shape(q)[-1:] == (1,) and (np.diff(k) == 1).all():  # keys in a row
            start = highest - (q - k[..., :1])[..., 0]
            return sliding_window_view(here, k.shape[-1])[start]
        return here[highest - q + k]

    def signature(self, grid: Grid, s: Ints, row: Ints, col: Ints) -> Ints:
        offset, which = np.unique(self.offset(grid, row, col), return_inverse=True)
        inside = np.arange(1 - grid.block_k, grid.block_q)
        step = max(1, DISTANCES_AT_ONCE // len(inside))
        content = [
            self.distance(offset[i : i + step, None] + inside) for i in range(0, len(offset), step)
        ]
        return row_numbers(np.packbits(np.concatenate(content), axis=1))[which]
