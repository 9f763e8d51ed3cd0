"""Base of the patterns that allow or forbid whole blocks of tokens, of a size of their own.

The token block of a pattern need not be the block of the mask that is built: blocks that it cuts
come out partial, exactly.
"""

from functools import cached_property
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from masks import runs as rl
from masks.leaves.geometry import rectangle_runs, row_numbers
from masks.leaves.leaf import Leaf, by_code
from masks.runs import Bools, Codes, Grid, Ints, distinct, quotient
from masks.types import Placed

WORD = 64  # token blocks of a block that fit a word
PAIRS_AT_ONCE = 1 << 16  # arrays that stay in cache, where larger ones pay for new pages
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
        count, pairs = len(self.rows), []
        for s in range(grid.slices):
            i, col = leaf.pairs(s % grid.heads, self.rows, self.cols)
            pairs.append((i + s * count if s else i, col))
        self.line, self.col = (
            pairs[0] if len(pairs) == 1 else map(np.concatenate, zip(*pairs, strict=True))
        )

    def placed(self) -> Placed:
        grid, block = self.grid, self.block
        whole = grid.block_q % block == grid.block_k % block == 0 == grid.k_origin % block
        per_block = (grid.block_q // block) * (grid.block_k // block)
        if whole and grid.q_origin % block == 0 and 1 <= per_block <= WORD:
            x, word, codes = self.words()
            runs = rl.from_segments(grid, x, x + 1, codes)
            own, word = np.append(x, grid.size), np.append(word.view(np.int64), 0)

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

    def words(self) -> tuple[Ints, NDArray[np.uint64], Codes]:
        """(x, word, codes) of the blocks that have pairs, each of which is a bit of the word."""
        grid = self.grid
        down, across = grid.block_q // self.block, grid.block_k // self.block
        # Sorted together: place in the high bits, number of the bit in the low ones.
        row, bit_row = quotient(self.rows - grid.q_origin // self.block, down)
        line = np.arange(grid.slices)[:, None] * grid.rows + row
        place = (line * (grid.cols * WORD) + bit_row * across).ravel()
        col, bit_col = quotient(np.arange(self.cols) - grid.k_origin // self.block, across)
        seen, col = (0 <= col) & (col < grid.cols), col * WORD + bit_col
        bit = np.uint64(1) << np.arange(WORD, dtype=np.uint64)
        # The ends may leave less than all of the bits.
        heights = (grid.q_last - grid.q_first) // self.block + 1
        widths = (grid.k_last - grid.k_first) // self.block + 1
        rows = np.array([bit[: i * across : across].sum() for i in range(down + 1)])
        found = [(np.zeros(0, np.int64), bit[:0], np.zeros(0, np.uint8))]
        for begin, end in pairwise(self._bounds(line.ravel())):
            i, j = self.line[begin:end], self.col[begin:end]
            key = place[i] + col[j]
            key = key if seen.all() else key[seen[j]]
            if down > 1:
                key.sort()
            x = key // WORD
            begins = np.flatnonzero(np.diff(x, prepend=-1))
            x, word = x[begins], bit[key % WORD]
            word = np.bitwise_or.reduceat(word, begins) if len(x) else word
            _, row, j = grid.split(x)
            full = word == (bit[widths[j]] - np.uint64(1)) * rows[heights[row]]
            found.append((x, word, np.where(full, rl.FULL, rl.MIXED).astype(np.uint8)))
        x, word, codes = map(np.concatenate, zip(*found, strict=True))
        return x, word, codes

    def _bounds(self, block_line: Ints) -> list[int]:
        """Cut the pairs into portions of whole lines of blocks, from the line of each row."""
        here = block_line[self.line[::PAIRS_AT_ONCE]]
        first = np.searchsorted(self.line, np.searchsorted(block_line, here))
        return [*distinct(first).tolist(), len(self.line)]

    @cached_property
    def keys(self) -> Ints:
        """The pairs as ascending numbers, or -1 where there are none."""
        keys = self.line * self.cols
        keys += self.col
        return keys if len(keys) else np.full(1, -1)

    def allowed(self, s: Ints, q: Ints, k: Ints) -> Bools:
        return self.lookup(s, q // self.block, k // self.block)

    def lookup(self, s: Ints, row: Ints, col: Ints) -> Bools:
        """Whether token block (row, col) of slice s is allowed; broadcasting."""
        wanted = (s * len(self.rows) + row - self.first) * self.cols + col
        at = np.minimum(np.searchsorted(self.keys, wanted), len(self.keys) - 1)
        return (self.keys[at] == wanted) & (col >= 0) & (col < self.cols)

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
