"""LogSparse (Li et al., arXiv 1907.00235): of its paper, and of the code that is copied around."""

import numpy as np

from masks import runs as rl
from masks.algebra import Mask
from masks.checks import FAR, integer
from masks.leaves.distances import Distances
from masks.leaves.geometry import from_profiles
from masks.leaves.lines import NONE, Lines, TokenSet
from masks.patterns.bands import Band, causal
from masks.patterns.distances import power_of_two
from masks.registry import Example, canonical, pattern
from masks.runs import Bools, Grid, Ints, Runs

__all__ = ["log_sparse"]
SECTION = "Bands and distances"  # of the gallery

LONGEST = 1 << 30  # so that signatures fit int64


@pattern(
    Example("log_sparse()", "the same, causal", "N*(L + 1) - (N - 1)", "1907.00235", {"L": 8}),
    written=1,
)
def log_sparse(window: int | None = None, restart: int | None = None) -> Mask:
    """Keys at the distances 0, 1, 2, 4, ..: `power_of_two() & causal()`, as the paper defines it.

    With `window`, the mask of its widely copied code (`log_mask` and `row_mask`), which adds local
    and restart attention and is no function of the distance alone. Say r = restart and
    c = ceil(log2 r). The query and the tokens r, 2r, .. before it are anchors.

    - An anchor allows the keys at distances 0, .., c - 1 from it, and those at c, c + 1, c + 3,
      .., c - 1 + 2**(c - 1), up to r.
    - An anchor among the first c - 1 tokens does not allow itself.
    - The first 2c * (window // r) queries see all that is causal.

    Args:
        window: 1..2**30, the length that the code makes its mask for; here it builds for any.
        restart: 2..2**30, by default the window.

    The paper's mask allows n * L + 1 pairs of n = 2**L tokens, and log_sparse(64) 667 of 64.
    """
    if window is None:
        if restart is not None:
            raise ValueError(f"restart is {restart} and window None: give the window too")
        return power_of_two() & causal()
    window = integer("window", window, min=1, max=LONGEST)
    restart = integer("restart", window if restart is None else restart, min=2, max=LONGEST)
    mask = LogSparse("top_left", window, restart)
    return canonical(mask, restart=None if restart == window else restart)


class LogSparse(Distances):
    window: int
    restart: int

    @property
    def near(self) -> int:
        """Keys of the local part: ceil(log2(restart))."""
        return (self.restart - 1).bit_length()

    @property
    def dense_rows(self) -> int:
        return 2 * self.near * (self.window // self.restart)

    @property
    def offsets(self) -> Ints:
        """Distances from an anchor, ascending."""
        far = self.near - 1 + (1 << np.arange(self.near, dtype=np.int64))
        return np.append(np.arange(self.near), far[far <= self.restart])

    def distance(self, d: Ints) -> Bools:
        return (d >= 0) & np.isin(d % self.restart, self.offsets)

    def allowed(self, grid: Grid, s: Ints, q: Ints, k: Ints) -> Bools:
        d = q - k
        return (self.distance(d) & ~self._lost(d, k)) | ((d >= 0) & (q < self.dense_rows))

    def _lost(self, d: Ints, k: Ints) -> Bools:
        """Whether the key is an anchor near the beginning, allowed by no other anchor."""
        again = self.restart if self.offsets[-1] == self.restart else FAR
        return (k < self.near - 1) & (d % self.restart == 0) & (d < again)

    def runs(self, grid: Grid) -> Runs:
        not_full = np.where(grid.k_first < self.near - 1, rl.MIXED, rl.FULL).astype(np.uint8)
        whole = from_profiles(grid, [(0, not_full)], np.zeros(grid.rows, np.int64))
        sparse = rl.merge(super().runs(grid), whole, np.minimum)
        rows = Lines(TokenSet.between(0, self.dense_rows), NONE).runs(grid)
        top = rl.merge(rows, Band("top_left", 0, FAR).runs(grid), np.minimum)
        return rl.merge(sparse, top, np.maximum)

    def signature(self, grid: Grid, s: Ints, row: Ints, col: Ints) -> Ints:
        content = super().signature(grid, s, row, col)
        offset = np.maximum(self.offset(grid, row, col), -grid.block_q)
        far = self.restart + grid.block_k  # from here on an anchor is lost, or not, periodically
        phase = grid.block_q + np.where(offset < far, offset, far + offset % self.restart)
        first = grid.k_token(col) + grid.block_k  # of the keys, counted from 1
        place = phase * (grid.block_k + self.near) + first
        beginning = grid.k_token(col) < self.near - 1
        content = np.where(beginning, len(content) * place + content, content)
        top = grid.q_token(row) < self.dense_rows
        return np.where(top, -1 - (row * grid.cols + col), content)
