"""Flat block butterfly of Pixelated Butterfly (Dao et al., arXiv 2112.00029)."""

from dataclasses import dataclass

import numpy as np

from masks.algebra import Mask
from masks.checks import integer
from masks.patterns.token_blocks import TokenBlocks
from masks.runs import Bools, Grid, Ints
from masks.spec import call_text, pattern


@pattern()
def butterfly(block: int = 128, levels: int | None = None) -> Mask:
    """Token blocks I = q // block and J = k // block with I == J, or I ^ J == 2**t and t < levels.

    Read as a graph of token blocks it is a hypercube with self loops: symmetric, and log2(n) layers
    connect everything. With n = 2**L token blocks and all levels, n(L + 1) of n x n are allowed. A
    number that is no power of two is cropped. Mind `butterfly & causal`: at any depth, a block only
    sees blocks whose number is its own with bits cleared, so add `local`.

    Args:
        block: tokens of a token block, >= 1.
        levels: how many strides 1, 2, 4, ..; None takes all that the length holds.
    """
    block = integer("block", block, least=1)
    levels = None if levels is None else integer("levels", levels, least=0)
    return Butterfly(call_text("butterfly", block, levels=(levels, None)), block, levels)


@dataclass(frozen=True, repr=False, eq=False)
class Butterfly(TokenBlocks):
    levels: int | None
    prefix_stable = True

    def pairs(self, head: int, rows: Ints, n_cols: int) -> tuple[Ints, Ints]:
        held = int(max(rows[-1], n_cols - 1)).bit_length()
        levels = held if self.levels is None else min(self.levels, held)
        strides = np.append(0, 1 << np.arange(levels, dtype=np.int64))
        cols = np.sort(rows[:, None] ^ strides, axis=1)
        i, place = np.nonzero(cols < n_cols)
        return i, cols[i, place]

    def allowed(self, grid: Grid, s: Ints, q: Ints, k: Ints) -> Bools:
        difference = (q // self.block) ^ (k // self.block)
        one_bit = (difference & (difference - 1)) == 0  # or none
        if self.levels is None or self.levels > 62:
            return one_bit
        return one_bit & (difference < 1 << self.levels)
