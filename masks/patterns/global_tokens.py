"""Tokens that see all, and that all see: Longformer (arXiv 2004.05150), BigBird (2007.14062)."""

from dataclasses import dataclass

from masks.algebra import Mask
from masks.checks import integer
from masks.patterns.lines import Lines
from masks.patterns.token_sets import TokenSet, ascending
from masks.spec import call_text, pattern


@pattern("global")
def global_tokens(n: int) -> Mask:
    """The first `n` tokens (>= 0) see every key, and every query sees them: q < n or k < n.

    With g of n blocks, g(2n - g) of n x n are allowed. `sinks` is the half with the keys,
    `global_rows` the one with the queries.
    """
    n = integer("n", n, least=0)
    return GlobalTokens(call_text("global_tokens", n), n)


@pattern()
def global_at(tokens: tuple[int, ...]) -> Mask:
    """A set S of tokens see every key, and every query sees them: q in S or k in S.

    Longformer's global attention at the tokens of a question, say (arXiv 2004.05150). Numbers
    beyond the length mean nothing.

    Args:
        tokens: different integers >= 0; the order is free.

    With s of n tokens, s(2n - s) of n x n pairs are allowed.
    """
    tokens = ascending("tokens", tokens)
    return GlobalAt(call_text("global_at", tokens), tokens)


@dataclass(frozen=True, repr=False, eq=False)
class GlobalTokens(Lines):
    n: int

    def queries(self, n_q: int) -> TokenSet:
        return TokenSet.between(0, self.n)

    def keys(self, n_k: int) -> TokenSet:
        return TokenSet.between(0, self.n)


@dataclass(frozen=True, repr=False, eq=False)
class GlobalAt(Lines):
    tokens: tuple[int, ...]

    def queries(self, n_q: int) -> TokenSet:
        return TokenSet.of(self.tokens)

    def keys(self, n_k: int) -> TokenSet:
        return TokenSet.of(self.tokens)
