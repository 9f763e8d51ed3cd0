"""Static masks of long-context inference: sinks and a window, with more rows or lines."""

from masks.algebra import Mask
from masks.checks import integer
from masks.leaves.lines import ascending
from masks.patterns.bands import causal, sliding
from masks.patterns.columns import keys_at, last_rows
from masks.patterns.columns import sinks as first_keys
from masks.patterns.distances import diagonals
from masks.registry import Example, pattern

__all__ = ["streaming", "tri_shape", "vertical_slash"]
SECTION = "Rows and columns"  # of the gallery


@pattern(
    Example(
        "streaming(4, 48)",
        "sinks and a window, causal",
        "N*w - w*(w - 1)/2 + g*(N - w) - g*(g - 1)/2",
        "2309.17453",
        {"w": 48, "g": 4},
    )
)
def streaming(sinks: int, window: int, *, align: str = "top_left") -> Mask:
    """The first keys and a window: k < sinks or q - k < window, and k <= q.

    StreamingLLM (Xiao et al., arXiv 2309.17453; 4 and 512 there), the Λ of LM-Infinite (Han et al.,
    arXiv 2308.16137), the A-shape of MInference (Jiang et al., arXiv 2407.02490). It is
    `(sinks(sinks) | sliding(window)) & causal()`.

    Args:
        sinks: keys at the beginning, >= 0.
        window: keys that end in the query itself, >= 1, as in `sliding`. A cache of 4 + 512 entries
            that holds the newest key is streaming(4, 512): a far query sees 516 keys.
        align: of the window and the causal part, see `causal`.

    With n >= s + w tokens, nw - w(w - 1)/2 + (n - w)s - s(s - 1)/2 pairs are allowed.
    """
    sinks = integer("sinks", sinks, min=0)
    parts = first_keys(sinks) | sliding(window, align=align)
    return parts & causal(align=align)


@pattern(Example("tri_shape(4, 48, 16)", "the same, and dense last rows", "", "TriangleMix"))
def tri_shape(sinks: int, window: int, last: int, *, align: str = "top_left") -> Mask:
    """`streaming`, and the last `last` queries see all that is causal.

    The triangle of TriangleMix (He et al., arXiv 2507.21526) and the tri-shape of MInference: what
    decoding continues from is read in full. It depends on the length. It is
    `(sinks(sinks) | sliding(window) | last_rows(last)) & causal()`.

    With m = last and n >= s + w + m tokens, there are m(n - s - w) - m(m - 1)/2 pairs more than in
    `streaming`.
    """
    sinks, last = integer("sinks", sinks, min=0), integer("last", last, min=0)
    parts = first_keys(sinks) | sliding(window, align=align) | last_rows(last)
    return parts & causal(align=align)


@pattern(
    Example(
        "vertical_slash((0, 40), (0, 1, 64))", "columns and diagonals, causal", "", "2407.02490"
    )
)
def vertical_slash(
    columns: tuple[int, ...], distances: tuple[int, ...], *, align: str = "top_left"
) -> Mask:
    """Vertical lines and diagonals: k in `columns` or q - k in `distances`, and k <= q.

    The vertical-slash pattern of MInference (Jiang et al., arXiv 2407.02490), token by token. Its
    kernels keep the lines as single columns, and widen the diagonals to blocks of 64 x 64 tokens.
    It is `(keys_at(columns) | diagonals(distances)) & causal()`. Where many lines and diagonals
    cross, most blocks with a crossing have a tile of their own.

    Args:
        columns: different key numbers >= 0; the order is free.
        distances: different numbers >= 0; 0 is the diagonal, which no query should lack.
        align: of the diagonals and the causal part, see `causal`.
    """
    columns, distances = ascending("columns", columns), ascending("distances", distances)
    parts = keys_at(columns) | diagonals(distances, align=align)
    return parts & causal(align=align)
