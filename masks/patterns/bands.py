"""Bands along the diagonal, and everything: dense, causal, local and sliding windows."""

import numpy as np

from masks import runs as rl
from masks.algebra import Mask
from masks.checks import FAR, integer
from masks.leaves.distances import Distances
from masks.leaves.geometry import row_intervals
from masks.leaves.leaf import Leaf
from masks.registry import Example, canonical, pattern
from masks.runs import Bools, Grid, Ints, Runs
from masks.types import Repeats

__all__ = ["causal", "dense", "local", "sliding"]
SECTION = "Bands and distances"  # of the gallery


@pattern(Example("dense()", "everything", "N**2"))
def dense() -> Mask:
    """Every key is allowed for every query; `~dense()` is nothing."""
    return Dense()


class Dense(Leaf):
    def laid(self, start: Ints, stop: Ints) -> Mask:
        return self

    def repeats(self, grid: Grid) -> Repeats:
        return Repeats(np.zeros(grid.rows, np.int64), None)

    def runs(self, grid: Grid) -> Runs:
        return rl.constant(rl.FULL)

    def allowed(self, grid: Grid, s: Ints, q: Ints, k: Ints) -> Bools:
        return np.ones(np.broadcast_shapes(s.shape, q.shape, k.shape), bool)


@pattern(Example("causal()", "no query sees ahead", "N*(N + 1)/2", "1706.03762"))
def causal(*, align: str = "top_left") -> Mask:
    """Key k is allowed for query q when k <= q.

    Args:
        align: where the diagonal lies when n_q != n_k. "top_left": positions count from the start
            on both sides. "bottom_right": the last query faces the last key, as in FlashAttention
            since 2.1.

    The diagonal blocks are partial and those below it full: n(n+1)/2 of n x n blocks.
    """
    return Band(align, 0, FAR)


@pattern(
    Example(
        "local(24)", "a window to both sides", "N*(2*w + 1) - w*(w + 1)", "2004.05150", {"w": 24}
    ),
    written=2,
)
def local(left: int, right: int | None = None, *, align: str = "top_left") -> Mask:
    """Key k is allowed for query q when q - left <= k <= q + right, both ends included.

    Args:
        left, right: tokens to either side, >= 0; `right` defaults to `left`. The convention is that
            of FlashAttention's `window_size`; an inner query sees left + right + 1 keys.
        align: see `causal`.
    """
    left = integer("left", left, min=0)
    right = left if right is None else integer("right", right, min=0)
    return canonical(Band(align, -right, left), right=None if right == left else right)


@pattern(
    Example("sliding(48)", "the last keys, causal", "N*w - w*(w - 1)/2", "2310.06825", {"w": 48})
)
def sliding(window: int, *, align: str = "top_left") -> Mask:
    """Return the `window` keys that end in the query itself: 0 <= q - k < window, as in Mistral.

    Args:
        window: keys that an inner query sees, >= 1.
        align: see `causal`.
    """
    window = integer("window", window, min=1)
    return Band(align, 0, window - 1)


class Band(Distances):
    """low <= q - k <= high."""

    low: int
    high: int

    def distance(self, d: Ints) -> Bools:
        return (d >= self.low) & (d <= self.high)

    def runs(self, grid: Grid) -> Runs:
        first, last = grid.q_first + self.shift(grid), grid.q_last + self.shift(grid)
        # The queries of a block row see an interval of keys together, and another one each.
        low, high = np.maximum(first - self.high, 0), np.minimum(last - self.low, grid.n_k - 1)
        block, origin = grid.block_k, grid.k_origin
        touched = (low - origin) // block, (high - origin) // block + 1
        begin, stop = (np.clip(x, 0, grid.cols) for x in touched)
        full = (
            np.searchsorted(grid.k_first, last - self.high, "left"),
            np.searchsorted(grid.k_last, first - self.low, "right"),
        )
        return row_intervals(grid, (np.where(low <= high, begin, stop), stop), full)

    def signature(self, grid: Grid, s: Ints, row: Ints, col: Ints) -> Ints:
        return grid.q_token(row) - grid.k_token(col)  # a band looks the same along a diagonal
