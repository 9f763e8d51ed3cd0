"""Whole rows and columns: attention sinks, global tokens, vertical lines, a prefix."""

from masks.algebra import Mask
from masks.checks import integer
from masks.leaves.lines import NONE, Lines, TokenSet, ascending
from masks.patterns.bands import causal
from masks.registry import Example, canonical, pattern

__all__ = [
    "global_at",
    "global_rows",
    "global_tokens",
    "keys_at",
    "last_rows",
    "prefix_lm",
    "sinks",
]
SECTION = "Rows and columns"  # of the gallery


@pattern(Example("sinks(8)", "the first keys, for everyone", "N*g", "2309.17453", {"g": 8}))
def sinks(n: int) -> Mask:
    """Every query sees the first `n` keys (>= 0): k < n, in the future too.

    Only the columns of `global_tokens`: the first queries see no more than the others. For a causal
    model write `sinks(n) & causal()`, as `streaming` does.

    With g of n blocks, n * g of n x n are allowed.
    """
    return Lines(NONE, _first(n))


@pattern(Example("keys_at((0, 100))", "vertical lines", "2*N", "2407.02490"))
def keys_at(tokens: tuple[int, ...]) -> Mask:
    """Every query sees the keys `tokens`, in the future too: vertical lines.

    Args:
        tokens: different integers >= 0; the order is free. Numbers beyond the length are ignored.

    With s of n tokens, n * s of n x n pairs are allowed.
    """
    tokens = ascending("tokens", tokens)
    return canonical(Lines(NONE, TokenSet.of(tokens)), tokens=tokens)


@pattern(
    Example(
        "prefix_lm(64)",
        "a prompt that sees all of itself",
        "N*(N + 1)/2 + p*(p - 1)/2",
        "1910.10683",
        {"p": 64},
    )
)
def prefix_lm(prefix: int, *, align: str = "top_left") -> Mask:
    """Full attention among the first `prefix` tokens, causal after them: k < prefix or k <= q.

    The prefix language model of T5 (Raffel et al., arXiv 1910.10683). It is
    `sinks(prefix) | causal()`; to add q < prefix to the first condition changes nothing, unless
    `align` moves the queries.

    Args:
        prefix: tokens, >= 0.
        align: of the causal part, see `causal`.

    With p of n tokens, n(n + 1)/2 + p(p - 1)/2 pairs are allowed.
    """
    prefix = integer("prefix", prefix, min=0)
    return sinks(prefix) | causal(align=align)


@pattern(
    Example(
        "global_tokens(8)",
        "tokens that see and are seen; two layers see all",
        "2*N*g - g**2",
        "2004.05150",
        {"g": 8},
    ),
    short="global",
)
def global_tokens(n: int) -> Mask:
    """The first `n` tokens (>= 0) see every key, and every query sees them: q < n or k < n.

    With g of n blocks, g(2n - g) of n x n are allowed. `sinks` is the half with the keys,
    `global_rows` the one with the queries.
    """
    first = _first(n)
    return Lines(first, first)


@pattern(
    Example("global_at((0, 100))", "the same, anywhere", "2*N*g - g**2", "2004.05150", {"g": 2})
)
def global_at(tokens: tuple[int, ...]) -> Mask:
    """A set S of tokens see every key, and every query sees them: q in S or k in S.

    Longformer's global attention at the tokens of a question, say (arXiv 2004.05150). Numbers
    beyond the length are ignored.

    Args:
        tokens: different integers >= 0; the order is free.

    With s of n tokens, s(2n - s) of n x n pairs are allowed.
    """
    tokens = ascending("tokens", tokens)
    chosen = TokenSet.of(tokens)
    return canonical(Lines(chosen, chosen), tokens=tokens)


@pattern(Example("global_rows(8)", "queries that see everything", "N*g", given={"g": 8}))
def global_rows(n: int) -> Mask:
    """The first `n` queries (>= 0) see every key: q < n, the rows of `global_tokens` only."""
    return Lines(_first(n), NONE)


@pattern(Example("last_rows(8)", "the last queries see everything", "N*g", given={"g": 8}))
def last_rows(n: int) -> Mask:
    """The last `n` queries (>= 0) see every key: q >= n_q - n, so that it depends on the length."""
    return LastRows(NONE, NONE, integer("n", n, min=0))


def _first(n: int) -> TokenSet:
    return TokenSet.between(0, integer("n", n, min=0))


class LastRows(Lines):
    n: int

    def queries(self, n_q: int) -> TokenSet:
        return TokenSet.between(max(n_q - self.n, 0), n_q)
