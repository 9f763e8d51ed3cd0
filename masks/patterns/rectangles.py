"""Block codes of token rectangles, and of intervals of blocks."""

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
    q_start, q_stop = np.maximum(q_start, grid.q_first[0]), np.minimum(q_stop, grid.n_q)
    k_start, k_stop = np.maximum(k_start, grid.k_first[0]), np.minimum(k_stop, grid.n_k)
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
    """The greatest code of the intervals that a block lies in; EMPTY where it lies in none.

    Interval i is columns first[i]..stop[i]-1 of line[i] (slice * rows + row), of code[i].
    """
    full = 1 << 32  # counts full intervals above, mixed ones below
    x = np.concatenate([line * grid.cols + first, line * grid.cols + stop])
    weight = np.where(code == rl.FULL, full, 1)
    order = np.argsort(x, kind="stable")
    x, depth = x[order], np.cumsum(np.concatenate([weight, -weight])[order])
    last = np.diff(x, append=grid.size) > 0  # of the changes in one place
    x, depth = x[last], depth[last]
    codes = np.where(depth >= full, rl.FULL, np.where(depth > 0, rl.MIXED, rl.EMPTY))
    codes = np.append(rl.EMPTY, codes).astype(np.uint8)
    return Runs(*rl.compact(np.append(0, x), codes, grid.size))
