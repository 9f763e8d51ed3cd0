"""The two factorised patterns of the Sparse Transformer (Child et al., arXiv 1904.10509)."""

from typing import Any

from masks.algebra import Mask
from masks.checks import integer
from masks.leaves.distances import Distances
from masks.predicate.where import Rule
from masks.registry import Example, pattern
from masks.runs import Bools, Ints

__all__ = ["fixed", "strided"]
SECTION = "Bands and distances"  # of the gallery


@pattern(
    Example(
        "strided(16)",
        "a window, and every 16th key before it; two layers see all",
        "N*l - l*(l - 1)/2 + N*(N/l - 1)/2",
        "1904.10509",
        {"l": 16},
    )
)
def strided(stride: int, *, align: str = "top_left") -> Mask:
    """Return the last `stride` keys, the query itself included, and earlier ones at multiples of
    it.

    With d = q - k: 0 <= d < stride, or d >= 0 and stride divides d. Both heads of the paper's
    section 4.2 in one mask; everything earlier is reached in two layers. The published block code
    reorders tokens instead, which puts the second part into whole blocks.

    Args:
        stride: >= 1, near the square root of the length in the paper.
        align: see `causal`.

    With n a multiple of l = stride, n * l - l(l - 1)/2 + n(n/l - 1)/2 pairs are allowed.
    """
    stride = integer("stride", stride, min=1)
    return Strided(align, stride)


@pattern(
    Example(
        "fixed(16, 2)",
        "the query's chunk, and the ends of those before; two layers see all",
        "N*(l + 1)/2 + c*N*(N/l - 1)/2",
        "1904.10509",
        {"l": 16, "c": 2},
    )
)
def fixed(stride: int, summary: int, vertices: int = 1) -> Mask:
    """Return the query's own chunk, and the last `summary` keys of every earlier chunk of `stride`.

    k <= q, and k // stride == q // stride or k % stride >= stride - summary. Both heads of the
    paper's section 4.2 in one mask; everything earlier is reached in two layers. The version in the
    Long Range Arena also allows the first key of every chunk.

    Args:
        stride: tokens of a chunk, >= 1.
        summary: keys that summarise an earlier chunk, 0..stride.
        vertices: how many groups of `summary` keys the heads take turns with (`num_verts` of the
            published code): head h has group h % vertices, counted from the end of the chunk.
            Above 1 the mask repeats after so many heads.

    With n a multiple of l = stride and c = summary, n(l + 1)/2 + c * n(n/l - 1)/2 pairs are
    allowed for every head.
    """
    stride = integer("stride", stride, min=1)
    summary = integer("summary", summary, min=0, max=stride)
    vertices = integer("vertices", vertices, min=1)
    if vertices * summary > stride:
        raise ValueError(
            f"vertices is {vertices}: give at most {stride // summary}, "
            f"for {summary} keys each have to fit into {stride}"
        )
    return Fixed(stride, summary, vertices)


class Strided(Distances):
    stride: int

    def distance(self, d: Ints) -> Bools:
        return (d >= 0) & ((d < self.stride) | (d % self.stride == 0))


class Fixed(Rule):
    stride: int
    summary: int
    vertices: int

    @property
    def per_head(self) -> bool:
        return self.vertices > 1

    @property
    def period(self) -> int:
        return self.vertices

    def rule(self, h: Any, q: Any, k: Any) -> Any:
        first = self.stride - self.summary * (1 + h % self.vertices)
        phase = k % self.stride
        summary = (phase >= first) & (phase < first + self.summary)
        return (k <= q) & (summary | (k // self.stride == q // self.stride))
