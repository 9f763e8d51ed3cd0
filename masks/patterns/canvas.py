"""Windows on a line, an image or a video; videos frame after frame, and radial attention."""

from functools import reduce
from operator import or_
from typing import Any

import numpy as np

from masks import runs as rl
from masks.algebra import Mask
from masks.checks import integer
from masks.leaves.canvas import OnCanvas, Window, canvas_extents, per_axis, shortest
from masks.leaves.geometry import interval_runs, rectangle_runs, row_numbers
from masks.leaves.leaf import Leaf
from masks.patterns.segments import block_causal
from masks.predicate.where import Rule
from masks.registry import Example, canonical, pattern
from masks.runs import Bools, Grid, Ints, Runs, expand, quotient
from masks.types import Moves

__all__ = ["axial", "frame_causal", "local_2d", "neighborhood", "radial", "sliding_tiles"]
SECTION = "Images and video"  # of the gallery


@pattern(
    "local_2d((16, 16), 2)",
    "the same, cut at the border",
    "(W*(2*r + 1) - r*(r + 1))**2",
    "1906.05909",
    {"W": 16, "r": 2},
)
def local_2d(canvas: tuple[int, ...], radius: int | tuple[int, ...]) -> Mask:
    """Return the tokens within `radius` of the query on a line, an image or a video.

    The window shrinks at the borders, as in stand-alone self-attention (arXiv 1906.05909); compare
    `neighborhood`, where it shifts. It builds for prod(canvas) queries and keys, row by row.

    Args:
        canvas: one to three extents, slowest first: (height, width).
        radius: largest distance along an axis, >= 0; one value, or one for every axis.
    """
    canvas = canvas_extents(canvas)
    radii = per_axis("radius", radius, canvas, min=0)
    return canonical(Local(canvas, radii), radius=shortest(radii))


@pattern(
    "axial((16, 16))",
    "the pixel's row and column; two layers see all",
    "N*(2*W - 1)",
    "1912.12180",
    {"W": 16},
)
def axial(canvas: tuple[int, ...]) -> Mask:
    """Return the tokens on the lines through the query along each axis (arXiv 1912.12180).

    Key and query differ along one axis at most: the same row or the same column of an image. It is
    the union of `local_2d` masks of radius 0 along all axes but one.
    """
    canvas = canvas_extents(canvas)
    radii = np.diag(np.array(canvas) - 1).tolist()
    return reduce(or_, [local_2d(canvas, tuple(line)) for line in radii])


class Local(OnCanvas):
    radii: tuple[int, ...]

    def window(self, axis: int) -> Window:
        place, radius = np.arange(self.canvas[axis]), min(self.radii[axis], self.canvas[axis])
        return Window(place - radius, place + radius)  # unclipped: the same everywhere


@pattern(
    "neighborhood((16, 16), 5)",
    "25 neighbours for every pixel, at the border too",
    "N*k**2",
    "2204.07143",
    {"k": 5},
    also=(
        Example(
            "neighborhood((16, 16), 3) | neighborhood((16, 16), 3, dilation=4)",
            "two resolutions: near pixels, and dilated ones",
            "",
            "2209.15001",
        ),
    ),
    short="natten",
)
def neighborhood(
    canvas: tuple[int, ...],
    kernel: int | tuple[int, ...],
    *,
    dilation: int | tuple[int, ...] = 1,
    stride: int | tuple[int, ...] = 1,
    causal: bool | tuple[bool, ...] = False,
) -> Mask:
    """Return the `kernel` nearest tokens along every axis of a line, an image or a video.

    The rule is that of NATTEN to the letter (arXiv 2204.07143, 2209.15001; strides 2504.16922). At
    a border the window shifts rather than shrinks, so every query sees prod(kernel) keys. `heads`
    and `layers` let dilations alternate, as DiNAT does (arXiv 2209.15001). An even kernel has one
    key more before the query than after it. The mask builds for prod(canvas) tokens, row by row.

    Args:
        canvas: one to three extents, slowest first: (height, width).
        kernel: keys along an axis, >= 1. This and the options are one value, or one for every axis.
        dilation: distance of neighbouring keys, >= 1; a query sees its own residue class.
        stride: queries that share a window, 1..kernel; stride == kernel gives blocked attention.
        causal: a query sees no key after its own place along the axis.

    Raises:
        ValueError: kernel * dilation is beyond an extent, or a stride beyond the kernel.
    """
    canvas = canvas_extents(canvas)
    kernels = per_axis("kernel", kernel, canvas, min=1)
    dilations = per_axis("dilation", dilation, canvas, min=1)
    strides = per_axis("stride", stride, canvas, min=1)
    causals = per_axis("causal", causal, canvas, min=None)
    for extent, k, d, s in zip(canvas, kernels, dilations, strides, strict=True):
        if k * d > extent:
            raise ValueError(
                f"kernel {k} with dilation {d} needs an extent of {k * d}, but the canvas {canvas} "
                f"has {extent}: give a smaller kernel or dilation"
            )
        if s > k:
            raise ValueError(f"stride is {s}: give an integer <= the kernel, {k}")
    return canonical(
        Neighborhood(canvas, kernels, dilations, strides, causals),
        kernel=shortest(kernels),
        dilation=shortest(dilations),
        stride=shortest(strides),
        causal=shortest(causals),
    )


class Neighborhood(OnCanvas):
    kernels: tuple[int, ...]
    dilations: tuple[int, ...]
    strides: tuple[int, ...]
    causals: tuple[bool, ...]

    def window(self, axis: int) -> Window:
        extent, kernel, stride = self.canvas[axis], self.kernels[axis], self.strides[axis]
        dilation = self.dilations[axis]
        i, residue = quotient(np.arange(extent), dilation)  # place within the residue class
        length = -((residue - extent) // dilation)  # of the class
        if self.causals[axis]:
            leader = np.minimum(i // stride * stride + stride - 1, length - 1)
            first, last = np.maximum(leader - kernel + 1, 0), i
        else:
            leader = np.minimum(i // stride * stride + stride // 2, length - 1)
            first = _shifted(leader, kernel, length)
            last = first + kernel - 1
        return Window(first * dilation + residue, last * dilation + residue, dilation)


@pattern(
    "sliding_tiles((16, 16), 4, 3)", "whole tiles of a window", "N*(3*t)**2", "2502.04507", {"t": 4}
)
def sliding_tiles(
    canvas: tuple[int, ...], tile: int | tuple[int, ...], window: int | tuple[int, ...]
) -> Mask:
    """Sliding tile attention (arXiv 2502.04507): a tile of tokens sees a window of whole tiles.

    The window is centred on the query's tile and shifts at the borders, as in `neighborhood`. The
    tokens come row by row; with `>> tiled(canvas, tile)` those of a tile are neighbours in the
    sequence, and blocks of prod(tile) tokens are full or empty, when the tiles divide the canvas.
    Where they do not, the last tile of an axis is smaller.

    Args:
        canvas: one to three extents, slowest first.
        tile: tokens of a tile along an axis, >= 1; one value, or one for every axis.
        window: tiles of a window along an axis, >= 1 and no more than there are.
    """
    canvas = canvas_extents(canvas)
    tiles = per_axis("tile", tile, canvas, min=1)
    sizes = per_axis("window", window, canvas, min=1)
    for extent, t, size in zip(canvas, tiles, sizes, strict=True):
        if size > -(-extent // t):
            raise ValueError(
                f"window is {size}, but an extent of {extent} has {-(-extent // t)} tiles of {t}: "
                "give a smaller window or tile"
            )
    mask = SlidingTiles(canvas, tiles, sizes)
    return canonical(mask, tile=shortest(tiles), window=shortest(sizes))


class SlidingTiles(OnCanvas):
    tiles: tuple[int, ...]
    sizes: tuple[int, ...]

    def window(self, axis: int) -> Window:
        extent, tile, size = self.canvas[axis], self.tiles[axis], self.sizes[axis]
        first = _shifted(np.arange(extent) // tile, size, -(-extent // tile))
        return Window(first * tile, np.minimum((first + size) * tile, extent) - 1)


def _shifted(centre: Ints, size: int, length: Any) -> Ints:
    """First place of a window of `size` around `centre`, moved into 0..length - 1."""
    return np.clip(centre - size // 2, 0, length - size)


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

    def signature(self, grid: Grid, s: Ints, row: Ints, col: Ints) -> list[Ints]:
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
        return [row_numbers(np.concatenate([*cuts, *ends], axis=1).astype(np.int16))]
