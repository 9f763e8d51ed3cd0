"""Distances that are powers of two, between tokens or between blocks of tokens."""

from dataclasses import dataclass

import numpy as np

from masks.algebra import Mask
from masks.checks import choice, integer
from masks.patterns.band import ALIGNMENTS
from masks.patterns.distances import Distances
from masks.patterns.token_blocks import TokenBlocks
from masks.runs import Bools, Grid, Ints
from masks.spec import call_text, pattern


@pattern()
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
    block = integer("block", block, least=1)
    align = choice("align", align, ALIGNMENTS)
    if block > 1 and align != "top_left":
        raise ValueError(f"align is {align!r} and block {block}: leave one of them out")
    key = call_text("power_of_two", block=(block, 1), align=(align, "top_left"))
    return PowerOfTwo(key, align) if block == 1 else PowerOfTwoBlocks(key, block)


@dataclass(frozen=True, repr=False, eq=False)
class PowerOfTwo(Distances):
    def distance(self, d: Ints) -> Bools:
        return zero_or_power_of_two(np.abs(d))


@dataclass(frozen=True, repr=False, eq=False)
class PowerOfTwoBlocks(TokenBlocks):
    prefix_stable = True

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
