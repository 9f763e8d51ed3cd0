"""Base of the patterns that allow or forbid whole blocks of tokens, of a size of their own.

The token block of a pattern need not be the block of the mask that is built: blocks that it cuts
come out partial, exactly.
"""

import numpy as np

from masks import runs as rl
from masks.leaves.geometry import rectangle_runs, row_numbers
from masks.leaves.leaf import Leaf
from masks.runs import Bools, Grid, Ints, Runs

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

    def _token_cols(self, grid: Grid) -> int:
        return -(-grid.n_k // self.block)

    def runs(self, grid: Grid) -> Runs:
        first, last = int(grid.q_first[0]) // self.block, (grid.n_q - 1) // self.block
        token_rows = np.arange(first, last + 1, dtype=np.int64)
        pairs = [
            self.pairs(s % grid.heads, token_rows, self._token_cols(grid))
            for s in range(grid.slices)
        ]
        aligned = grid.q_origin % self.block == 0 == grid.k_origin
        if aligned and self.block == grid.block_q == grid.block_k:  # every pair is a block
            lines = [i + s * grid.rows for s, (i, _) in enumerate(pairs)]
            col = np.concatenate([col for _, col in pairs])
            return rl.from_points(grid, np.concatenate(lines) * grid.cols + col, rl.FULL)

        entry = np.repeat(np.arange(len(pairs)), [len(i) for i, _ in pairs])
        row = token_rows[np.concatenate([i for i, _ in pairs])] * self.block
        col = np.concatenate([col for _, col in pairs]) * self.block
        return rectangle_runs(grid, entry, row, row + self.block, col, col + self.block)

    def allowed(self, grid: Grid, s: Ints, q: Ints, k: Ints) -> Bools:
        row, col = q // self.block, k // self.block
        if row.shape[2:] != (1,) or col.shape[1:2] != (1,):
            return self._lookup(grid, s, row, col)
        # The tokens of a block lie in few token blocks: those are looked up, and spread.
        first_row, first_col = row.min(axis=1, keepdims=True), col.min(axis=2, keepdims=True)
        row, col = row - first_row, col - first_col
        height, width = int(row.max(initial=0)) + 1, int(col.max(initial=0)) + 1
        if height * width > row.shape[1] * col.shape[2]:
            return self._lookup(grid, s, row + first_row, col + first_col)
        rows = np.minimum(first_row + np.arange(height)[:, None], (grid.n_q - 1) // self.block)
        met = self._lookup(grid, s, rows, first_col + np.arange(width))
        return met[np.arange(len(met))[:, None, None], row, col]

    def _lookup(self, grid: Grid, s: Ints, row: Ints, col: Ints) -> Bools:
        """Whether token block (row, col) of slice s is allowed; broadcasting."""
        n_cols = self._token_cols(grid)
        allowed = np.zeros(np.broadcast_shapes(s.shape, row.shape, col.shape), bool)
        heads = s % grid.heads
        for head in np.unique(heads).tolist():
            mine = heads == head
            rows, index = np.unique(row, return_inverse=True)
            index = index.reshape(row.shape)
            i, j = self.pairs(head, rows, n_cols)
            keys = np.append(i * n_cols + j, -1)  # -1: a target for searches past the end
            wanted = index * n_cols + col
            found = keys[np.searchsorted(keys[:-1], wanted)] == wanted
            allowed |= found & mine & (col >= 0) & (col < n_cols)
        return allowed

    def signature(self, grid: Grid, s: Ints, row: Ints, col: Ints) -> Ints:
        if self.block < SMALL:
            return super().signature(grid, s, row, col)
        # Which token blocks a block meets, from where on, and which of those are allowed.
        met_rows = 1 + (grid.block_q + self.block - 2) // self.block
        met_cols = 1 + (grid.block_k + self.block - 2) // self.block
        token_row, q_phase = np.divmod(grid.q_token(row), self.block)
        token_col, k_phase = np.divmod(grid.k_token(col), self.block)
        token_rows = token_row[:, None, None] + np.arange(met_rows)[:, None]
        token_cols = token_col[:, None, None] + np.arange(met_cols)
        token_rows = np.clip(token_rows, 0, (grid.n_q - 1) // self.block)
        met = self._lookup(grid, s[:, None, None], token_rows, token_cols)
        phases = np.stack([q_phase, k_phase], axis=1).view(np.uint8)
        content = np.concatenate([phases, np.packbits(met.reshape(len(met), -1), axis=1)], axis=1)
        return row_numbers(content)
