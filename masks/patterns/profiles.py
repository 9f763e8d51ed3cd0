"""Parts that several patterns share: rows that repeat, and contents that are equal."""

import numpy as np
from numpy.typing import NDArray

from masks import runs as rl
from masks.runs import Bools, Codes, Grid, Ints, Runs

LINES_AT_ONCE = 512  # bounds the memory for grids with millions of runs


def code(part: NDArray, whole: NDArray | int) -> Codes:
    """Codes of blocks of `whole` token pairs, `part` of them allowed."""
    return np.where(part == 0, rl.EMPTY, np.where(part == whole, rl.FULL, rl.MIXED)).astype(
        np.uint8
    )


def from_profiles(
    grid: Grid, profiles: list[tuple[int, Codes]], which: Ints, shift: Ints | int = 0
) -> Runs:
    """Codes of a grid each of whose lines is one of a few profiles, moved to the right.

    Args:
        profiles: (first, codes): codes[i] is that of column first + i before the move.
        which: (slices * rows,) the profile of every line.
        shift: (slices * rows,) columns by which it is moved; every line has to be covered.
    """
    shift = np.broadcast_to(np.asarray(shift, np.int64), which.shape)
    low, high = np.empty_like(shift), np.empty_like(shift)  # the entries that a line shows
    begins, codes, entries = [], [], 0
    for number, (first, profile) in enumerate(profiles):
        begin = first + np.flatnonzero(np.append(True, profile[1:] != profile[:-1]))
        mine = which == number
        low[mine] = entries + np.searchsorted(begin, -shift[mine], "right") - 1
        high[mine] = entries + np.searchsorted(begin, grid.cols - shift[mine], "left")
        begins.append(begin)
        codes.append(profile[begin - first])
        entries += len(begin)
    begin, profile = np.concatenate(begins), np.concatenate(codes)
    parts = [
        _lines(grid, line, low[line], high[line], begin, profile, shift[line])
        for line in np.split(np.arange(len(which)), range(LINES_AT_ONCE, len(which), LINES_AT_ONCE))
    ]
    starts, codes = (np.concatenate(arrays) for arrays in zip(*parts, strict=True))
    return Runs(*rl.compact(starts, codes, grid.size))


def _lines(
    grid: Grid, line: Ints, low: Ints, high: Ints, begin: Ints, codes: Codes, shift: Ints
) -> tuple[Ints, Codes]:
    """Starts and codes of lines that show the entries low..high-1, without the repeated ones."""
    count = high - low
    entry = np.repeat(low - (np.cumsum(count) - count), count) + np.arange(count.sum())
    col = np.maximum(begin[entry] + np.repeat(shift, count), 0)
    return np.repeat(line * grid.cols, count) + col, codes[entry]


def distinct(contents: Bools) -> Ints:
    """(T,) numbers of the rows of `contents` (T, n): equal rows, equal numbers."""
    packed = np.ascontiguousarray(np.packbits(contents, axis=1))
    rows = packed.view(f"V{packed.shape[1]}").ravel()
    return np.unique(rows, return_inverse=True)[1].astype(np.int64)
