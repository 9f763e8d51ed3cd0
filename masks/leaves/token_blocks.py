"""Base of the patterns that allow or forbid whole blocks of tokens, of a size of their own.

The token block of a pattern need not be the block of the mask that is built: blocks that it cuts
come out partial, exactly.
"""

from dataclasses import replace
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from masks import runs as rl
from masks.checks import FAR
from masks.leaves.geometry import by_pairs, rectangle_runs, row_numbers
from masks.leaves.leaf import Leaf
from masks.runs import Bools, Codes, Grid, Ints, Runs, quotient
from masks.segments import row_segments
from masks.types import Placed

WORD = 64  # token blocks of a block that fit a word
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


class Cells:
    """Blocks of one grid, full or empty, as a mask on another; codes has no MIXED."""

    def __init__(self, grid: Grid, cells: Grid, codes: Runs):
        self.grid, self.cells, self.codes = grid, cells, codes

    def placed(self) -> Placed:
        runs = self.codes if self.cells == self.grid else self._runs()
        return Placed(runs, self.allowed, self.signature)

    def _runs(self) -> Runs:
        cells = self.cells
        line, col, length, _ = row_segments(cells, *self.codes, empty=rl.EMPTY)
        s, row = quotient(line, cells.rows)
        q, k = cells.q_token(row), cells.k_token(col)
        return rectangle_runs(self.grid, s, q, q + cells.block_q, k, cells.k_token(col + length))

    def _cell(self, q: Ints, k: Ints) -> tuple[Ints, Ints]:
        """Row and column of the cell of tokens; that of the nearest for tokens beyond."""
        cells = self.cells
        row, col = (q - cells.q_origin) // cells.block_q, (k - cells.k_origin) // cells.block_k
        return np.clip(row, 0, cells.rows - 1), np.clip(col, 0, cells.cols - 1)

    def allowed(self, s: Ints, q: Ints, k: Ints) -> Bools:
        row, col = self._cell(q, k)
        row = s * self.cells.rows + row
        return by_pairs(self._full, row, col)

    def _full(self, line: Ints, col: Ints) -> Bools:
        return self.codes.at(line * self.cells.cols + col) == rl.FULL

    def signature(self, x: Ints) -> list[Ints]:
        grid, cells = self.grid, self.cells
        if min(cells.block_q, cells.block_k) < SMALL:
            return [x]
        # Which cells a block meets, from where on, and which of those are full.
        s, row, col = grid.split(x)
        q, k = grid.q_token(row), grid.k_token(col)
        q_step = np.arange(2 + (grid.block_q - 2) // cells.block_q) * cells.block_q
        k_step = np.arange(2 + (grid.block_k - 2) // cells.block_k) * cells.block_k
        met_row, met_col = self._cell(q[:, None, None] + q_step[:, None], k[:, None, None] + k_step)
        line = s[:, None, None] * cells.rows + met_row
        full = self._full(line, met_col)
        bits = np.packbits(full.reshape(len(x), -1), axis=1)
        return [row_numbers(bits), q % cells.block_q, k % cells.block_k]


class _TokenPairs(Cells):
    """The allowed token blocks of a pattern in the rows of a grid."""

    def __init__(self, leaf: TokenBlocks, grid: Grid):
        self.grid, self.block = grid, leaf.block
        first, last = (int(x) // self.block for x in (grid.q_first[0], grid.q_last[-1]))
        self.rows, self.cols = np.arange(first, last + 1), -(-grid.n_k // self.block)
        count, pairs = len(self.rows), []
        for s in range(grid.slices):
            i, col = leaf.pairs(s % grid.heads, self.rows, self.cols)
            pairs.append((i + s * count if s else i, col))
        self.line, self.col = (
            pairs[0] if len(pairs) == 1 else map(np.concatenate, zip(*pairs, strict=True))
        )
        sizes = {"block_q": self.block, "block_k": self.block, "k_origin": 0}
        ends = {"q_origin": first * self.block, "q_blocks": count, "k_blocks": self.cols}
        self.cells = replace(grid, **sizes, **ends)

    @cached_property
    def keys(self) -> Ints:
        """The pairs as ascending numbers, and one above all."""
        return np.append(self.line * self.cols + self.col, FAR)

    @cached_property
    def codes(self) -> Runs:  # type: ignore[override]
        x = self.keys[:-1]
        return rl.from_segments(self.cells, x, x + 1, np.full(len(x), rl.FULL))

    def _full(self, line: Ints, col: Ints) -> Bools:
        wanted = line * self.cols + col
        return self.keys[np.searchsorted(self.keys, wanted)] == wanted

    def placed(self) -> Placed:
        grid, block = self.grid, self.block
        changes = lambda s, token: token % block == 0  # noqa: E731
        whole = grid.block_q % block == grid.block_k % block == 0 == grid.k_origin % block
        per_block = (grid.block_q // block) * (grid.block_k // block)
        if not whole or grid.q_origin % block or not 1 <= per_block <= WORD:
            return super().placed()._replace(changes=(changes, changes))
        x, word, codes = self.words()
        own, word = np.append(x, grid.size), np.append(word.view(np.int64), 0)

        def by_word(x: Ints) -> list[Ints]:
            at = np.searchsorted(own, x)
            return [np.where(own[at] == x, word[at], 0)]

        runs = rl.from_segments(grid, own[:-1], own[:-1] + 1, codes)
        return Placed(runs, self.allowed, by_word, (changes, changes))

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
        ones = np.append(bit, np.uint64(0)) - np.uint64(1)  # up to all bits of a word
        rows = np.array([bit[: i * across : across].sum() for i in range(down + 1)])
        key = place[self.line] + col[self.col]
        key = key if seen.all() else key[seen[self.col]]
        if down > 1:
            key.sort()
        x = key // WORD
        begins = np.flatnonzero(np.diff(x, prepend=-1))
        x, word = x[begins], bit[key % WORD]
        word = np.bitwise_or.reduceat(word, begins) if len(x) else word
        _, row, j = grid.split(x)
        full = word == ones[widths[j]] * rows[heights[row]]
        return x, word, np.where(full, rl.FULL, rl.MIXED).astype(np.uint8)
