"""Run-length functions over the block grid: the exact code of every block in O(runs) memory.

A mask of one length cuts attention into rows x cols blocks. Every block has a code: EMPTY (no pair
of tokens allowed), FULL (all of them), or MIXED (the tokens have to be looked at: the block is
partial, or it comes from blocks that are). The codes are stored as runs over the flattened grid
x = (slice * rows + row) * cols + col, with slice = b * heads + h.

The codes are ordered like the truth values of Kleene's logic: false, unknown, true. So `|` is the
maximum, `&` the minimum, and `~` counts from the other end.
"""

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from masks.checks import integer

Ints = NDArray[np.int64]
Codes = NDArray[np.uint8]
Bools = NDArray[np.bool_]

EMPTY, MIXED, FULL = range(3)


@dataclass(frozen=True)
class Grid:
    """Block geometry of one mask at one length: tokens, block sizes and the number of slices.

    Block row 0 begins with query `q_origin`, and block column 0 with key `k_origin`. Beyond 0 the
    grid is a window of a longer mask; below 0, its first blocks are cut by the beginning of the
    sequence as the last ones are by its end. The window ends with the mask, or after `q_blocks`
    block rows and `k_blocks` block columns.
    """

    n_q: int
    n_k: int
    block_q: int
    block_k: int
    batch: int = 1
    heads: int = 1
    q_origin: int = 0
    k_origin: int = 0
    q_blocks: int | None = None
    k_blocks: int | None = None

    def __post_init__(self):
        for name in ("n_q", "n_k", "block_q", "block_k", "batch", "heads"):
            integer(name, getattr(self, name), min=1)
        for side in "qk":
            low, high = 1 - getattr(self, f"block_{side}"), getattr(self, f"n_{side}") - 1
            integer(f"{side}_origin", getattr(self, f"{side}_origin"), min=low, max=high)

    @property
    def rows(self) -> int:
        return self.q_blocks or -(-(self.n_q - self.q_origin) // self.block_q)

    @property
    def cols(self) -> int:
        return self.k_blocks or -(-(self.n_k - self.k_origin) // self.block_k)

    @property
    def whole(self) -> bool:
        """Whether this is no window of a longer mask."""
        blocks = self.q_blocks, self.k_blocks
        return self.q_origin == 0 == self.k_origin and blocks == (None, None)

    @property
    def area(self) -> int:
        """Blocks of one slice."""
        return self.rows * self.cols

    @property
    def slices(self) -> int:
        return self.batch * self.heads

    @property
    def size(self) -> int:
        """Blocks of all slices."""
        return self.slices * self.area

    def q_token(self, row: Ints) -> Ints:
        """First query of the block rows; below 0 where the beginning cuts the block."""
        return self.q_origin + row * self.block_q

    def k_token(self, col: Ints) -> Ints:
        """First key of the block columns; below 0 where the beginning cuts the block."""
        return self.k_origin + col * self.block_k

    @cached_property
    def q_first(self) -> Ints:
        """First existing query of every block row."""
        return np.maximum(self.q_token(np.arange(self.rows, dtype=np.int64)), 0)

    @cached_property
    def q_last(self) -> Ints:
        """Last existing query of every block row."""
        return np.minimum(self.q_token(np.arange(1, self.rows + 1, dtype=np.int64)), self.n_q) - 1

    @cached_property
    def k_first(self) -> Ints:
        """First existing key of every block column."""
        return np.maximum(self.k_token(np.arange(self.cols, dtype=np.int64)), 0)

    @cached_property
    def k_last(self) -> Ints:
        """Last existing key of every block column."""
        return np.minimum(self.k_token(np.arange(1, self.cols + 1, dtype=np.int64)), self.n_k) - 1

    def window(self, rows: tuple[int, int], cols: tuple[int, int]) -> "Grid":
        """Block rows rows[0]..rows[1]-1 and block columns cols[0]..cols[1]-1."""
        return replace(
            self,
            q_origin=self.q_origin + rows[0] * self.block_q,
            k_origin=self.k_origin + cols[0] * self.block_k,
            q_blocks=rows[1] - rows[0],
            k_blocks=cols[1] - cols[0],
        )

    def cut(self, row: Ints, col: Ints) -> Ints:
        """Which ends of the sequence may cut a block: equal numbers, equal existing tokens."""
        q, k = self.q_token(row), self.k_token(col)
        last = (q + self.block_q >= self.n_q) * 2 + (k + self.block_k >= self.n_k)
        if min(self.q_origin, self.k_origin) >= 0:
            return last
        return last + (q < 0) * 8 + (k < 0) * 4

    def split(self, x: Ints) -> tuple[Ints, Ints, Ints]:
        """Flattened positions -> (slice, block row, block column)."""
        line, col = quotient(x, self.cols)
        s, row = quotient(line, self.rows)
        return s, row, col


class Runs(NamedTuple):
    """Piecewise constant codes: run r has codes[r] on [starts[r], starts[r + 1]).

    The last run ends with the grid. starts[0] == 0, starts ascend, neighbouring codes differ.
    """

    starts: Ints  # (R,)
    codes: Codes  # (R,)

    def at(self, x: Ints) -> Codes:
        """Codes at the flattened positions `x`."""
        return self.codes[np.searchsorted(self.starts, x, "right") - 1]


def constant(code: int) -> Runs:
    """Return the same code everywhere."""
    return Runs(np.zeros(1, np.int64), np.array([code], np.uint8))


def compact(starts: Ints, codes: NDArray, size: int) -> tuple[Ints, NDArray]:
    """Return the normal form of ascending `starts`: the last of equal ones wins."""
    keep = np.diff(starts, append=size) > 0
    return joined(starts[keep], codes[keep])


def joined(starts: Ints, codes: NDArray) -> tuple[Ints, NDArray]:
    """Return runs without those that have the code of the one before."""
    keep = np.append(True, codes[1:] != codes[:-1])
    return (starts, codes) if keep.all() else (starts[keep], codes[keep])


def concatenated(parts: list[tuple[Ints, NDArray]]) -> tuple[Ints, NDArray]:
    """Return the runs of parts that follow one another, each in normal form."""
    last, kept = None, []
    for starts, codes in parts:
        if len(codes):
            again = int(codes[0] == last)
            kept.append((starts[again:], codes[again:]))
            last = codes[-1]
    starts, codes = kept[0] if len(kept) == 1 else map(np.concatenate, zip(*kept, strict=True))
    return starts, codes


def from_segments(grid: Grid, start: Ints, stop: Ints, codes: NDArray) -> Runs:
    """codes[i] on the positions start[i]..stop[i] - 1, EMPTY elsewhere.

    The segments ascend and do not overlap.
    """
    # 0, start, stop, start, stop, ..: a start wins over the stop in the same place
    starts = np.append(0, np.stack([start, stop], axis=1))
    both = np.full(len(starts), EMPTY, np.uint8)
    both[1::2] = codes
    return Runs(*compact(starts, both, grid.size))


def from_cover(grid: Grid, line: Ints, first: Ints, stop: Ints, tokens: Ints) -> Runs:
    """Codes of a union of disjoint rectangles, from the area that they cover of every block.

    Rectangle i covers tokens[i] token pairs of each block in columns first[i]..stop[i]-1 of line[i]
    (slice * rows + row). The last column, which may be narrower, needs a rectangle of its own.
    """
    x, area = depths(grid, line, first, stop, tokens)
    _, row, col = grid.split(x)
    height = grid.q_last[row] - grid.q_first[row] + 1
    width = grid.k_last[col] - grid.k_first[col] + 1
    codes = np.where(area == 0, EMPTY, np.where(area == height * width, FULL, MIXED))
    starts = np.append(0, x)  # EMPTY up to the first rectangle
    return Runs(*compact(starts, np.append(EMPTY, codes).astype(np.uint8), grid.size))


def depths(grid: Grid, line: Ints, first: Ints, stop: Ints, weight: Ints) -> tuple[Ints, Ints]:
    """(x, depth): from position x[i] on, the intervals that lie there weigh depth[i] together.

    Interval i is columns first[i]..stop[i]-1 of line[i] (slice * rows + row).
    """
    x = np.concatenate([line * grid.cols + first, line * grid.cols + stop])
    order = np.argsort(x, kind="stable")
    x, depth = x[order], np.cumsum(np.concatenate([weight, -weight])[order])
    last = np.diff(x, append=grid.size) > 0  # of the changes in one place
    return x[last], depth[last]


def merge(a: Runs, b: Runs, operator: np.ufunc) -> Runs:
    """operator(a, b) block by block, in time linear in the number of runs."""
    starts = np.concatenate([a.starts, b.starts])
    order = np.argsort(starts, kind="stable")  # two sorted halves: timsort only merges them
    starts = starts[order]
    in_a = np.cumsum(order < len(a.starts))  # runs of a begun so far
    in_b = np.arange(1, len(order) + 1) - in_a
    last = np.append(starts[1:] != starts[:-1], True)  # both operands have caught up here
    codes = operator(a.codes[in_a[last] - 1], b.codes[in_b[last] - 1])
    keep = np.append(True, codes[1:] != codes[:-1])
    return Runs(starts[last][keep], codes[keep])


def stitch(slices: list[tuple[Runs, int]], area: int) -> Runs:
    """Return runs whose slice i is the given slice of the given runs, of `area` blocks a slice."""
    starts, codes = [], []
    for i, (runs, source) in enumerate(slices):
        low = np.searchsorted(runs.starts, source * area, "right") - 1
        high = np.searchsorted(runs.starts, (source + 1) * area, "left")
        inside = np.maximum(runs.starts[low:high], source * area)
        starts.append(inside + (i - source) * area)
        codes.append(runs.codes[low:high])
    return Runs(*compact(np.concatenate(starts), np.concatenate(codes), len(slices) * area))


def quotient(x: NDArray, divisor: Any) -> tuple[NDArray, NDArray]:
    """(x // divisor, x % divisor), several times as fast as `np.divmod` for one divisor."""
    whole = x // divisor
    return whole, x - whole * divisor


def ranges(first: Ints, count: Ints) -> Ints:
    """first[i], first[i] + 1, .., count[i] of them, for all i in turn."""
    offset = np.repeat(first - np.cumsum(count) + count, count)
    return offset + np.arange(len(offset))


def distinct(x: Ints) -> Ints:
    """Return the different values of x, ascending; `np.unique` hashes, which is slow."""
    x = np.sort(x, kind="stable")  # linear where x is a few ascending parts
    return x[np.append(True, x[1:] != x[:-1])[: len(x)]]


def expand(first: Ints, stop: Ints) -> tuple[Ints, Ints]:
    """(i, value): every value from first[i] to stop[i] - 1, for all i in turn."""
    count = np.maximum(stop - first, 0)
    return np.repeat(np.arange(len(first)), count), ranges(first, count)
