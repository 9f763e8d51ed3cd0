"""Keys that every query sees: attention sinks, vertical lines, a prefix."""

from dataclasses import dataclass

from masks.algebra import Mask
from masks.checks import integer
from masks.patterns.band import causal
from masks.patterns.lines import Lines
from masks.patterns.token_sets import TokenSet, ascending
from masks.spec import call_text, pattern


@pattern()
def sinks(n: int) -> Mask:
    """Every query sees the first `n` keys (>= 0): k < n, in the future too.

    Only the columns of `global_tokens`: the first queries see no more than the others. For a causal
    model write `sinks(n) & causal()`, as `streaming` does.

    With g of n blocks, n * g of n x n are allowed.
    """
    n = integer("n", n, least=0)
    return Sinks(call_text("sinks", n), n)


@pattern()
def keys_at(tokens: tuple[int, ...]) -> Mask:
    """Every query sees the keys `tokens`, in the future too: vertical lines.

    Args:
        tokens: different integers >= 0; the order is free. Numbers beyond the length mean nothing.

    With s of n tokens, n * s of n x n pairs are allowed.
    """
    tokens = ascending("tokens", tokens)
    return KeysAt(call_text("keys_at", tokens), tokens)


@pattern()
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
    prefix = integer("prefix", prefix, least=0)
    return sinks(prefix) | causal(align=align)


@dataclass(frozen=True, repr=False, eq=False)
class Sinks(Lines):
    n: int

    def keys(self, n_k: int) -> TokenSet:
        return TokenSet.between(0, self.n)


@dataclass(frozen=True, repr=False, eq=False)
class KeysAt(Lines):
    tokens: tuple[int, ...]

    def keys(self, n_k: int) -> TokenSet:
        return TokenSet.of(self.tokens)
