"""Block codes of token rectangles and of intervals of blocks, and numbers of equal rows."""

from collections.abc import Callable
from math import prod

import numpy as np
from numpy.typing import NDArray

from masks import runs as rl
from masks.runs import Grid, Ints, Runs, expand


def rectangle_runs(
    grid: Grid, entry: Ints, q_start: Ints, q_stop: Ints, k_start: Ints, k_stop: Ints
) -> Runs:
    """Exact codes of a union of disjoint rectangles of tokens.

    Args:
        entry: (R,) slices; the other four, (R,) too, are tokens, and may lie beyond the grid.
    """
    q_start, q_stop = np.maximum(q_start, grid.q_first[0]), np.minimum(q_stop, grid.q_last[-1] + 1)
    k_start, k_stop = np.maximum(k_start, grid.k_first[0]), np.minimum(k_stop, grid.k_last[-1] + 1)
    seen = (q_start < q_stop) & (k_start < k_stop)
    entry, q_start, q_stop = entry[seen], q_start[seen], q_stop[seen]
    k_start, k_stop = k_start[seen], k_stop[seen]

    first, last = ((x - grid.q_origin) // grid.block_q for x in (q_start, q_stop - 1))
    of, row = expand(first, last + 1)  # a piece for every block row that a rectangle meets
    height = np.minimum(q_stop[of] - 1, grid.q_last[row]) + 1
    height -= np.maximum(q_start[of], grid.q_first[row])
    line = entry[of] * grid.rows + row

    # It covers the first and the last of its columns in part, and those between in full width.
    first, last = ((x - grid.k_origin) // grid.block_k for x in (k_start, k_stop - 1))
    head = np.minimum(k_stop - 1, grid.k_last[first]) + 1 - k_start
    tail = np.where(last > first, k_stop - grid.k_first[last], 0)
    between = np.where(last > first + 1, grid.block_k, 0)
    parts = []
    for start, stop, width in (
        (first, first + 1, head),
        (first + 1, last, between),
        (last, last + 1, tail),
    ):
        kept = width[of] > 0
        piece = of[kept]
        parts.append((line[kept], start[piece], stop[piece], height[kept] * width[piece]))
    return rl.from_cover(grid, *map(np.concatenate, zip(*parts, strict=True)))


def interval_runs(grid: Grid, line: Ints, first: Ints, stop: Ints, code: NDArray) -> Runs:
    """Return the greatest code of the intervals that a block lies in; EMPTY where it lies in none.

    Interval i is columns first[i]..stop[i]-1 of line[i] (slice * rows + row), of code[i].
    """
    full = 1 << 32  # counts full intervals above, mixed ones below
    x, depth = rl.depths(grid, line, first, stop, np.where(code == rl.FULL, full, 1))
    codes = np.where(depth >= full, rl.FULL, np.where(depth > 0, rl.MIXED, rl.EMPTY))
    codes = np.append(rl.EMPTY, codes).astype(np.uint8)
    return Runs(*rl.compact(np.append(0, x), codes, grid.size))


def by_pairs(find: Callable[[Ints, Ints], NDArray], row: Ints, col: Ints) -> NDArray:
    """Return find(row, col), which broadcasts, from one look at every pair of different values."""
    rows, i = np.unique(row, return_inverse=True)
    cols, j = np.unique(col, return_inverse=True)
    if rows.size * cols.size > np.broadcast(row, col).size:
        return find(row, col)
    return find(rows[:, None], cols)[i.reshape(row.shape), j.reshape(col.shape)]


def row_numbers(content: NDArray) -> Ints:
    """(T,) integers: equal ones for equal rows of `content` (T, n)."""
    content = np.ascontiguousarray(content)
    words = np.pad(content.view(np.uint8), ((0, 0), (0, -content.shape[1] * content.itemsize % 8)))
    _, first, number = np.unique(hashes(words), return_index=True, return_inverse=True)
    if np.array_equal(words[first[number]], words):
        return number.astype(np.int64)
    rows = content.view(f"V{content.shape[1] * content.itemsize}").ravel()  # two hashes are equal
    return np.unique(rows, return_inverse=True)[1].astype(np.int64)


def hashes(content: NDArray) -> NDArray[np.uint64]:
    """(T,) hashes of the rows of `content` (T, ..), each of which is a multiple of 8 bytes."""
    words = content.reshape(len(content), prod(content.shape[1:])).view(np.uint64)
    factors = np.arange(1, 1 + words.shape[1], dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    factors = (factors ^ factors >> np.uint64(29)) * np.uint64(0xBF58476D1CE4E5B9)
    return np.matmul(words ^ words >> np.uint64(32), factors)
