"""Block codes of a mask whose tokens are put into another order, without an N x N array.

The mask is placed on a fine grid of short segments of its own sequence. A block of the new order
holds whole segments where it can, and touches some in any case; it is empty when all pairs of the
segments that it touches are, full when all of them are, and MIXED otherwise.
"""

from dataclasses import dataclass

import numpy as np

from masks import runs as rl
from masks.runs import Grid, Ints, Runs, distinct, expand, quotient

GRAINS = (64, 32, 16, 8, 4)  # tokens of a segment: the first one that no block cuts
CUT = 8  # where all of them are cut
CELLS_AT_ONCE = 1 << 22


@dataclass(frozen=True)
class Side:
    """The segments that the blocks touch along one side."""

    grain: int  # tokens of a segment
    segments: int  # in the whole sequence
    block: Ints  # (P,) the pairs of a block and a segment, ascending
    segment: Ints  # (P,)
    count: Ints  # (blocks,) segments of every block

    @classmethod
    def of(cls, order: Ints, origin: int, size: int, blocks: int) -> "Side":
        """For blocks of `size`, of which number 0 begins at place `origin` of the new order."""
        block = (np.arange(len(order)) - origin) // size  # outside 0..blocks - 1 for other tokens
        of_token = np.empty(len(order), np.int64)
        of_token[order] = block
        whole = (g for g in GRAINS if _constant(of_token, g))
        grain = next(whole, CUT)
        segments = -(-len(order) // grain)
        pair = distinct((block * segments + order // grain)[(block >= 0) & (block < blocks)])
        block, segment = quotient(pair, segments)
        return cls(grain, segments, block, segment, np.bincount(block, minlength=blocks))


def _constant(values: Ints, size: int) -> bool:
    """Whether all stretches of `size` values hold one value each."""
    first = np.repeat(values[::size], size)[: len(values)]
    return bool(np.array_equal(values, first))


def regroup(fine: Runs, grid: Grid, rows: Side, cols: Side) -> Runs:
    """Codes on `grid` from those of the fine grid, rows.segments x cols.segments cells a slice."""
    order = np.argsort(cols.segment, kind="stable")  # segment -> its blocks
    block = cols.block[order]
    ptr = np.searchsorted(cols.segment[order], np.arange(cols.segments + 1))
    step = max(1, CELLS_AT_ONCE // max(cols.segments, grid.cols))
    bounds = np.searchsorted(rows.block, np.arange(0, grid.rows + step, step))
    ends = np.append(fine.starts[1:], grid.slices * rows.segments * cols.segments)
    segments = []
    for s in range(grid.slices):
        for number, begin in enumerate(range(0, grid.rows, step)):
            part = slice(bounds[number], bounds[number + 1])
            size = min(step, grid.rows - begin) * grid.cols
            local, line = rows.block[part] - begin, rows.segment[part] + s * rows.segments
            at, full = _cells(fine, ends, local, line, cols.segments)
            local, segment = quotient(at, cols.segments)
            of, entry = expand(ptr[segment], ptr[segment + 1])
            x, filled = _sums(local[of] * grid.cols + block[entry], full[of], size)
            row, col = quotient(x, grid.cols)
            area = rows.count[begin + row] * cols.count[col]
            code = np.where(filled == area, rl.FULL, rl.MIXED).astype(np.uint8)
            new = np.append(True, (np.diff(x) != 1) | (code[1:] != code[:-1]))[: len(x)]
            last = np.append(new[1:], True)[: len(x)]
            x += (s * grid.rows + begin) * grid.cols
            segments.append((x[new], x[last] + 1, code[new]))
    return rl.from_segments(grid, *map(np.concatenate, zip(*segments, strict=True)))


def _sums(place: Ints, weight: Ints, size: int) -> tuple[Ints, Ints]:
    """(x, sum): the different places below `size`, and the weight at each."""
    if 8 * len(place) > size:
        x = np.flatnonzero(np.bincount(place, minlength=size))
        return x, np.bincount(place, weight, size)[x]
    order = np.argsort(place, kind="stable")
    place = place[order]
    heads = np.flatnonzero(np.diff(place, prepend=-1))
    return place[heads], np.add.reduceat(weight[order], heads) if len(heads) else weight


def _cells(fine: Runs, ends: Ints, local: Ints, line: Ints, width: int) -> tuple[Ints, Ints]:
    """Fine lines laid over each other: line line[i] counts for block row local[i].

    Returns:
        (at, full): places local * width + column where any of the lines is not empty, ascending,
        and how many of them are full there.
    """
    low = np.searchsorted(fine.starts, line * width, "right") - 1
    high = np.searchsorted(fine.starts, (line + 1) * width, "left")
    of, run = expand(low, high)
    shift = (local - line) * width
    begin = np.maximum(fine.starts[run], (line * width)[of]) + shift[of]
    end = np.minimum(ends[run], ((line + 1) * width)[of]) + shift[of]
    kept = fine.codes[run] != rl.EMPTY
    is_full = (fine.codes[run] == rl.FULL)[kept].astype(np.int64)

    x = np.concatenate([begin[kept], end[kept]])
    order = np.argsort(x, kind="stable")
    x = x[order]
    some = np.cumsum(np.where(order < len(is_full), 1, -1))
    full = np.cumsum(np.concatenate([is_full, -is_full])[order])
    inside = some[:-1] > 0
    of, at = expand(x[:-1][inside], x[1:][inside])
    return at, full[:-1][inside][of]
