"""The two factorised patterns of the Sparse Transformer (Child et al., arXiv 1904.10509)."""

from dataclasses import replace

import numpy as np

from masks import runs as rl
from masks.algebra import Mask
from masks.checks import FAR, integer
from masks.leaves.distances import Distances
from masks.leaves.geometry import code, from_profiles, row_intervals
from masks.leaves.leaf import Leaf
from masks.patterns.bands import Band
from masks.registry import Example, pattern
from masks.runs import Bools, Grid, Ints, Runs

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
    """The last `stride` keys, the query itself included, and earlier ones at multiples of it.

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
    """The query's own chunk, and the last `summary` keys of every earlier chunk of `stride`.

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


class Fixed(Leaf):
    stride: int
    summary: int
    vertices: int

    @property
    def per_head(self) -> bool:
        return self.vertices > 1

    @property
    def period(self) -> int:
        return self.vertices

    def allowed(self, grid: Grid, s: Ints, q: Ints, k: Ints) -> Bools:
        first = self._first(s % grid.heads)
        phase = k % self.stride
        summary = (phase >= first) & (phase < first + self.summary)
        return (k <= q) & (summary | (k >= q - q % self.stride))

    def moves(self) -> tuple[int, ...]:
        return (self.stride,)

    def _first(self, head: Ints) -> Ints:
        """First summary key in a chunk."""
        return self.stride - self.summary * (1 + head % self.vertices)

    def runs(self, grid: Grid) -> Runs:
        head = replace(grid, heads=1)
        chunks, causal = self._chunks(head), Band("top_left", 0, FAR).runs(head)
        same = np.zeros(grid.slices, np.int64)
        either = rl.merge(self._summaries(grid), rl.spread(chunks, grid.area, same), np.maximum)
        return rl.merge(either, rl.spread(causal, grid.area, same), np.minimum)

    def _summaries(self, grid: Grid) -> Runs:
        """Codes of the summary columns, in the past and in the future."""

        def below(k: Ints, first: int) -> Ints:
            chunk, phase = np.divmod(k, self.stride)
            return chunk * self.summary + np.clip(phase - first, 0, self.summary)

        profiles = []
        for first in self._first(np.arange(min(grid.slices, self.vertices))).tolist():
            part = below(grid.k_last + 1, first) - below(grid.k_first, first)
            profiles.append((0, code(part, grid.k_last - grid.k_first + 1)))
        vertex = np.arange(grid.slices) % grid.heads % self.vertices
        return from_profiles(grid, profiles, np.repeat(vertex, grid.rows))

    def _chunks(self, grid: Grid) -> Runs:
        """Codes of q // stride == k // stride, in the past and in the future."""
        first_chunk, last_chunk = grid.q_first // self.stride, grid.q_last // self.stride
        low, high = first_chunk * self.stride, (last_chunk + 1) * self.stride - 1
        touched = (
            np.searchsorted(grid.k_last, low, "left"),
            np.searchsorted(grid.k_first, high, "right"),
        )
        full_first = np.searchsorted(grid.k_first, low, "left")
        full_stop = np.searchsorted(grid.k_last, high, "right")
        one = first_chunk == last_chunk
        return row_intervals(grid, touched, (full_first, np.where(one, full_stop, full_first)))

    def signature(self, grid: Grid, s: Ints, row: Ints, col: Ints) -> Ints:
        # A tile follows from its offset, which no longer matters beyond the own chunk, and from the
        # place of its first key in the chunk.
        offset = grid.q_token(row) - grid.k_token(col)
        offset = np.clip(offset, -grid.block_q, grid.block_k + self.stride)
        period = min(self.stride, grid.n_k + grid.block_k)  # number of different places
        phase = grid.k_token(col) % period
        return (offset * period + phase) * self.vertices + s % grid.heads % self.vertices
