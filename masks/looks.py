"""Masks from a few looks: rows that look alike but for a move, and squares that bounds decide.

A million tokens have 8192 block rows, but all rows of `strided` look the same along the diagonal,
and those of a canvas differ only near its borders. So a few rows are evaluated, and the others are
copies that are moved along the keys.

Where bounds give a code to many blocks together, squares of blocks are quartered until they are
decided, so that the work grows with the blocks in question, not with the grid.
"""

from collections.abc import Callable, Sequence
from functools import cached_property
from math import lcm
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from masks import runs as rl
from masks.leaves.geometry import row_numbers
from masks.runs import Bools, Codes, Grid, Ints, Runs, expand, quotient, ranges
from masks.segments import row_segments
from masks.tiles import EMPTY
from masks.types import Moves, Repeats

NEAR = 16  # rows in one window, for each one has to find which of its tiles are alike
RUNS_AT_ONCE = 1 << 16  # bounds the memory for copies
Look = Callable[[Grid], tuple[Ints, NDArray]]  # (starts, codes) of a window


def periodic(grid: Grid, moves: Moves) -> Repeats:
    """Of a mask that stays the same when queries and keys both move by moves.period tokens."""
    period = lcm(moves.period, grid.block_k)
    q = grid.q_token(np.arange(grid.rows))
    before, within = (np.searchsorted(moves.cuts, x, "right") for x in (q, q + grid.block_q - 1))
    kind = np.where(before == within, before * period + q % period, -1 - np.arange(grid.rows))
    head = -(-max(moves.first_k - grid.k_origin, 0) // grid.block_k)
    return Repeats(kind, q // period * (period // grid.block_k), head)


def joined(parts: Sequence[Repeats | None]) -> Repeats | None:
    """Of a mask that is made of others, pair by pair."""
    known = [part for part in parts if part is not None]
    if len(known) < len(parts):
        return None
    moves = [part.move for part in known if part.move is not None]
    columns = [part.kind for part in known] + [move - moves[0] for move in moves[1:]]
    kind = row_numbers(np.stack(columns, axis=1))
    return Repeats(kind, moves[0] if moves else None, max(part.head for part in known))


class Part(NamedTuple):
    """Some columns of all lines: line i has the runs low[i]..high[i]-1, moved by move[i]."""

    low: Ints  # (lines,)
    high: Ints
    first: Ints  # (runs,) columns before the move
    code: NDArray[np.int32]
    move: Ints  # (lines,)
    begin: int  # the first of the columns, where the first run begins in any case


class Copies:
    """The rows to look at, and the mask that they make.

    Args:
        grid: begins with the first tokens.
    """

    def __init__(self, grid: Grid, repeats: Repeats):
        self.grid, (kind, move, self.head) = grid, repeats
        self.move = np.zeros_like(kind) if move is None else move
        self.kind = np.unique(kind, return_inverse=True)[1]
        if grid.n_q % grid.block_q:  # what the ends cut is a kind of its own
            self.kind[-1] = self.kind.max() + 1
        self.stop = grid.n_k // grid.block_k  # columns head..stop-1 move

    @property
    def worthwhile(self) -> bool:
        """Whether most blocks are copies."""
        return 2 * self.head < self.stop and 2 * len(self.chosen) <= self.grid.rows

    @cached_property
    def chosen(self) -> Ints:
        """Rows of each kind, by kind and then by descending move, that show all its blocks."""
        order = np.lexsort((-self.move, self.kind))
        ends = np.flatnonzero(np.diff(self.kind[order], append=-1))
        begins = np.append(0, ends[:-1] + 1)
        chosen, span = [*order[begins].tolist(), *order[ends].tolist()], self.stop - self.head
        far = self.move[order[begins]] - self.move[order[ends]] > span
        for begin, end in zip(begins[far].tolist(), ends[far].tolist(), strict=True):
            moves = -self.move[order[begin : end + 1]]  # ascending
            at = 0
            while moves[-1] - moves[at] > span:  # more queries than keys: rows between the two
                at = max(at + 1, int(np.searchsorted(moves, moves[at] + span, "right")) - 1)
                chosen.append(int(order[begin + at]))
        rows = np.array(chosen)
        rows = rows[np.lexsort((rows, -self.move[rows], self.kind[rows]))]
        kind, move = self.kind[rows], self.move[rows]
        return rows[np.append(True, (np.diff(kind) != 0) | (np.diff(move) != 0))]

    def runs(self, look: Look) -> tuple[Ints, NDArray[np.int32]]:
        """Return (starts, codes) of the grid, from those of some windows of it."""
        grid = self.grid
        rows = np.sort(self.chosen)
        gaps = np.flatnonzero(np.diff(rows) > NEAR)
        firsts, lasts = rows[np.append(0, gaps + 1)], rows[np.append(gaps, len(rows) - 1)]
        inner = [
            self._look(look, (first, last + 1), (self.head, self.stop))
            for first, last in zip(firsts.tolist(), lasts.tolist(), strict=True)
        ]
        line, first, stop, code = map(np.concatenate, zip(*inner, strict=True))
        kept = np.isin(line % grid.rows, rows)
        parts = [self._copies(line[kept], first[kept], stop[kept], code[kept])]
        for cols in ((0, self.head), (self.stop, grid.cols)):
            if cols[0] < cols[1]:
                line, first, _, code = self._look(look, (0, grid.rows), cols)
                every = np.arange(grid.slices * grid.rows)
                low, high = (np.searchsorted(line, every, side) for side in ("left", "right"))
                stay = np.zeros_like(every)
                parts.insert(cols[0] and len(parts), Part(low, high, first, code, stay, cols[0]))
        return _laid(grid, parts)

    def _look(
        self, look: Look, rows: tuple[int, int], cols: tuple[int, int]
    ) -> tuple[Ints, Ints, Ints, NDArray[np.int32]]:
        """(line, first, stop, code) of the runs of a window, cut where its rows end."""
        window = self.grid.window(rows, cols)
        line, first, length, code = row_segments(window, *look(window), empty=EMPTY - 1)
        s, row = quotient(line, window.rows)
        first = first + cols[0]
        return s * self.grid.rows + row + rows[0], first, first + length, code

    def _copies(self, line: Ints, first: Ints, stop: Ints, code: NDArray[np.int32]) -> Part:
        """Columns head..stop-1 of all lines, from the runs of those of the chosen rows."""
        grid, kinds = self.grid, int(self.kind.max()) + 1
        # Places are columns before the move. A chosen row shows those that the row before it, of
        # the same kind and with a larger move, does not.
        move = self.move[self.chosen]
        begin, end = self.head - move, self.stop - move
        again = self.kind[self.chosen[1:]] == self.kind[self.chosen[:-1]]
        begin[1:] = np.where(again, np.maximum(begin[1:], end[:-1]), begin[1:])
        rank = np.empty(grid.rows, np.int64)
        rank[self.chosen] = np.arange(len(self.chosen))
        s, row = quotient(line, grid.rows)
        at, profile = rank[row], s * kinds + self.kind[row]
        first, stop = np.maximum(first - move[at], begin[at]), np.minimum(stop - move[at], end[at])
        # One sorted key for the places of all profiles.
        lowest = -int(self.move.max()) - 1
        width = int(self.move.max()) - int(self.move.min()) + grid.cols + 2
        key = profile * width + first - lowest
        kept = np.flatnonzero(first < stop)
        kept = kept[np.argsort(key[kept], kind="stable")]
        profile, code = profile[kept], code[kept]
        new = np.append(True, (profile[1:] != profile[:-1]) | (code[1:] != code[:-1]))
        kept, code = kept[new], code[new]
        key, first = key[kept], first[kept]
        wanted = np.arange(grid.slices)[:, None] * kinds + self.kind
        wanted = (wanted * width - lowest - self.move).ravel()
        low = np.searchsorted(key, wanted + self.head, "right") - 1
        high = np.searchsorted(key, wanted + self.stop, "left")
        return Part(low, high, first, code, np.tile(self.move, grid.slices), self.head)


def _laid(grid: Grid, parts: list[Part]) -> tuple[Ints, NDArray[np.int32]]:
    """Return (starts, codes) of lines that are made of parts, from the left to the right."""
    line = np.arange(grid.slices * grid.rows) * grid.cols
    low, count, shift, begin, before = [], [], [], [], 0
    for part in parts:
        low.append(part.low + before)
        count.append(part.high - part.low)
        shift.append(line + part.move)
        begin.append(line + part.begin)
        before += len(part.first)
    low, count, shift, begin = (np.stack(x, axis=1).ravel() for x in (low, count, shift, begin))
    first, code = (np.concatenate([getattr(part, x) for part in parts]) for x in ("first", "code"))
    total = np.cumsum(count)
    starts, codes = np.empty(total[-1], np.int64), np.empty(total[-1], np.int32)
    steps = np.searchsorted(total, np.arange(0, total[-1], RUNS_AT_ONCE))
    bounds, size = rl.distinct(np.append(steps, len(total))), 0
    for here in map(slice, bounds[:-1], bounds[1:]):
        n = int(count[here].sum())
        start, value = starts[size : size + n], codes[size : size + n]
        heads = np.cumsum(count[here]) - count[here]
        entry = ranges(low[here], count[here])
        np.add(first[entry], np.repeat(shift[here], count[here]), out=start)
        value[:] = code[entry]
        start[heads] = begin[here]
        # The runs of a part differ from their neighbours; only two parts may have one code.
        again = heads[codes[size + heads - 1] == value[heads]]
        again = again[again > 0] if size == 0 else again
        if len(again):
            keep = np.ones(n, bool)
            keep[again] = False
            n -= len(again)
            start[:n], value[:n] = start[keep], value[keep]
        size += n
    return starts[:size], codes[:size]


# ---- squares ----

PORTION = 1 << 15  # squares looked at together: what is computed from them stays in cache


class Squares(NamedTuple):
    """Squares of size x size blocks with their first corner at (row, col), cut by the grid."""

    size: int
    s: Ints  # (T,) slice
    row: Ints  # (T,)
    col: Ints  # (T,)


def classify(grid: Grid, codes_of: Callable[[Squares], Codes]) -> Runs:
    """Return runs of a grid, from a function that gives each square a code (MIXED: undecided)."""
    size = 1 << (min(grid.rows, grid.cols) - 1).bit_length()
    first = np.indices((grid.slices, -(-grid.rows // size), -(-grid.cols // size)))
    s, row, col = first.reshape(3, -1).astype(np.int64)
    stack = [Squares(size, s, row * size, col * size)]
    found: list[tuple[Ints, Ints, Codes]] = []  # (start, stop, code)
    while stack:
        squares = stack.pop()
        code = np.broadcast_to(codes_of(squares), squares.row.shape)
        decided = code == rl.FULL if squares.size > 1 else code != rl.EMPTY
        found.append(_segments(grid, _choose(squares, decided), code[decided]))
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


def _segments(grid: Grid, squares: Squares, code: Codes) -> tuple[Ints, Ints, Codes]:
    """(start, stop, code) of the rows of squares."""
    size, s, row, col = squares
    first = (s * grid.rows + row) * grid.cols + col
    width = np.minimum(size, grid.cols - col)
    if size == 1:
        return first, first + 1, code
    height = np.minimum(size, grid.rows - row)
    of, below = expand(np.zeros_like(height), height)
    start = first[of] + below * grid.cols
    return start, start + width[of], code[of]


def _join(found: list[tuple[Ints, Ints, Codes]]) -> tuple[Ints, Ints, Codes]:
    """In ascending order, neighbours of one code in one."""
    start, stop, code = (np.concatenate(parts) for parts in zip(*found, strict=True))
    order = np.argsort(start)
    start, stop, code = start[order], stop[order], code[order]
    begins = np.ones(len(start), bool)
    begins[1:] = (start[1:] != stop[:-1]) | (code[1:] != code[:-1])
    ends = np.append(begins[1:], np.ones(min(len(start), 1), bool))
    return start[begins], stop[ends], code[begins]
