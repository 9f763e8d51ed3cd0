"""Global tokens, as in Longformer (arXiv 2004.05150) and BigBird (arXiv 2007.14062)."""

from dataclasses import dataclass

import numpy as np

from masks import runs as rl
from masks.algebra import Leaf, Mask
from masks.checks import integer
from masks.runs import Bools, Grid, Ints, Runs
from masks.spec import call_text, pattern


@pattern("global")
def global_tokens(n: int) -> Mask:
    """The first `n` tokens (>= 0) see every key, and every query sees them: q < n or k < n."""
    n = integer("n", n, least=0)
    return GlobalTokens(call_text("global_tokens", n), n)


@dataclass(frozen=True, repr=False, eq=False)
class GlobalTokens(Leaf):
    key: str
    n: int
    prefix_stable = True

    def runs(self, grid: Grid) -> Runs:
        full_cols = int((grid.k_last < self.n).sum())
        any_cols = int((grid.k_first < self.n).sum())
        row_code = np.where(
            grid.q_last < self.n, rl.FULL, np.where(grid.q_first < self.n, rl.MIXED, rl.EMPTY)
        )
        full, mixed = np.full_like(row_code, rl.FULL), np.full_like(row_code, rl.MIXED)
        codes = np.stack([full, np.maximum(row_code, mixed), row_code], axis=1)
        steps = np.broadcast_to(np.array([0, full_cols, any_cols]), codes.shape)
        return rl.from_steps(grid, steps, codes)

    def allowed(self, grid: Grid, s: Ints, q: Ints, k: Ints) -> Bools:
        return (q < self.n) | (k < self.n)

    def signature(self, grid: Grid, s: Ints, row: Ints, col: Ints) -> Ints:
        rows_in = np.clip(self.n - grid.q_token(row), 0, grid.block_q)
        cols_in = np.clip(self.n - grid.k_token(col), 0, grid.block_k)
        return rows_in * (grid.block_k + 1) + cols_in
