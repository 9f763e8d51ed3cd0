"""Whole rows and columns: sinks, global tokens, lines, a prefix; and with windows, streaming."""

import numpy as np

from masks.algebra import Mask
from masks.checks import ascending, integer
from masks.leaves.leaf import ByLength
from masks.patterns.bands import causal, diagonals, sliding
from masks.predicate.where import Rule
from masks.registry import canonical, pattern

__all__ = [
    "global_at",
    "global_rows",
    "global_tokens",
    "keys_at",
    "last_rows",
    "prefix_lm",
    "sinks",
    "streaming",
    "tri_shape",
    "vertical_slash",
]
SECTION = "Rows and columns"  # of the gallery


@pattern("sinks(8)", "the first keys, for everyone", "N*g", "2309.17453", {"g": 8})
def sinks(n: int) -> Mask:
    """Every query sees the first `n` keys (>= 0): k < n, in the future too.

    Only the columns of `global_tokens`: the first queries see no more than the others. For a causal
    model write `sinks(n) & causal()`, as `streaming` does.
    """
    n = integer("n", n, min=0)
    return Rule(lambda q, k: k < n)


@pattern("keys_at((0, 100))", "vertical lines", "2*N", "2407.02490")
def keys_at(tokens: tuple[int, ...]) -> Mask:
    """Every query sees the keys `tokens`, in the future too: vertical lines.

    Args:
        tokens: different integers >= 0; the order is free. Numbers beyond the length are ignored.
    """
    tokens = ascending("tokens", tokens)
    return canonical(Rule(lambda q, k: np.isin(k, tokens)), tokens=tokens)


@pattern(
    "prefix_lm(64)",
    "a prompt that sees all of itself",
    "N*(N + 1)/2 + p*(p - 1)/2",
    "1910.10683",
    {"p": 64},
)
def prefix_lm(prefix: int, *, align: str = "top_left") -> Mask:
    """Full attention among the first `prefix` tokens, causal after them: k < prefix or k <= q.

    The prefix language model of T5 (Raffel et al., arXiv 1910.10683). It is
    `sinks(prefix) | causal()`; to add q < prefix to the first condition changes nothing, unless
    `align` moves the queries.

    Args:
        prefix: tokens, >= 0.
        align: of the causal part, see `causal`.
    """
    prefix = integer("prefix", prefix, min=0)
    return sinks(prefix) | causal(align=align)


@pattern(
    "global_tokens(8)",
    "tokens that see and are seen; two layers see all",
    "2*N*g - g**2",
    "2004.05150",
    {"g": 8},
    short="global",
)
def global_tokens(n: int) -> Mask:
    """Let the first `n` tokens (>= 0) see and be seen by all: q < n or k < n.

    `sinks` is the half with the keys, `global_rows` the one with the queries.
    """
    n = integer("n", n, min=0)
    return Rule(lambda q, k: (q < n) | (k < n))


@pattern("global_at((0, 100))", "the same, anywhere", "2*N*g - g**2", "2004.05150", {"g": 2})
def global_at(tokens: tuple[int, ...]) -> Mask:
    """Let a set S of tokens see and be seen by all: q in S or k in S.

    Longformer's global attention at the tokens of a question, say (arXiv 2004.05150). Numbers
    beyond the length are ignored.

    Args:
        tokens: different integers >= 0; the order is free.
    """
    tokens = ascending("tokens", tokens)
    return canonical(Rule(lambda q, k: np.isin(q, tokens) | np.isin(k, tokens)), tokens=tokens)


@pattern("global_rows(8)", "queries that see everything", "N*g", given={"g": 8})
def global_rows(n: int) -> Mask:
    """Let the first `n` queries (>= 0) see every key: q < n, the rows of `global_tokens`."""
    n = integer("n", n, min=0)
    return Rule(lambda q, k: q < n)


@pattern("last_rows(8)", "the last queries see everything", "N*g", given={"g": 8})
def last_rows(n: int) -> Mask:
    """Let the last `n` queries (>= 0) see every key: q >= n_q - n, by the length."""
    n = integer("n", n, min=0)
    return ByLength(lambda grid: Rule(lambda q, k: q >= grid.n_q - n))


_first_keys = sinks  # an argument has that name below


@pattern(
    "streaming(4, 48)",
    "sinks and a window, causal",
    "N*w - w*(w - 1)/2 + g*(N - w) - g*(g - 1)/2",
    "2309.17453",
    {"w": 48, "g": 4},
)
def streaming(sinks: int, window: int, *, align: str = "top_left") -> Mask:
    """Return the first keys and a window: k < sinks or q - k < window, and k <= q.

    StreamingLLM (Xiao et al., arXiv 2309.17453; 4 and 512 there), the Λ of LM-Infinite (Han et al.,
    arXiv 2308.16137), the A-shape of MInference (Jiang et al., arXiv 2407.02490). It is
    `(sinks(sinks) | sliding(window)) & causal()`.

    Args:
        sinks: keys at the beginning, >= 0.
        window: keys that end in the query itself, >= 1, as in `sliding`. A cache of 4 + 512 entries
            that holds the newest key is streaming(4, 512): a far query sees 516 keys.
        align: of the window and the causal part, see `causal`.
    """
    sinks = integer("sinks", sinks, min=0)
    parts = _first_keys(sinks) | sliding(window, align=align)
    return parts & causal(align=align)


@pattern("tri_shape(4, 48, 16)", "the same, and dense last rows", "", "TriangleMix")
def tri_shape(sinks: int, window: int, last: int, *, align: str = "top_left") -> Mask:
    """`streaming`, and the last `last` queries see all that is causal.

    The triangle of TriangleMix (He et al., arXiv 2507.21526) and the tri-shape of MInference: what
    decoding continues from is read in full. It depends on the length. It is
    `(sinks(sinks) | sliding(window) | last_rows(last)) & causal()`.
    """
    sinks, last = integer("sinks", sinks, min=0), integer("last", last, min=0)
    parts = _first_keys(sinks) | sliding(window, align=align) | last_rows(last)
    return parts & causal(align=align)


@pattern("vertical_slash((0, 40), (0, 1, 64))", "columns and diagonals, causal", "", "2407.02490")
def vertical_slash(
    columns: tuple[int, ...], distances: tuple[int, ...], *, align: str = "top_left"
) -> Mask:
    """Vertical lines and diagonals: k in `columns` or q - k in `distances`, and k <= q.

    The vertical-slash pattern of MInference (Jiang et al., arXiv 2407.02490), token by token. Its
    kernels keep the lines as single columns, and widen the diagonals to blocks of 64 x 64 tokens.
    It is `(keys_at(columns) | diagonals(distances)) & causal()`.

    Args:
        columns: different key numbers >= 0; the order is free.
        distances: different numbers >= 0; 0 is the diagonal, which no query should lack.
        align: of the diagonals and the causal part, see `causal`.
    """
    columns, distances = ascending("columns", columns), ascending("distances", distances)
    parts = keys_at(columns) | diagonals(distances, align=align)
    return parts & causal(align=align)
