"""Videos, frame after frame: causal over frames, and radial attention."""

from typing import Any

import numpy as np

from masks import runs as rl
from masks.algebra import Mask
from masks.checks import integer
from masks.leaves.geometry import interval_runs, rectangle_runs, row_numbers
from masks.leaves.leaf import Leaf
from masks.patterns.segments import block_causal
from masks.predicate.where import Rule
from masks.registry import pattern
from masks.runs import Bools, Grid, Ints, Runs, expand, quotient
from masks.types import Moves

__all__ = ["frame_causal", "radial"]
SECTION = "Images and video"  # of the gallery


@pattern(
    "frame_causal(16, window=4, sinks=1)",
    "frames of a video one after another, with a window and a sink",
    "(m*w - w*(w - 1)/2 + (m - w)*g - g*(g - 1)/2)*s**2",
    "2412.07772",
    {"m": 16, "s": 16, "w": 4, "g": 1},
)
def frame_causal(tokens: int, window: int | None = None, *, sinks: int = 0, chunk: int = 1) -> Mask:
    """Video frames that see themselves in full, and the frames before them.

    The mask of autoregressive video models: CausVid (arXiv 2412.07772) and Self-Forcing (arXiv
    2506.08009), which generates chunks of frames. Sinks are those of LongLive (arXiv 2509.22622).
    Without a window it is `block_causal(tokens * chunk)`. The sequence may end within a frame.

    With m >= w + g frames of s tokens, a window of w frames and g sinks, as many pairs of frames
    are allowed as `streaming` allows of tokens: mw - w(w - 1)/2 + (m - w)g - g(g - 1)/2.

    Args:
        tokens: tokens of a frame, >= 1.
        window: frames that a query sees, which end with its chunk; >= chunk, by default all.
        sinks: frames at the beginning that all later ones see as well, >= 0.
        chunk: frames that see each other, >= 1.
    """
    tokens, chunk = integer("tokens", tokens, min=1), integer("chunk", chunk, min=1)
    sinks, size = integer("sinks", sinks, min=0), tokens * chunk
    if window is None:
        if sinks:
            raise ValueError(f"sinks is {sinks} and window None: give the window too")
        return block_causal(size)
    window = integer("window", window, min=chunk)

    def rule(q: Any, k: Any) -> Any:
        end = (q // size + 1) * size
        return (k < end) & ((k >= end - window * tokens) | (k < sinks * tokens))

    return Rule(rule)


@pattern(
    "radial(8)",
    "frames of a video: the window halves as their distance doubles",
    "94*64 + 118*44 + 212*22 + (328 + 144)*8",
    "2506.19852",
)
def radial(tokens: int, *, least: int = 1) -> Mask:
    """Radial attention (arXiv 2506.19852): the further apart two frames, the narrower the window.

    Place a of frame i sees place b of frame j where |a - b| < s // p. Here s is the number of
    tokens of a frame, and p the largest power of two up to |i - j|, at least 1. Where the window
    would be narrower than `least`, it has that width, and only every r-th distance of frames is
    kept, with r = ceil(least * p / s). So the pairs of frames lose half of their density whenever
    their distance doubles, and n tokens allow O(n log n) pairs at a given s.

    With least=1 this is equation 4 of the paper. The authors add the first frame as a sink,
    `radial(s) | sinks(s)`. Their code works in blocks, and narrows no window below one: compare
    `radial(s, least=128) >> snap(128)`.

    Args:
        tokens: tokens of a frame, >= 1. The sequence may end within a frame.
        least: the narrowest window, 1..tokens.
    """
    tokens = integer("tokens", tokens, min=1)
    return Radial(tokens, integer("least", least, min=1, max=tokens))


class Radial(Leaf):
    tokens: int
    least: int

    def moves(self) -> Moves:
        return Moves(self.tokens)

    def _width(self, apart: Ints) -> Ints:
        """Places of frames so far apart see each other less than this apart; 0: never."""
        apart = np.abs(apart)
        power = 1 << (np.frexp(np.maximum(apart, 1))[1].astype(np.int64) - 1)
        every = -(-self.least * power // self.tokens)
        return np.where(apart % every == 0, np.maximum(self.tokens // power, self.least), 0)

    def runs(self, grid: Grid) -> Runs:
        size = self.tokens
        # Pieces: the queries of a block row in one frame, which has them at places low..high,
        row, frame = expand(grid.q_first // size, grid.q_last // size + 1)
        low = np.maximum(grid.q_first[row] - frame * size, 0)
        high = np.minimum(grid.q_last[row] - frame * size, size - 1)
        # with each frame of keys that they see.
        first, last = int(grid.k_first[0]) // size, int(grid.k_last[-1]) // size
        apart = np.arange(first - int(frame[-1]), last - int(frame[0]) + 1)
        apart = apart[self._width(apart) > 0]
        begin = np.searchsorted(apart, first - frame)
        i, which = expand(begin, np.searchsorted(apart, last - frame, "right"))
        row, low, high, frame = row[i], low[i], high[i], frame[i]
        width, start = self._width(apart)[which], (frame + apart[which]) * size
        touched = start + np.maximum(low - width + 1, 0), start + np.minimum(high + width, size)
        filled = start + np.maximum(high - width + 1, 0), start + np.minimum(low + width, size)
        columns = (
            np.searchsorted(grid.k_last, touched[0]),
            np.searchsorted(grid.k_first, touched[1]),
        )
        mixed = interval_runs(grid, row, *columns, np.full(len(row), rl.MIXED))
        queries = frame * size + low, frame * size + high + 1
        full = rectangle_runs(grid, np.zeros_like(row), *queries, *filled)
        return rl.merge(mixed, full, np.maximum)

    def allowed(self, grid: Grid, s: Ints, q: Ints, k: Ints) -> Bools:
        q_frame, q_place = quotient(q, self.tokens)
        k_frame, k_place = quotient(k, self.tokens)
        if k.shape[1:2] != (1,) or self.tokens >= 1 << 14:
            return np.abs(q_place - k_place) < self._width(q_frame - k_frame)
        # The keys of a block lie in few frames: one after the other, in numbers of 16 bits.
        q_place, k_place = q_place.astype(np.int16), k_place.astype(np.int16)
        first = k_frame.min(axis=2, keepdims=True)
        more = (k_frame - first).astype(np.int16)
        apart, count = q_frame - first, int(more.max(initial=0)) + 1
        widths = np.minimum(self._width(apart - np.arange(count)), self.tokens).astype(np.int16)
        apart = q_place - k_place
        np.abs(apart, out=apart)
        allowed = apart < widths[:, :, :1]
        for i in range(1, count):
            np.less(apart, widths[:, :, i : i + 1], out=allowed, where=more == i)
        return allowed

    def signature(self, grid: Grid, s: Ints, row: Ints, col: Ints) -> Ints:
        # Where the first frames end in the block; and for pairs of its frames so much further apart
        # than the first ones, between which differences of query and key the window lies.
        size = self.tokens
        q, q_place = quotient(grid.q_token(row)[:, None], size)
        k, k_place = quotient(grid.k_token(col)[:, None], size)
        q_more, k_more = (q_place + grid.block_q - 1) // size, (k_place + grid.block_k - 1) // size
        more = np.arange(-int(k_more.max()), int(q_more.max()) + 1)
        width, middle = self._width(q - k + more), k_place - q_place + more * size
        met = (width > 0) & (-k_more <= more) & (more <= q_more)
        ends = [
            np.where(met, np.clip(end, -grid.block_k, grid.block_q), 0)
            for end in (middle - width, middle + width)
        ]
        cuts = np.minimum(size - q_place, grid.block_q), np.minimum(size - k_place, grid.block_k)
        return row_numbers(np.concatenate([*cuts, *ends], axis=1).astype(np.int16))
