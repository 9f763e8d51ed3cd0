"""Patterns of the distance q - k: dilated windows, diagonals, powers of two, LogSparse."""

from typing import Any

import numpy as np

from masks.algebra import Mask
from masks.checks import FAR, choice, integer
from masks.leaves.distances import ALIGNMENTS, Distances
from masks.leaves.lines import ascending
from masks.leaves.token_blocks import TokenBlocks
from masks.patterns.bands import causal
from masks.predicate.where import Rule
from masks.registry import Example, canonical, pattern
from masks.runs import Bools, Ints

__all__ = ["diagonals", "dilated", "log_sparse", "power_of_two"]
SECTION = "Bands and distances"  # of the gallery

LONGEST = 1 << 30  # of log_sparse, so that signatures fit int64


@pattern(
    Example(
        "dilated(48, 4)",
        "a window with gaps; join its residue classes with another mask",
        "N*(2*m + 1) - s*m*(m + 1)",
        "2004.05150",
        {"m": 12, "s": 4},
    )
)
def dilated(extent: int, step: int, *, align: str = "top_left") -> Mask:
    """Every `step`-th key up to `extent` tokens away: |q - k| <= extent and step divides q - k.

    The extent is a distance, both ends included, as in attention-gym. Longformer (arXiv 2004.05150)
    counts keys: w // 2 to either side at dilation r are `dilated(w // 2 * r, r)`. By itself the
    mask never leaves the residue class of q modulo `step`, at any depth: join another one to it.

    Args:
        extent: tokens, >= 0; an inner query sees 2 * (extent // step) + 1 keys.
        step: >= 1; 1 makes it `local(extent)`.
        align: see `causal`.

    With w = extent // step and n > extent tokens, n(2w + 1) - step * w(w + 1) pairs are allowed.
    """
    extent, step = integer("extent", extent, min=0), integer("step", step, min=1)
    return Dilated(align, extent, step)


@pattern(Example("diagonals((0, 16, 64))", "given distances", "3*N - 16 - 64"))
def diagonals(distances: tuple[int, ...], *, align: str = "top_left") -> Mask:
    """Key k is allowed for query q when q - k is one of `distances`; below 0 lies the future.

    Args:
        distances: a tuple of different integers; the order is free.
        align: see `causal`.

    Distance d holds n - |d| pairs of n x n tokens.
    """
    distances = ascending("distances", distances, min=None)
    return canonical(Diagonals(align, distances), distances=distances)


class Dilated(Distances):
    extent: int
    step: int

    def distance(self, d: Ints) -> Bools:
        return (np.abs(d) <= self.extent) & (d % self.step == 0)


class Diagonals(Distances):
    distances: tuple[int, ...]

    def distance(self, d: Ints) -> Bools:
        return np.isin(d, np.array(self.distances, np.int64))


@pattern(
    Example(
        "power_of_two()",
        "distances 0, 1, 2, 4, ..: few layers reach far",
        "N*(2*L + 1) - 2*(N - 1)",
        "2503.03588",
        {"L": 8},
    )
)
def power_of_two(block: int = 1, *, align: str = "top_left") -> Mask:
    """Return the distance |q // block - k // block| is 0 or a power of two.

    `power_of_two() & causal()` is LogSparse (Li et al., arXiv 1907.00235); these are the distances
    of PowerAttention, too (Chen et al., arXiv 2503.03588). Unlike `butterfly & causal`, it reaches
    every earlier token: distance d in as many layers as d has one bits.

    Args:
        block: tokens of a token block, >= 1. A multiple of the block of the build makes all blocks
            full, where distances of tokens leave two or three thin diagonals in each.
        align: see `causal`; token blocks count from the start, so it needs block=1.

    With n = 2**L token blocks, n + 2(n(L - 1) + 1) of n x n are allowed, and nL + 1 of them causal.
    """
    block = integer("block", block, min=1)
    align = choice("align", align, ALIGNMENTS)
    if block > 1 and align != "top_left":
        raise ValueError(f"align is {align!r} and block {block}: leave one of them out")
    return PowerOfTwo(align) if block == 1 else PowerOfTwoBlocks(block)


class PowerOfTwo(Distances):
    def distance(self, d: Ints) -> Bools:
        apart = np.abs(d)
        return (apart & (apart - 1)) == 0


class PowerOfTwoBlocks(TokenBlocks):
    def pairs(self, head: int, rows: Ints, n_cols: int) -> tuple[Ints, Ints]:
        held = int(max(rows[-1], n_cols - 1)).bit_length()
        powers = 1 << np.arange(held, dtype=np.int64)
        cols = rows[:, None] + np.concatenate([-powers[::-1], [0], powers])
        i, place = np.nonzero((cols >= 0) & (cols < n_cols))
        return i, cols[i, place]


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
    mask = LogSparse(window, restart)
    return canonical(mask, restart=None if restart == window else restart)


class LogSparse(Rule):
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

    def rule(self, h: Any, q: Any, k: Any) -> Any:
        d, again = q - k, self.restart if self.offsets[-1] == self.restart else FAR
        # An anchor near the beginning is lost where no other anchor allows it.
        lost = (k < self.near - 1) & (d % self.restart == 0) & (d < again)
        return (d >= 0) & (
            (np.isin(d % self.restart, self.offsets) & ~lost) | (q < self.dense_rows)
        )
