"""Bands along the diagonal, and other patterns of the distance q - k; the Sparse Transformer."""

from typing import Any

import numpy as np

from masks.algebra import Mask
from masks.checks import FAR, ascending, integer
from masks.leaves.leaf import Leaf, aligned
from masks.predicate.where import ByDistance, Rule, by_distance
from masks.registry import canonical, pattern

__all__ = [
    "causal",
    "dense",
    "diagonals",
    "dilated",
    "fixed",
    "local",
    "log_sparse",
    "power_of_two",
    "sliding",
    "strided",
]
SECTION = "Bands and distances"  # of the gallery

POWERS = (0, *(1 << i for i in range(40)))


@pattern("dense()", "everything", "N**2")
def dense() -> Mask:
    """Every key is allowed for every query; `~dense()` is nothing."""
    return band(-FAR, FAR, "top_left")


@pattern("causal()", "no query sees ahead", "N*(N + 1)/2", "1706.03762")
def causal(*, align: str = "top_left") -> Mask:
    """Key k is allowed for query q when k <= q.

    Args:
        align: where the diagonal lies when n_q != n_k. "top_left": positions count from the start
            on both sides. "bottom_right": the last query faces the last key, as in FlashAttention
            since 2.1.
    """
    return band(0, FAR, align)


@pattern(
    "local(24)",
    "a window to both sides",
    "N*(2*w + 1) - w*(w + 1)",
    "2004.05150",
    {"w": 24},
    written=2,
)
def local(left: int, right: int | None = None, *, align: str = "top_left") -> Mask:
    """Key k is allowed for query q when q - left <= k <= q + right, both ends included.

    Args:
        left, right: tokens to either side, >= 0; `right` defaults to `left`. The convention is that
            of FlashAttention's `window_size`; an inner query sees left + right + 1 keys.
        align: see `causal`.
    """
    left = integer("left", left, min=0)
    right = left if right is None else integer("right", right, min=0)
    return canonical(band(-right, left, align), right=None if right == left else right)


@pattern("sliding(48)", "the last keys, causal", "N*w - w*(w - 1)/2", "2310.06825", {"w": 48})
def sliding(window: int, *, align: str = "top_left") -> Mask:
    """Return the `window` keys that end in the query itself: 0 <= q - k < window, as in Mistral.

    Args:
        window: keys that an inner query sees, >= 1.
        align: see `causal`.
    """
    window = integer("window", window, min=1)
    return band(0, window - 1, align)


@pattern(
    "dilated(48, 4)",
    "a window with gaps; join its residue classes with another mask",
    "N*(2*m + 1) - s*m*(m + 1)",
    "2004.05150",
    {"m": 12, "s": 4},
)
def dilated(extent: int, step: int, *, align: str = "top_left") -> Mask:
    """Every `step`-th key up to `extent` tokens away: |q - k| <= extent and step divides q - k.

    Longformer (arXiv 2004.05150) counts keys: w // 2 to either side at dilation r are
    `dilated(w // 2 * r, r)`. By itself the mask never leaves the residue class of q modulo `step`,
    at any depth: join another one to it.

    Args:
        extent: tokens, >= 0.
        step: >= 1; 1 makes it `local(extent)`.
        align: see `causal`.
    """
    extent, step = integer("extent", extent, min=0), integer("step", step, min=1)
    return by_distance(lambda d: (abs(d) <= extent) & (d % step == 0), align)


@pattern("diagonals((0, 16, 64))", "given distances", "3*N - 16 - 64")
def diagonals(distances: tuple[int, ...], *, align: str = "top_left") -> Mask:
    """Key k is allowed for query q when q - k is one of `distances`; below 0 lies the future.

    Args:
        distances: a tuple of different integers; the order is free.
        align: see `causal`.
    """
    distances = ascending("distances", distances, min=None)
    return canonical(by_distance(lambda d: np.isin(d, distances), align), distances=distances)


@pattern(
    "power_of_two()",
    "distances 0, 1, 2, 4, ..: few layers reach far",
    "N*(2*L + 1) - 2*(N - 1)",
    "2503.03588",
    {"L": 8},
)
def power_of_two(block: int = 1, *, align: str = "top_left") -> Mask:
    """Return the distance |q // block - k // block| is 0 or a power of two.

    `power_of_two() & causal()` is LogSparse (Li et al., arXiv 1907.00235); these are the distances
    of PowerAttention, too (Chen et al., arXiv 2503.03588). Unlike `butterfly & causal`, it reaches
    every earlier token: distance d in as many layers as d has one bits.

    Args:
        block: tokens of a token block, >= 1. A multiple of the block of the build makes all blocks
            full, where distances of tokens leave two or three thin diagonals in each.
        align: see `causal`; token blocks count from the start, so it needs block=1.
    """
    block = integer("block", block, min=1)
    if block > 1 and align != "top_left":
        raise ValueError(f"align is {align!r} and block {block}: leave one of them out")
    if block == 1:
        return by_distance(lambda d: np.isin(abs(d), POWERS), align)
    return Rule(lambda q, k: np.isin(abs(q // block - k // block), POWERS))


@pattern("log_sparse()", "the same, causal", "N*(L + 1) - (N - 1)", "1907.00235", {"L": 8})
def log_sparse() -> Mask:
    """Return `power_of_two() & causal()`: keys at the distances 0, 1, 2, 4, .. before the query."""
    return power_of_two() & causal()


@pattern(
    "strided(16)",
    "a window, and every 16th key before it; two layers see all",
    "N*l - l*(l - 1)/2 + N*(N/l - 1)/2",
    "1904.10509",
    {"l": 16},
)
def strided(stride: int, *, align: str = "top_left") -> Mask:
    """Return the last `stride` keys with the query itself, and earlier ones at multiples of it.

    With d = q - k: 0 <= d < stride, or d >= 0 and stride divides d. These are both heads of the
    paper's section 4.2 in one mask; everything earlier is reached in two layers.

    Args:
        stride: >= 1, near the square root of the length in the paper.
        align: see `causal`.
    """
    stride = integer("stride", stride, min=1)
    return by_distance(lambda d: (d >= 0) & ((d < stride) | (d % stride == 0)), align)


@pattern(
    "fixed(16, 2)",
    "the query's chunk, and the ends of those before; two layers see all",
    "N*(l + 1)/2 + c*N*(N/l - 1)/2",
    "1904.10509",
    {"l": 16, "c": 2},
)
def fixed(stride: int, summary: int, vertices: int = 1) -> Mask:
    """Return the query's own chunk, and the last `summary` keys of every earlier chunk of `stride`.

    k <= q, and k // stride == q // stride or k % stride >= stride - summary. These are both heads
    of the paper's section 4.2 in one mask; everything earlier is reached in two layers.

    Args:
        stride: tokens of a chunk, >= 1.
        summary: keys that summarise an earlier chunk, 0..stride.
        vertices: how many groups of `summary` keys the heads take turns with (`num_verts` of the
            published code): head h has group h % vertices, counted from the end of the chunk.
            Above 1 the mask repeats after so many heads.
    """
    stride = integer("stride", stride, min=1)
    summary = integer("summary", summary, min=0, max=stride)
    vertices = integer("vertices", vertices, min=1)
    if vertices * summary > stride:
        raise ValueError(
            f"vertices is {vertices}: give at most {stride // summary}, "
            f"for {summary} keys each have to fit into {stride}"
        )

    def rule(h: Any, q: Any, k: Any) -> Any:
        phase, first = k % stride, stride - summary * (1 + h % vertices)
        chosen = (phase >= first) & (phase < first + summary)
        return (k <= q) & (chosen | (k // stride == q // stride))

    if vertices == 1:
        return Rule(lambda q, k: rule(0, q, k))
    return Rule(rule, "hqk", vertices)


def band(low: int, high: int, align: str) -> Leaf:
    """Return the mask of the distances low..high, which `align` counts."""

    def make(shift: int) -> Band:
        least, most = low - shift, high - shift
        return Band(lambda q, k: (q - k >= least) & (q - k <= most), low=least, high=most)

    return aligned(align, make)


class Band(ByDistance):
    """low <= q - k <= high."""

    low: int = 0
    high: int = 0
