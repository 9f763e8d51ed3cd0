"""Patterns of the distance q - k alone: dilated windows, diagonals, powers of two."""

import numpy as np

from masks.algebra import Mask
from masks.checks import choice, integer
from masks.leaves.distances import ALIGNMENTS, Distances
from masks.leaves.lines import ascending
from masks.leaves.token_blocks import TokenBlocks
from masks.registry import Example, canonical, pattern
from masks.runs import Bools, Grid, Ints

__all__ = ["diagonals", "dilated", "power_of_two"]
SECTION = "Bands and distances"  # of the gallery


@pattern(
    Example(
        "dilated(48, 4)",
        "a window with gaps; join its residue classes with another mask",
        "N*(2*m + 1) - s*m*(m + 1)",
        "2004.05150",
        {"m": 12, "s": 4},
    )
)
def dilated(extent: int, step: int, *, align: str = "top_left") -> Mask:
    """Every `step`-th key up to `extent` tokens away: |q - k| <= extent and step divides q - k.

    The extent is a distance, both ends included, as in attention-gym. Longformer (arXiv 2004.05150)
    counts keys: w // 2 to either side at dilation r are `dilated(w // 2 * r, r)`. By itself the
    mask never leaves the residue class of q modulo `step`, at any depth: join another one to it.

    Args:
        extent: tokens, >= 0; an inner query sees 2 * (extent // step) + 1 keys.
        step: >= 1; 1 makes it `local(extent)`.
        align: see `causal`.

    With w = extent // step and n > extent tokens, n(2w + 1) - step * w(w + 1) pairs are allowed.
    """
    extent, step = integer("extent", extent, min=0), integer("step", step, min=1)
    return Dilated(align, extent, step)


@pattern(Example("diagonals((0, 16, 64))", "given distances", "3*N - 16 - 64"))
def diagonals(distances: tuple[int, ...], *, align: str = "top_left") -> Mask:
    """Key k is allowed for query q when q - k is one of `distances`; below 0 lies the future.

    Args:
        distances: a tuple of different integers; the order is free.
        align: see `causal`.

    Distance d holds n - |d| pairs of n x n tokens.
    """
    distances = ascending("distances", distances, min=None)
    return canonical(Diagonals(align, distances), distances=distances)


class Dilated(Distances):
    extent: int
    step: int

    def distance(self, d: Ints) -> Bools:
        return (np.abs(d) <= self.extent) & (d % self.step == 0)


class Diagonals(Distances):
    distances: tuple[int, ...]

    def distance(self, d: Ints) -> Bools:
        return np.isin(d, np.array(self.distances, np.int64))


@pattern(
    Example(
        "power_of_two()",
        "distances 0, 1, 2, 4, ..: few layers reach far",
        "N*(2*L + 1) - 2*(N - 1)",
        "2503.03588",
        {"L": 8},
    )
)
def power_of_two(block: int = 1, *, align: str = "top_left") -> Mask:
    """The distance |q // block - k // block| is 0 or a power of two.

    `power_of_two() & causal()` is LogSparse (Li et al., arXiv 1907.00235); these are the distances
    of PowerAttention, too (Chen et al., arXiv 2503.03588). Unlike `butterfly & causal`, it reaches
    every earlier token: distance d in as many layers as d has one bits.

    Args:
        block: tokens of a token block, >= 1. A multiple of the block of the build makes all blocks
            full, where distances of tokens leave two or three thin diagonals in each.
        align: see `causal`; token blocks count from the start, so it needs block=1.

    With n = 2**L token blocks, n + 2(n(L - 1) + 1) of n x n are allowed, and nL + 1 of them causal.
    """
    block = integer("block", block, min=1)
    align = choice("align", align, ALIGNMENTS)
    if block > 1 and align != "top_left":
        raise ValueError(f"align is {align!r} and block {block}: leave one of them out")
    return PowerOfTwo(align) if block == 1 else PowerOfTwoBlocks(block)


class PowerOfTwo(Distances):
    def distance(self, d: Ints) -> Bools:
        return zero_or_power_of_two(np.abs(d))


class PowerOfTwoBlocks(TokenBlocks):
    def pairs(self, head: int, rows: Ints, n_cols: int) -> tuple[Ints, Ints]:
        held = int(max(rows[-1], n_cols - 1)).bit_length()
        powers = 1 << np.arange(held, dtype=np.int64)
        cols = rows[:, None] + np.concatenate([-powers[::-1], [0], powers])
        i, place = np.nonzero((cols >= 0) & (cols < n_cols))
        return i, cols[i, place]

    def allowed(self, grid: Grid, s: Ints, q: Ints, k: Ints) -> Bools:
        return zero_or_power_of_two(np.abs(q // self.block - k // self.block))


def zero_or_power_of_two(x: Ints) -> Bools:
    return (x & (x - 1)) == 0
