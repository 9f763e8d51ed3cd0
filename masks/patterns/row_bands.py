"""Queries that see every key: the first ones, or the last ones."""

from dataclasses import dataclass

from masks.algebra import Mask
from masks.checks import integer
from masks.patterns.lines import Lines
from masks.patterns.token_sets import TokenSet
from masks.spec import call_text, pattern


@pattern()
def global_rows(n: int) -> Mask:
    """The first `n` queries (>= 0) see every key: q < n, the rows of `global_tokens` only."""
    n = integer("n", n, least=0)
    return GlobalRows(call_text("global_rows", n), n)


@pattern()
def last_rows(n: int) -> Mask:
    """The last `n` queries (>= 0) see every key: q >= n_q - n, so that it depends on the length."""
    n = integer("n", n, least=0)
    return LastRows(call_text("last_rows", n), n)


@dataclass(frozen=True, repr=False, eq=False)
class GlobalRows(Lines):
    n: int

    def queries(self, n_q: int) -> TokenSet:
        return TokenSet.between(0, self.n)


@dataclass(frozen=True, repr=False, eq=False)
class LastRows(Lines):
    n: int
    prefix_stable = False

    def queries(self, n_q: int) -> TokenSet:
        return TokenSet.between(max(n_q - self.n, 0), n_q)
