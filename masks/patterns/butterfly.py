"""Flat block butterfly of Pixelated Butterfly (Dao et al., arXiv 2112.00029)."""

import numpy as np

from masks.algebra import Mask
from masks.checks import integer
from masks.leaves.leaf import ByLength
from masks.leaves.token_blocks import TokenBlocks
from masks.patterns.columns import global_tokens
from masks.registry import Example, canonical, pattern
from masks.runs import Ints

__all__ = ["butterfly", "pixelfly"]
SECTION = "Graphs of token blocks"  # of the gallery


@pattern(
    "butterfly(16)",
    "a hypercube: log2(n) layers see all; not together with causal alone",
    "n*(L + 1)*B**2",
    "2112.00029",
    also=(
        Example(
            "butterfly(16, levels=2)",
            "fewer strides: blocks in groups of four that never meet",
            "n*3*B**2",
            "2112.00029",
        ),
    ),
    written=1,
)
def butterfly(
    block: int | None = None, levels: int | None = None, *, size: int | None = None
) -> Mask:
    """Token blocks I = q // block and J = k // block with I == J, or I ^ J == 2**t and t < levels.

    Read as a graph of token blocks it is a hypercube with self loops: symmetric, and log2(n) layers
    connect everything. With n = 2**L token blocks and all levels, n(L + 1) of n x n are allowed;
    with fewer, n(levels + 1), in 2**(L - levels) groups that never see each other. A number that is
    not a power of two is cropped. In `butterfly & causal`, at any depth, a block only sees blocks
    whose number is its own with bits cleared, so add `local`.

    Args:
        block: tokens of a token block, >= 1; 128 unless `size` is given.
        levels: how many strides 1, 2, 4, ..; None takes all that the length holds.
        size: the number of token blocks instead, a power of two, at every length: a block has
            ceil(n / size) tokens, n the longer of n_q and n_k. This is `butterfly_size` of the
            published code, whose `n_factors` are the levels, 1 to log2(size).
    """
    levels = None if levels is None else integer("levels", levels, min=0)
    if size is not None:
        if block is not None:
            raise ValueError(f"block is {block} and size is {size}: give one of them")
        size = integer("size", size, min=1)
        if size & (size - 1):
            raise ValueError(f"size is {size}: give a power of two")
        if levels is not None and levels >= size.bit_length():
            raise ValueError(f"levels is {levels}: {size} blocks have {size.bit_length() - 1}")
        return ByLength(lambda grid: Butterfly(-(-max(grid.n_q, grid.n_k) // size), levels))
    block = 128 if block is None else integer("block", block, min=1)
    return canonical(Butterfly(block, levels), block=block)


@pattern(
    "pixelfly(16)", "the butterfly and a global block", "(n*(L + 3) - 2*L - 2)*B**2", "2112.00029"
)
def pixelfly(block: int = 128, levels: int | None = None, global_blocks: int = 1) -> Mask:
    """`butterfly(block, levels)`, and rows and columns of global token blocks at the beginning.

    The global part takes the place of the low-rank part in attention, where the paper spends a
    quarter to a third of its budget. With n = 2**L token blocks, all levels and one global block,
    n(L + 3) - 2L - 2 of n x n are allowed. The text is that of the union.

    Args:
        block, levels: as in `butterfly`.
        global_blocks: how many token blocks see all and are seen by all, >= 0.
    """
    block = integer("block", block, min=1)
    global_blocks = integer("global_blocks", global_blocks, min=0)
    return butterfly(block, levels) | global_tokens(global_blocks * block)


class Butterfly(TokenBlocks):
    levels: int | None

    def pairs(self, head: int, rows: Ints, n_cols: int) -> tuple[Ints, Ints]:
        held = int(max(rows[-1], n_cols - 1)).bit_length()
        levels = held if self.levels is None else min(self.levels, held)
        strides = np.append(0, 1 << np.arange(levels, dtype=np.int64))
        cols = np.sort(rows[:, None] ^ strides, axis=1)
        i, place = np.nonzero(cols < n_cols)
        return i, cols[i, place]
