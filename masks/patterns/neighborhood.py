"""Windows on a line, an image or a video: neighbourhoods, discs, axes and tiles."""

from functools import reduce
from operator import or_
from typing import Any

import numpy as np

from masks.algebra import Mask
from masks.checks import choice
from masks.leaves.canvas import OnCanvas, Window, canvas_extents, per_axis, shortest
from masks.registry import Example, canonical, pattern
from masks.runs import Bools, Grid, Ints, quotient

__all__ = ["axial", "local_2d", "neighborhood", "sliding_tiles"]
SECTION = "Images and video"  # of the gallery

NORMS = ("chebyshev", "manhattan", "euclidean")


@pattern(
    "local_2d((16, 16), 2)",
    "the same, cut at the border",
    "(W*(2*r + 1) - r*(r + 1))**2",
    "1906.05909",
    {"W": 16, "r": 2},
)
def local_2d(
    canvas: tuple[int, ...], radius: int | tuple[int, ...], *, norm: str = "chebyshev"
) -> Mask:
    """Return the tokens within `radius` of the query on a line, an image or a video.

    The window shrinks at the borders, as in stand-alone self-attention (arXiv 1906.05909); compare
    `neighborhood`, where it shifts. With the default norm, an axis of extent E and radius
    r < E counts (2r + 1)E - r(r + 1) pairs, and the mask their product over the axes. It builds for
    prod(canvas) queries and keys, row by row.

    Args:
        canvas: one to three extents, slowest first: (height, width).
        radius: largest distance along an axis, >= 0; one value, or one for every axis.
        norm: "chebyshev" keeps to the radius along every axis: a box. "manhattan" and "euclidean"
            keep the sum of the distances, or of their squares, to one radius: a diamond, a disc.
    """
    canvas = canvas_extents(canvas)
    radii = per_axis("radius", radius, canvas, min=0)
    norm = choice("norm", norm, NORMS)
    if norm != "chebyshev" and len(set(radii)) > 1:
        raise ValueError(f"radius is {radius!r}: give one integer for the norm {norm!r}")
    mask = Local(canvas, radii) if norm == "chebyshev" else Ball(canvas, radii, norm)
    return canonical(mask, radius=shortest(radii))


@pattern(
    "axial((16, 16))",
    "the pixel's row and column; two layers see all",
    "N*(2*W - 1)",
    "1912.12180",
    {"W": 16},
)
def axial(canvas: tuple[int, ...]) -> Mask:
    """Return the tokens on the lines through the query along each axis (arXiv 1912.12180).

    Key and query differ along one axis at most: the same row or the same column of an image. Every
    query sees sum(canvas) - len(canvas) + 1 keys. It is the union of `local_2d` masks of radius 0
    along all axes but one.
    """
    canvas = canvas_extents(canvas)
    radii = np.diag(np.array(canvas) - 1).tolist()
    return reduce(or_, [local_2d(canvas, tuple(line)) for line in radii])


class Local(OnCanvas):
    radii: tuple[int, ...]

    def window(self, axis: int) -> Window:
        place, radius = np.arange(self.canvas[axis]), min(self.radii[axis], self.canvas[axis])
        return Window(place - radius, place + radius)  # unclipped: the same everywhere


class Ball(Local):
    norm: str
    solid = False

    def allowed(self, grid: Grid, s: Ints, q: Ints, k: Ints) -> Bools:
        radius = min(self.radii[0], sum(self.canvas))  # no distance is larger
        power = 1 if self.norm == "manhattan" else 2
        pairs = zip(self._coordinates(q), self._coordinates(k), strict=True)
        near = sum((abs(at_q - at_k) ** power for at_q, at_k in pairs), 0) <= radius**power
        return near & (s >= 0)  # broadcasts to the full shape


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
    a border the window shifts rather than shrinks, so every query sees prod(kernel) keys, and
    prod(canvas) * prod(kernel) pairs are allowed; a causal axis of extent E and kernel K counts
    E * K - dilation * K(K - 1)/2 in place of E * K when its stride is 1.

    Masks of several dilations, joined by `|`, make a neighbourhood of several resolutions; `heads`
    and `layers` let dilations alternate, as DiNAT does (arXiv 2209.15001). An even kernel has one
    key more before the query than after it. The mask builds for
    prod(canvas) queries and keys, row by row.

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
    sequence, and blocks of prod(tile) tokens are full or empty: prod(window) full ones a row, when
    the tiles divide the canvas. Where they do not, the last tile of an axis is smaller.

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
