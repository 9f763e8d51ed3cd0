"""Base of the patterns of whole rows and columns: sinks, global tokens, vertical lines."""

from dataclasses import dataclass

import numpy as np

from masks import runs as rl
from masks.algebra import Leaf
from masks.patterns.profiles import code, distinct, from_profiles
from masks.patterns.token_sets import TokenSet
from masks.runs import Bools, Grid, Ints, Runs


@dataclass(frozen=True, repr=False, eq=False)
class Lines(Leaf):
    """Everything in the rows `queries` and in the columns `keys`."""

    key: str
    prefix_stable = True

    def queries(self, n_q: int) -> TokenSet:
        """Queries that see every key."""
        return TokenSet.between(0, 0)

    def keys(self, n_k: int) -> TokenSet:
        """Keys that every query sees."""
        return TokenSet.between(0, 0)

    def runs(self, grid: Grid) -> Runs:
        row_codes = _codes(self.queries(grid.n_q), grid.q_first, grid.q_last)
        col_codes = _codes(self.keys(grid.n_k), grid.k_first, grid.k_last)
        profiles = [(0, np.maximum(col_codes, np.uint8(c))) for c in (rl.EMPTY, rl.MIXED, rl.FULL)]
        return from_profiles(grid, profiles, row_codes.astype(np.int64))

    def allowed(self, grid: Grid, s: Ints, q: Ints, k: Ints) -> Bools:
        return self.queries(grid.n_q).contains(q) | self.keys(grid.n_k).contains(k)

    def signature(self, grid: Grid, s: Ints, row: Ints, col: Ints) -> Ints:
        rows = _content(self.queries(grid.n_q), grid.q_token(row), grid.block_q)
        cols = _content(self.keys(grid.n_k), grid.k_token(col), grid.block_k)
        return rows * (cols.max() + 1) + cols


def _codes(tokens: TokenSet, first: Ints, last: Ints) -> rl.Codes:
    return code(tokens.count(first, last), last - first + 1)


def _content(tokens: TokenSet, first: Ints, size: int) -> Ints:
    """Numbers of the blocks of `size` tokens: equal ones have the same tokens in the set."""
    first, which = np.unique(first, return_inverse=True)
    return distinct(tokens.contains(first[:, None] + np.arange(size)))[which]
