"""Codes of all blocks from bounds: squares of blocks, quartered until they are decided.

The work grows with the blocks in question, not with the grid. Squares wait on a stack, in portions
of one size, so that little memory is held at a time.
"""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from masks import runs as rl
from masks.runs import Bools, Codes, Grid, Ints, Runs, expand

PORTION = 1 << 15  # squares looked at together: what is computed from them stays in cache
WAITING = 1 << 21  # segments kept before neighbours are joined


class Squares(NamedTuple):
    """Squares of size x size blocks with their first corner at (row, col), cut by the grid."""

    size: int
    s: Ints  # (T,) slice
    row: Ints  # (T,)
    col: Ints  # (T,)


class Segments(NamedTuple):
    """Blocks start..stop-1 of the flattened grid, all in one row, with a code."""

    start: Ints
    stop: Ints
    code: Codes


def classify(grid: Grid, codes_of: Callable[[Squares], Codes]) -> Runs:
    """Return runs of a grid, from a function that gives each square a code (MIXED: undecided)."""
    size = 1 << (min(grid.rows, grid.cols) - 1).bit_length()
    first = np.indices((grid.slices, -(-grid.rows // size), -(-grid.cols // size)))
    s, row, col = first.reshape(3, -1).astype(np.int64)
    stack = [Squares(size, s, row * size, col * size)]
    found: list[Segments] = []
    held, limit = 0, WAITING
    while stack:
        squares = stack.pop()
        code = np.broadcast_to(codes_of(squares), squares.row.shape)
        decided = code == rl.FULL if squares.size > 1 else code != rl.EMPTY
        found.append(_segments(grid, _choose(squares, decided), code[decided]))
        held += len(found[-1].start)
        if held > limit:
            found = [_join(found)]
            held = len(found[0].start)
            limit = max(WAITING, 2 * held)
        if squares.size > 1:
            smaller = _quarters(grid, _choose(squares, code == rl.MIXED))
            starts = range(0, len(smaller.row), PORTION)
            stack += [_choose(smaller, slice(start, start + PORTION)) for start in starts]
    return rl.from_segments(grid, *_join(found))


def _choose(squares: Squares, which: Bools | slice) -> Squares:
    return Squares(squares.size, *(array[which] for array in squares[1:]))


def _quarters(grid: Grid, squares: Squares) -> Squares:
    half = squares.size // 2
    row = (squares.row[:, None] + np.array([0, 0, half, half])).ravel()
    col = (squares.col[:, None] + np.array([0, half, 0, half])).ravel()
    inside = (row < grid.rows) & (col < grid.cols)
    return _choose(Squares(half, np.repeat(squares.s, 4), row, col), inside)


def _segments(grid: Grid, squares: Squares, code: Codes) -> Segments:
    """Return the rows of squares."""
    size, s, row, col = squares
    first = (s * grid.rows + row) * grid.cols + col
    width = np.minimum(size, grid.cols - col)
    if size == 1:
        return Segments(first, first + 1, code)
    height = np.minimum(size, grid.rows - row)
    of, below = expand(np.zeros_like(height), height)
    start = first[of] + below * grid.cols
    return Segments(start, start + width[of], code[of])


def _join(found: list[Segments]) -> Segments:
    """In ascending order, neighbours of one code in one."""
    start, stop, code = (np.concatenate(parts) for parts in zip(*found, strict=True))
    order = np.argsort(start)
    start, stop, code = start[order], stop[order], code[order]
    begins = np.ones(len(start), bool)
    begins[1:] = (start[1:] != stop[:-1]) | (code[1:] != code[:-1])
    ends = np.append(begins[1:], np.ones(min(len(start), 1), bool))
    return Segments(start[begins], stop[ends], code[begins])
