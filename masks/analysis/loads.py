"""Exact counts of blocks and tokens: who sees how much, and who sees nothing."""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from masks.analysis.segments import Segments, union
from masks.runs import Bools, Grid, Ints, expand


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
    """Allowed pairs of tokens."""
    partial = segments.where(~segments.full)
    cut = (partial.length * segments.facts.pairs[partial.tile]).sum()
    return area(segments.where(segments.full)) + int(cut)


def seeing(segments: Segments) -> Bools:
    """(slices, n_q): whether the query sees any key."""
    grid = segments.grid
    sees = np.zeros((grid.slices * grid.rows, grid.block_q), bool)
    sees[segments.line[segments.full]] = True
    partial = segments.where(~segments.full)
    line, tile = _distinct(partial.line, partial.tile)
    _gather_or(sees, line, segments.facts.sees, tile)
    return sees.reshape(grid.slices, -1)[:, : grid.n_q]


def seen(segments: Segments) -> Bools:
    """(slices, n_k): whether any query sees the key."""
    grid = segments.grid
    whole = segments.where(segments.full)
    result = np.repeat(
        (cover(grid, whole.s, whole.first, whole.stop) > 0)[..., None], grid.block_k, axis=2
    ).reshape(-1, grid.block_k)
    partial = segments.where(~segments.full)
    group = partial.s * max(len(segments.bits), 1) + partial.tile
    group, first, stop = union(group, partial.first, partial.stop, grid.cols)
    of, col = expand(first, stop)
    s, tile = np.divmod(group[of], max(len(segments.bits), 1))
    place = s * grid.cols + col
    order = np.argsort(place, kind="stable")
    _gather_or(result, place[order], segments.facts.seen, tile[order])
    return result.reshape(grid.slices, -1)[:, : grid.n_k]


def _distinct(line: Ints, tile: NDArray) -> tuple[Ints, Ints]:
    """The different (line, tile), ascending."""
    if not len(line):
        return line, tile.astype(np.int64)
    count = int(tile.max()) + 1
    return np.divmod(np.unique(line * count + tile), count)


def _gather_or(out: Bools, line: Ints, table: Bools, tile: Ints) -> None:
    """out[line] |= table[tile], for ascending lines; in pieces of bounded memory."""
    step = 1 << 17
    for begin in range(0, len(line), step):
        here = line[begin : begin + step]
        starts = np.flatnonzero(np.append(True, here[1:] != here[:-1]))
        out[here[starts]] |= np.logical_or.reduceat(table[tile[begin : begin + step]], starts)
