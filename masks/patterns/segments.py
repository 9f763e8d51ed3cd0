"""Segments of equal length: block-diagonal, block-causal, block diffusion, LongNet."""

from typing import Any

import numpy as np

from masks import runs as rl
from masks.algebra import Mask
from masks.checks import flag, integer
from masks.leaves.geometry import interval_runs, rectangle_runs
from masks.leaves.leaf import ByLength, Leaf
from masks.patterns.bands import causal
from masks.predicate.where import where
from masks.registry import Example, pattern
from masks.runs import Bools, Grid, Ints, Runs, expand

__all__ = ["block_causal", "block_diagonal", "block_diffusion", "longnet"]
SECTION = "Segments"  # of the gallery


@pattern(
    Example(
        "block_diagonal(48)",
        "chunks that see themselves",
        "(N // s)*s**2 + (N % s)**2",
        "",
        {"s": 48},
    )
)
def block_diagonal(size: int, offset: int = 0) -> Mask:
    """Token blocks that see themselves only: (q + offset) // size == (k + offset) // size.

    This is "local attention" in Long Range Arena (arXiv 2011.04006; there size is 50), and windows
    that do not overlap elsewhere; two of them, the second with offset size // 2, make the shifted
    windows of Swin (arXiv 2103.14030) in one dimension. With `& causal()` a block is causal inside.
    With blocks of `size` tokens and no offset, n of n x n are allowed.

    Args:
        size: tokens of a token block, >= 1.
        offset: tokens that the first token block is short of, 0 <= offset < size.
    """
    size = integer("size", size, min=1)
    offset = integer("offset", offset, min=0, max=size - 1)
    return BlockDiagonal(size, offset)


@pattern(
    Example(
        "block_causal(32)",
        "chunks that see themselves and those before",
        "N*(N + s)/2",
        "2503.09573",
        {"s": 32},
    )
)
def block_causal(size: int) -> Mask:
    """Token blocks that see themselves and all before them: k // size <= q // size.

    This is the mask of block diffusion (arXiv 2503.09573) in one stream, as it samples; it trains
    with `block_diffusion`. The same as `block_diagonal(size) | causal()`, which is its text. With
    blocks of `size` tokens, n(n+1)/2 of n x n are allowed, all of them full.
    """
    return block_diagonal(size) | causal()


@pattern(
    Example(
        "block_diffusion(16)",
        "training of block diffusion: the noisy sequence, and the clean one after it",
        "N/2*(N/2 + s)",
        "2503.09573",
        {"s": 16},
    )
)
def block_diffusion(size: int) -> Mask:
    """The training mask of block diffusion (BD3-LM, arXiv 2503.09573), for [noisy; clean] tokens.

    The sequence has two halves: a noisy copy, and the clean tokens after it. Both are cut into
    token blocks of `size`, the last of which may be shorter. A noisy block sees itself, and the
    clean blocks strictly before it. The clean half is block-causal, and never sees the noisy one.
    So one pass trains every block. `block_causal` is the mask for one stream.

    With halves of m tokens, which `size` divides, m(m + size) of 2m x 2m pairs are allowed.

    Args:
        size: tokens of a token block, >= 1.

    Raises:
        ValueError: at `build`, an odd length, or other queries than keys.
    """
    return BlockDiffusion(integer("size", size, min=1))


class BlockDiffusion(ByLength):
    size: int

    def at(self, grid: Grid) -> Leaf:
        if grid.n_q != grid.n_k or grid.n_q % 2:
            raise ValueError(
                f"n_q is {grid.n_q} and n_k {grid.n_k}, but {self} has two halves, noisy and "
                "clean: give one even number for both"
            )
        half = grid.n_q // 2

        def rule(q: Any, k: Any) -> Any:
            q_block, k_block = q % half // self.size, k % half // self.size
            own = ((q < half) == (k < half)) & (q_block == k_block)
            return own | ((k >= half) & (k_block < q_block))

        return where(rule)


class BlockDiagonal(Leaf):
    size: int
    offset: int

    def runs(self, grid: Grid) -> Runs:
        number = self._blocks(grid)
        start = number * self.size - self.offset
        stop = start + self.size
        return rectangle_runs(grid, np.zeros_like(start), start, stop, start, stop)

    def moves(self) -> tuple[int, ...]:
        return (self.size,)

    def _blocks(self, grid: Grid) -> Ints:
        """Numbers of the token blocks that have queries and keys in the grid."""
        low = max(int(grid.q_first[0]), int(grid.k_first[0]))
        high = min(int(grid.q_last[-1]), int(grid.k_last[-1]))
        first, last = ((token + self.offset) // self.size for token in (low, high))
        return np.arange(first, last + 1, dtype=np.int64)

    def allowed(self, grid: Grid, s: Ints, q: Ints, k: Ints) -> Bools:
        return (q + self.offset) // self.size == (k + self.offset) // self.size

    def signature(self, grid: Grid, s: Ints, row: Ints, col: Ints) -> Ints:
        # Where the first token block ends, which is where the others do, and how far apart the
        # first token blocks of the two sides are.
        q_block, q_phase = np.divmod(grid.q_token(row) + self.offset, self.size)
        k_block, k_phase = np.divmod(grid.k_token(col) + self.offset, self.size)
        q_left = np.minimum(self.size - q_phase, grid.block_q)
        k_left = np.minimum(self.size - k_phase, grid.block_k)
        return ((q_block - k_block) * (grid.block_q + 1) + q_left) * (grid.block_k + 1) + k_left


@pattern(
    Example(
        "longnet(64, 4)",
        "every 4th token of a segment",
        "N*w/r**2",
        "2307.02486",
        {"w": 64, "r": 4},
    )
)
def longnet(segment: int, ratio: int, offset: int = 0, *, per_head: bool = False) -> Mask:
    """Every `ratio`-th token of a segment sees the others of its segment that are chosen with it.

    Key k is allowed for query q when q // segment == k // segment and both q % segment and
    k % segment leave the remainder `offset` modulo `ratio`. So n * segment / ratio**2 pairs of
    n x n are allowed where ratio divides segment and segment divides n, and one head alone leaves
    1 - 1/ratio of the queries with nothing to see.

    The paper runs several (segment, ratio) and adds the outputs weighted by their softmax sums. A
    union of masks is not quite that: the paper counts a pair twice that two of them allow.

    Args:
        segment: tokens of a segment, >= 1.
        ratio: dilation, >= 1; 1 gives `block_diagonal(segment)`.
        offset: 0 <= offset < ratio.
        per_head: head h has offset (offset + h) % ratio instead, so that `ratio` heads cover every
            query; `build` takes heads=ratio unless it is given a multiple of that.
    """
    segment, ratio = integer("segment", segment, min=1), integer("ratio", ratio, min=1)
    offset = integer("offset", offset, min=0, max=ratio - 1)
    return LongNet(segment, 0, ratio, offset, flag("per_head", per_head))


class LongNet(BlockDiagonal):
    """Block-diagonal, for the tokens of each block that are chosen."""

    ratio: int
    first: int  # token of a segment that head 0 chooses
    per_head: bool

    @property
    def period(self) -> int:
        return self.ratio if self.per_head else 1

    def _remainder(self, s: Any) -> Any:
        """Of the tokens that a slice chooses; there is one slice unless heads differ."""
        return (self.first + s * self.per_head) % self.ratio

    def runs(self, grid: Grid) -> Runs:
        if self.ratio == 1:
            return super().runs(grid)
        lines, firsts, stops = [], [], []
        for s in range(grid.slices):
            q_segment, top, bottom = self._met(grid, s, grid.block_q, grid.q_first, grid.q_last)
            k_segment, first, stop = self._met(grid, s, grid.block_k, grid.k_first, grid.k_last)
            of, row = expand(top, bottom)
            segment = q_segment[of]
            left, right = (np.searchsorted(k_segment, segment, side) for side in ("left", "right"))
            i, met = expand(left, right)  # ranges of key blocks in the same segment
            lines.append(s * grid.rows + row[i])
            firsts.append(first[met])
            stops.append(stop[met])
        line, first, stop = map(np.concatenate, (lines, firsts, stops))
        return interval_runs(grid, line, first, stop, np.full(len(line), rl.MIXED))

    def _met(
        self, grid: Grid, s: int, block: int, first: Ints, last: Ints
    ) -> tuple[Ints, Ints, Ints]:
        """Blocks of one side with chosen tokens, as ranges: (segment, first block, stop).

        Args:
            block, first, last: size and end tokens of the blocks on that side.
        """
        segment_start = self._blocks(grid) * self.size
        start = segment_start + self._remainder(s)
        low = np.maximum(segment_start, first[0])
        high = np.minimum(segment_start + self.size, last[-1] + 1)
        begin, end = (-(-(token - start) // self.ratio) for token in (low, high))
        if self.ratio > block:  # one by one, for there are blocks between them
            segment, i = expand(begin, end)
            met = np.searchsorted(last, start[segment] + i * self.ratio)
            return segment, met, met + 1
        segment = np.flatnonzero(begin < end)
        ends = [start[segment] + i[segment] * self.ratio for i in (begin, end - 1)]
        met, stop = (np.searchsorted(last, token) for token in ends)
        return segment, met, stop + 1

    def allowed(self, grid: Grid, s: Ints, q: Ints, k: Ints) -> Bools:
        chosen = self._remainder(s)
        q_chosen = q % self.size % self.ratio == chosen
        k_chosen = k % self.size % self.ratio == chosen
        return super().allowed(grid, s, q, k) & q_chosen & k_chosen

    def signature(self, grid: Grid, s: Ints, row: Ints, col: Ints) -> Ints:
        # Also where the first chosen token is; for other segments the head decides.
        number = np.unique(super().signature(grid, s, row, col), return_inverse=True)[1]
        for token, block in ((grid.q_token(row), grid.block_q), (grid.k_token(col), grid.block_k)):
            step = (self._remainder(s) - token % self.size) % self.ratio
            number = number * (block + 1) + np.minimum(step, block)
        return number * grid.slices + s
