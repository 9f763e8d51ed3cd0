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
from masks.runs import Bools, Codes, Grid, Ints, quotient
from masks.types import Placed

SMALL = 16  # tokens; comparing blocks by smaller token blocks costs as much as evaluating them


class TokenBlocks(Leaf):
    """Token block (I, J), with I = q // block and J = k // block, is allowed as `pairs` says."""

    block: int

    def pairs(self, head: int, rows: Ints, n_cols: int) -> tuple[Ints, Ints]:
        """Return the allowed token blocks of the given query token blocks.

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
            own, word = np.append(x, grid.size), np.append(word, 0).astype(np.int64)

            def by_word(x: Ints) -> list[Ints]:
                at = np.searchsorted(own, x)
                return [np.where(own[at] == x, word[at], 0)]

            signature = by_word
        else:
            entry, row = quotient(self.line, len(self.rows))
            row, col = (row + self.first) * block, self.col * block
            runs = rectangle_runs(grid, entry, row, row + block, col, col + block)
            signature = by_code(runs, lambda x: self.signature(*grid.split(x)))
        changes = lambda s, token: token % block == 0  # noqa: E731
        return Placed(runs, self.allowed, signature, (changes, changes))

    def words(self) -> tuple[Ints, NDArray[np.uint16], Codes]:
        """(x, word, codes) of the blocks that have pairs, each of which is a bit of the word."""
        grid = self.grid
        down, across = grid.block_q // self.block, grid.block_k // self.block
        first_col = grid.k_origin // self.block
        kept = (self.col >= first_col) & (self.col < first_col + grid.cols * across)
        entry, row = quotient(self.line[kept], len(self.rows))
        row, bit_row = quotient(row, down)
        col, bit_col = quotient(self.col[kept] - first_col, across)
        # Sorted together: place in the high bits, number of the bit in the low ones.
        key = ((entry * grid.rows + row) * grid.cols + col) * 16 + (bit_row * across + bit_col)
        key = np.sort(key) if down > 1 else key
        x, bit = key >> 4, np.left_shift(1, key & 15).astype(np.uint16)
        begins = np.flatnonzero(np.diff(x, prepend=-1))
        x, word = x[begins], np.bitwise_or.reduceat(bit, begins) if len(x) else bit
        full = word == (1 << down * across) - 1
        _, row, col = grid.split(x)
        inner = (0 < row) & (row < grid.rows - 1) & (0 < col) & (col < grid.cols - 1)
        cut = np.flatnonzero(~inner)
        # The ends may leave less than all of the bits.
        height = (grid.q_last[row[cut]] - grid.q_first[row[cut]]) // self.block + 1
        width = (grid.k_last[col[cut]] - grid.k_first[col[cut]]) // self.block + 1
        rows = np.array([sum(1 << i * across for i in range(j)) for j in range(down + 1)])
        full[cut] = word[cut] == ((1 << width) - 1) * rows[height]
        return x, word, np.where(full, rl.FULL, rl.MIXED).astype(np.uint8)

    @cached_property
    def keys(self) -> Ints:
        """The pairs as ascending numbers; -1 at the end is found by what is beyond them."""
        return np.append(self.line * self.cols + self.col, -1)

    def allowed(self, s: Ints, q: Ints, k: Ints) -> Bools:
        return self.lookup(s, q // self.block, k // self.block)

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
        token_row, q_phase = quotient(grid.q_token(row), block)
        token_col, k_phase = quotient(grid.k_token(col), block)
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
