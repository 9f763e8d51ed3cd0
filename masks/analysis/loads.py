"""Exact counts of blocks and tokens: who sees how much, and who sees nothing."""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from masks.analysis.segments import Segments
from masks.runs import Bools, Grid, Ints, expand, quotient

PAIRS_AT_ONCE = 1 << 17  # of (line, tile): bounds the memory


class Load(NamedTuple):
    """Non-empty blocks of a query block (forward) or of a key block (backward)."""

    min: int
    mean: float
    max: int

    @property
    def imbalance(self) -> float:
        """max / mean; 0 where nothing is allowed."""
        return self.max / self.mean if self.mean else 0.0

    @classmethod
    def of(cls, counts: NDArray) -> "Load":
        return cls(int(counts.min()), float(counts.mean()), int(counts.max()))


def row_loads(segments: Segments) -> Ints:
    """(slices, rows): non-empty key blocks of every query block."""
    grid = segments.grid
    loads = np.bincount(segments.line, segments.length, grid.slices * grid.rows)
    return loads.astype(np.int64).reshape(grid.slices, grid.rows)


def column_loads(segments: Segments) -> Ints:
    """(slices, cols): non-empty query blocks of every key block."""
    return cover(segments.grid, segments.s, segments.first, segments.stop)


def cover(grid: Grid, s: Ints, first: Ints, stop: Ints) -> Ints:
    """(slices, cols): how many of the column intervals [first, stop) of slice s hold a column."""
    width = grid.cols + 1
    change = np.bincount(s * width + first, minlength=grid.slices * width)
    change -= np.bincount(s * width + stop, minlength=grid.slices * width)
    return np.cumsum(change.reshape(grid.slices, width), axis=1)[:, :-1]


def area(segments: Segments) -> int:
    """Pairs of existing tokens in the blocks."""
    grid = segments.grid
    height = grid.q_last - grid.q_first + 1
    keys = grid.k_last[segments.stop - 1] + 1 - grid.k_first[segments.first]
    return int((height[segments.row] * keys).sum())


def allowed_pairs(segments: Segments) -> int:
    """Return the allowed pairs of tokens."""
    partial = segments.where(~segments.full)
    cut = (partial.length * segments.facts.pairs[partial.tile]).sum()
    return area(segments.where(segments.full)) + int(cut)


def seeing(segments: Segments) -> Bools:
    """(slices, n_q): whether the query sees any key."""
    grid, partial = segments.grid, segments.where(~segments.full)
    whole = np.zeros(grid.slices * grid.rows, bool)
    whole[segments.line[segments.full]] = True
    sees = _tokens(whole, partial.line, partial.tile, segments.facts.sees)
    return sees.reshape(grid.slices, -1)[:, : grid.n_q]


def seen(segments: Segments) -> Bools:
    """(slices, n_k): whether any query sees the key."""
    grid, partial = segments.grid, segments.where(~segments.full)
    full = segments.where(segments.full)
    whole = cover(grid, full.s, full.first, full.stop).ravel() > 0
    of, col = expand(partial.first, partial.stop)
    place = partial.s[of] * grid.cols + col
    found = _tokens(whole, place, partial.tile[of], segments.facts.seen)
    return found.reshape(grid.slices, -1)[:, : grid.n_k]


def _tokens(whole: Bools, line: Ints, tile: NDArray, facts: Bools) -> Bools:
    """(lines, block): True in whole lines, elsewhere the facts of any tile in the line."""
    out = np.repeat(whole[:, None], facts.shape[1], axis=1)
    count = max(1, len(facts))
    pairs = np.unique(line * count + tile)
    for begin in range(0, len(pairs), PAIRS_AT_ONCE):
        here, which = quotient(pairs[begin : begin + PAIRS_AT_ONCE], count)
        starts = np.flatnonzero(np.diff(here, prepend=-1))
        out[here[starts]] |= np.logical_or.reduceat(facts[which], starts)
    return out
