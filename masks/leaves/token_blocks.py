"""Base of the patterns that allow or forbid whole blocks of tokens, of a size of their own.

The token block of a pattern need not be the block of the mask that is built: blocks that it cuts
come out partial, exactly.
"""

from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from masks import runs as rl
from masks.leaves.geometry import rectangle_runs, row_numbers
from masks.leaves.leaf import Leaf, by_code
from masks.runs import Bools, Codes, Grid, Ints
from masks.types import Placed

SMALL = 16  # tokens; comparing blocks by smaller token blocks costs as much as evaluating them


class TokenBlocks(Leaf):
    """Token block (I, J), with I = q // block and J = k // block, is allowed as `pairs` says."""

    block: int

    def pairs(self, head: int, rows: Ints, n_cols: int) -> tuple[Ints, Ints]:
        """Allowed token blocks of the given query token blocks.

        Args:
            head: 0 unless the pattern is per head.
            rows: (R,) ascending numbers of query token blocks.
            n_cols: key token blocks.

        Returns:
            (i, col): row rows[i] allows key token block col; ascending by (i, col), all different.
        """
        raise NotImplementedError

    def _place(self, grid: Grid) -> Placed:
        return _TokenPairs(self, grid).placed()


class _TokenPairs:
    """The allowed token blocks of a pattern in the rows of a grid."""

    def __init__(self, leaf: TokenBlocks, grid: Grid):
        self.grid, self.block = grid, leaf.block
        self.first, last = (int(x) // self.block for x in (grid.q_first[0], grid.q_last[-1]))
        self.rows = np.arange(self.first, last + 1, dtype=np.int64)
        self.cols = -(-grid.n_k // self.block)
        lines, found = [], []
        for s in range(grid.slices):
            i, col = leaf.pairs(s % grid.heads, self.rows, self.cols)
            lines.append(i + s * len(self.rows))
            found.append(col)
        self.line, self.col = np.concatenate(lines), np.concatenate(found)

    def placed(self) -> Placed:
        grid, block = self.grid, self.block
        whole = grid.block_q % block == grid.block_k % block == 0 == grid.k_origin % block
        per_block = (grid.block_q // block) * (grid.block_k // block)
        if whole and grid.q_origin % block == 0 and 1 <= per_block <= 16:
            x, word, codes = self.words()
            runs = rl.from_segments(grid, x, x + 1, codes)
            signature = by_code(runs, lambda y: word[np.searchsorted(x, y)])  # pyright: ignore[reportArgumentType]
        else:
            entry, row = np.divmod(self.line, len(self.rows))
            row, col = (row + self.first) * block, self.col * block
            runs = rectangle_runs(grid, entry, row, row + block, col, col + block)
            signature = by_code(runs, lambda x: self.signature(*grid.split(x)))
        return Placed(runs, self.allowed, signature, lambda s, q: q % block == 0)

    def words(self) -> tuple[Ints, NDArray[np.uint16], Codes]:
        """(x, word, codes) of the blocks that have pairs, each of which is a bit of the word."""
        grid = self.grid
        down, across = grid.block_q // self.block, grid.block_k // self.block
        first_col = grid.k_origin // self.block
        kept = (self.col >= first_col) & (self.col < first_col + grid.cols * across)
        entry, row = np.divmod(self.line[kept], len(self.rows))
        row, bit_row = np.divmod(row, down)
        col, bit_col = np.divmod(self.col[kept] - first_col, across)
        x = (entry * grid.rows + row) * grid.cols + col
        bit = np.uint16(1) << (bit_row * across + bit_col).astype(np.uint16)
        if down > 1:  # neighbouring lines
            order = np.argsort(x, kind="stable")
            x, bit = x[order], bit[order]
        begins = np.flatnonzero(np.diff(x, prepend=-1))
        x, word = x[begins], np.bitwise_or.reduceat(bit, begins) if len(x) else bit
        # The ends may leave less than all of the bits.
        _, row, col = grid.split(x)
        height = (grid.q_last[row] - grid.q_first[row]) // self.block + 1
        width = (grid.k_last[col] - grid.k_first[col]) // self.block + 1
        full = ((1 << width) - 1) * np.array(
            [sum(1 << i * across for i in range(j)) for j in range(down + 1)]
        )[height]
        return x, word, np.where(word == full, rl.FULL, rl.MIXED).astype(np.uint8)

    @cached_property
    def keys(self) -> Ints:
        """The pairs as ascending numbers; -1 at the end is found by what is beyond them."""
        return np.append(self.line * self.cols + self.col, -1)

    def allowed(self, s: Ints, q: Ints, k: Ints) -> Bools:
        row, col = q // self.block, k // self.block
        if col.shape[1:2] != (1,):
            return self.lookup(s, row, col)
        # The keys of a block lie in few token blocks: those are looked up, and spread.
        first = col.min(axis=2, keepdims=True)
        col = col - first
        width = int(col.max(initial=0)) + 1
        met = self.lookup(s, row, first + np.arange(width))
        line = np.arange(met.shape[0] * met.shape[1]).reshape(*met.shape[:2], 1)
        return met.ravel().take(line * width + col)

    def lookup(self, s: Ints, row: Ints, col: Ints) -> Bools:
        """Whether token block (row, col) of slice s is allowed; broadcasting."""
        wanted = (s * len(self.rows) + row - self.first) * self.cols + col
        found = self.keys[np.searchsorted(self.keys[:-1], wanted)] == wanted
        return found & (col >= 0) & (col < self.cols)

    def signature(self, s: Ints, row: Ints, col: Ints) -> Ints:
        grid, block = self.grid, self.block
        if block < SMALL:
            return (s * grid.rows + row) * grid.cols + col
        # Which token blocks a block meets, from where on, and which of those are allowed.
        token_row, q_phase = np.divmod(grid.q_token(row), block)
        token_col, k_phase = np.divmod(grid.k_token(col), block)
        met_rows = np.arange((int(q_phase.max()) + grid.block_q - 1) // block + 1)
        met_cols = np.arange((int(k_phase.max()) + grid.block_k - 1) // block + 1)
        rows = np.clip(token_row[:, None] + met_rows, self.first, self.rows[-1])[:, :, None]
        met = self.lookup(s[:, None, None], rows, token_col[:, None, None] + met_cols)
        met = met.reshape(len(met), -1)
        if met.shape[1] <= 32:
            content = met @ (1 << np.arange(met.shape[1]))
        else:
            content = row_numbers(np.packbits(met, axis=1))
        return (content * block + q_phase) * block + k_phase
