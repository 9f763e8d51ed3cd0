"""Compressed lists of the non-empty blocks: by query block (CSR) and by key block (CSC)."""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from masks.runs import Grid, Ints, distinct, quotient, ranges

EMPTY, FULL = -2, -1  # codes in `BlockMask.tiles`; one >= 0 is the number of a bit tile


class BlockLists(NamedTuple):
    """One list for every line: a (slice, query block) of CSR, a (slice, key block) of CSC.

    A list holds its partial blocks first, then its full ones, each kind ascending.
    """

    ptr: Ints  # (lines + 1,) line r has the entries ptr[r]..ptr[r + 1]
    mid: Ints  # (lines,) ptr[r]..mid[r] are partial, mid[r]..ptr[r + 1] full
    idx: NDArray[np.int32]  # (nnz,) key block of CSR, query block of CSC
    tile: NDArray[np.int32]  # (nnz,) number of the bit tile, -1 for full


def row_lists(grid: Grid, starts: Ints, tiles: NDArray[np.int32]) -> BlockLists:
    """CSR of a run-length code (see `BlockMask`)."""
    line, first, length, tile = row_segments(grid, starts, tiles)
    partial = tile != FULL
    lines = grid.slices * grid.rows
    ptr, mid = _pointers(
        np.bincount(line, length, lines), np.bincount(line[partial], length[partial], lines)
    )
    order = np.argsort(line * 2 + ~partial, kind="stable")
    idx = ranges(first[order], length[order], np.int32)
    return BlockLists(ptr, mid, idx, np.repeat(tile[order], length[order]))


def column_lists(grid: Grid, starts: Ints, tiles: NDArray[np.int32]) -> BlockLists:
    """CSC of a run-length code (see `BlockMask`)."""
    line, first, length, tile = row_segments(grid, starts, tiles)
    bounds = np.searchsorted(line, np.arange(grid.slices + 1) * grid.rows)
    counts, partials, rows, entries = [], [], [], []
    for s in range(grid.slices):
        part = slice(bounds[s], bounds[s + 1])
        col = ranges(first[part], length[part], np.int32)
        row = np.repeat((line[part] - s * grid.rows).astype(np.int32), length[part])
        entry = np.repeat(tile[part], length[part])
        partial = entry != FULL
        counts.append(np.bincount(col, minlength=grid.cols))
        partials.append(np.bincount(col[partial], minlength=grid.cols))
        group = col * 2 + ~partial
        if 2 * grid.cols <= 1 << 16:
            group = group.astype(np.uint16)  # NumPy sorts 16-bit keys by radix: linear time
        order = np.argsort(group, kind="stable")
        rows.append(row[order])
        entries.append(entry[order])
    ptr, mid = _pointers(np.concatenate(counts), np.concatenate(partials))
    return BlockLists(ptr, mid, np.concatenate(rows), np.concatenate(entries))


def row_segments(
    grid: Grid, starts: Ints, tiles: NDArray, *, empty: int = EMPTY
) -> tuple[Ints, Ints, Ints, NDArray]:
    """Non-empty runs, cut where a block row ends: (line, first column, length, tile), ascending."""
    lines = np.arange(grid.slices * grid.rows, dtype=np.int64) * grid.cols
    cuts = distinct(np.concatenate([starts, lines]))
    tile = tiles[np.searchsorted(starts, cuts, "right") - 1]
    length = np.diff(cuts, append=grid.size)
    kept = tile != empty
    line, first = quotient(cuts[kept], grid.cols)
    return line, first, length[kept], tile[kept]


def _pointers(counts: NDArray, partials: NDArray) -> tuple[Ints, Ints]:
    """(ptr, mid) of lines with so many entries, so many of them partial."""
    ptr = np.append(0, np.cumsum(counts)).astype(np.int64)
    return ptr, ptr[:-1] + partials.astype(np.int64)
