"""Sets of tokens, and the base of the patterns of whole rows and columns."""

from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np

from masks import runs as rl
from masks.algebra import Mask
from masks.checks import FAR, integer
from masks.leaves.geometry import code, from_profiles, row_numbers
from masks.leaves.leaf import Leaf
from masks.registry import named
from masks.runs import Bools, Grid, Ints, Runs
from masks.types import Repeats


class TokenSet(NamedTuple):
    """Tokens starts[i] <= x < stops[i]; the intervals are disjoint and ascend."""

    starts: Ints
    stops: Ints

    @classmethod
    def between(cls, start: int, stop: int) -> "TokenSet":
        """start <= x < stop; none when that is empty."""
        interval = np.array([[start], [stop]], np.int64)
        return cls(*interval[:, : stop > start])

    @classmethod
    def of(cls, tokens: tuple[int, ...]) -> "TokenSet":
        """Ascending tokens."""
        x = np.array(tokens, np.int64)
        return cls(x[np.diff(x, prepend=-2) > 1], x[np.diff(x, append=2 * FAR) > 1] + 1)

    def contains(self, x: Ints) -> Bools:
        """Whether the tokens are in the set, elementwise."""
        return np.searchsorted(self.starts, x, "right") > np.searchsorted(self.stops, x, "right")

    def count(self, first: Ints, last: Ints) -> Ints:
        """Tokens of the set among first..last, elementwise."""
        return self._below(last + 1) - self._below(first)

    def laid(self, start: Ints, stop: Ints) -> "TokenSet":
        """Return the tokens of the set in every document, counted from its first token."""
        first, after = (start[:, None] + x for x in (self.starts, self.stops))
        after = np.minimum(after, stop[:, None])
        return TokenSet(first[first < after], after[first < after])

    def _below(self, x: Ints) -> Ints:
        """Tokens of the set before x >= 0."""
        before = np.append(0, np.cumsum(self.stops - self.starts))
        begun = np.searchsorted(self.starts, x, "right")
        beyond = np.append(0, self.stops)[begun] - x  # of the last interval begun
        return before[begun] - np.maximum(beyond, 0)


NONE = TokenSet.between(0, 0)


def ascending(name: str, values: Any, *, min: int | None = 0) -> tuple[int, ...]:
    """`values`, different integers >= min (any where that is None), as an ascending tuple."""
    try:
        values = tuple(values)
    except TypeError:
        raise ValueError(f"{name} is {values!r}: give a tuple of integers") from None
    numbers = sorted(
        integer(f"a number in {name}", value, min=-FAR if min is None else min) for value in values
    )
    for number, following in pairwise(numbers):
        if number == following:
            raise ValueError(f"{name} has {number} twice: give every number once")
    return tuple(numbers)


class Lines(Leaf):
    """Everything in the rows of some queries and in the columns of some keys."""

    rows: TokenSet
    columns: TokenSet

    def queries(self, n_q: int) -> TokenSet:
        """Return the queries that see every key; a subclass may take them from the length."""
        return self.rows

    def runs(self, grid: Grid) -> Runs:
        row_codes = _codes(self.queries(grid.n_q), grid.q_first, grid.q_last)
        col_codes = _codes(self.columns, grid.k_first, grid.k_last)
        profiles = [(0, np.maximum(col_codes, np.uint8(c))) for c in (rl.EMPTY, rl.MIXED, rl.FULL)]
        return from_profiles(grid, profiles, row_codes.astype(np.int64))

    def repeats(self, grid: Grid) -> Repeats:
        row = _codes(self.queries(grid.n_q), grid.q_first, grid.q_last) != rl.EMPTY
        kind = np.where(row, np.arange(grid.rows), -1)
        last = min(int(self.columns.stops.max(initial=0)), grid.n_k)
        head = -(-max(last - grid.k_origin, 0) // grid.block_k)
        few = 4 * head <= grid.cols  # else the columns tell the moves apart
        return Repeats(kind, None, head) if few else Repeats(kind, np.zeros_like(kind))

    def laid(self, start: Ints, stop: Ints) -> Mask | None:
        return self._with(self.rows.laid(start, stop), self.columns.laid(start, stop))

    def _with(self, rows: TokenSet, columns: TokenSet) -> Mask:
        """Return other lines, which no text spells."""
        return named(Lines(rows, columns), f"{self.key} in documents", self.kind, {}, spelled=True)

    def allowed(self, grid: Grid, s: Ints, q: Ints, k: Ints) -> Bools:
        return self.queries(grid.n_q).contains(q) | self.columns.contains(k)

    def signature(self, grid: Grid, s: Ints, row: Ints, col: Ints) -> Ints:
        rows = _content(self.queries(grid.n_q), grid.q_token(row), grid.block_q)
        cols = _content(self.columns, grid.k_token(col), grid.block_k)
        return rows * (cols.max() + 1) + cols


def _codes(tokens: TokenSet, first: Ints, last: Ints) -> rl.Codes:
    return code(tokens.count(first, last), last - first + 1)


def _content(tokens: TokenSet, first: Ints, size: int) -> Ints:
    """Numbers of the blocks of `size` tokens: equal ones have the same tokens in the set."""
    first, which = np.unique(first, return_inverse=True)
    content = np.packbits(tokens.contains(first[:, None] + np.arange(size)), axis=1)
    return row_numbers(content)[which]
