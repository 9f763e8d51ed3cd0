"""Parameters of the four Pathfinder releases of the Long Range Arena, and tables made of them.

The documented values are from google-research/long-range-arena, lra_benchmarks/data/pathfinder.py.
The released images have another number of distractors, and `spec` returns the one that they show.

The tables depend only on shapes, and are computed once per size and margin. Pathfinder is
translation invariant: a paddle looks the same wherever its first end lies. It has few directions: K
cells of a ring around the pivot (growth), and 360 whole degrees (seeds). The tables hold a drawn
patch and all offsets for each of these K + 360, so growing a snake is a look-up. Rows go down,
columns to the right, and direction a goes (sin a, cos a). Places are rounded as in the original: up
after a translation, down for the ring.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw
from scipy.ndimage import grey_dilation

from experiments.common.config import as_list, choose, whole_number

Ints = NDArray[np.int64]
Floats = NDArray[np.float32]
Cells = NDArray[np.uint32]
Ends = NDArray[np.uint64]
T = TypeVar("T", bound=np.generic)
DEGREES = np.arange(-180, 180) * (np.pi / 180)
INSIDE = 1024  # an arbitrary place inside the image: offsets are rounded where they are used
LEVELS = {6: "curv_baseline", 9: "curv_contour_length_9", 14: "curv_contour_length_14"}
ANTIALIAS = 2  # lines and disks are drawn this much larger and scaled down by Lanczos
DRAWS = 3  # attempts to place a seed or a paddle before the snake is dropped
COLLISION = 1.8  # the sum of two masks, which are about 1 inside, that a new paddle must not reach
TAKEN = 0.3  # the mask of a cell from which a seed must not lie on it
DEAD_END = 1e-4  # the sum of the weights of all turns
SNAKE_DRAWS = 5  # attempts to place a distractor before it is left out


@dataclass(frozen=True)
class Spec:
    """Lengths in pixels."""

    size: int
    contour: int  # paddles of each of the two long snakes
    length: int  # of a paddle
    thickness: float  # of a paddle
    margins: tuple[int, ...]  # room left around paddles; drawn per image
    marker_radius: float
    seed_distance: int  # between the first paddles of the two snakes
    continuity: float  # how straight snakes are
    padding: int  # of the image, kept free
    contrast: float  # of the two long snakes beside distractors
    distractors: int  # wanted; those without room are left out

    @property
    def distractor_length(self) -> int:
        return self.contour // 3


#                   length thickness margins radius seeds continuity padding contrast
_GEOMETRY: dict[int, tuple[int, float, tuple[int, ...], float, int, float, int, float]] = {
    32: (2, 0.5, (1,), 1.5, 7, 1.0, 1, 0.75),
    64: (5, 1.0, (1,), 2.5, 12, 1.8, 1, 1.0),
    128: (5, 1.5, (2, 3), 3.0, 20, 1.8, 1, 1.0),
    256: (5, 2.0, (3,), 5.0, 27, 1.8, 22, 1.0),
}
# How many distractors were wanted at each contour. The release has the documented number of contour
# 6 at all contours, as its statistics at size 32 and its images of contour 14 at 64 and 128 show.
# An image of contour 14 at 256 shows that contour's own number.
_DISTRACTORS = {
    32: {6: 10, 9: 10, 14: 10},
    64: {6: 11, 9: 11, 14: 11},
    128: {6: 17, 9: 17, 14: 17},
    256: {6: 15, 9: 10, 14: 7},
}
SIZES = tuple(_GEOMETRY)
STROKES = ("thickness", "marker_radius")  # the fields of strokes


def spec(
    size: int,
    contour: int = 14,
    *,
    strokes: float | None = None,
    margins: int | Sequence[int] | None = None,
    distractors: int | None = None,
) -> Spec:
    """Return the parameters of a release (32, 64, 128, 256) and level (contour 6, 9, 14).

    strokes: another size that gives the thickness of paddles and the marks. A number between two
        sizes interpolates. A model can so learn on small images the strokes of large ones.
    margins: pixels around paddles, drawn per image, at most those of the release. Contours have
        gaps of twice as many.
    distractors: how many are wanted. Both make easier images than the release's, for curricula
        (Dimension Mixer, arXiv 2311.18735).

    Raises ValueError for another size or contour, and for a value out of range.
    """
    choose("size", size, SIZES)
    choose("contour", contour, LEVELS)
    own = Spec(size, contour, *_GEOMETRY[size], _DISTRACTORS[size][contour])
    if margins is not None:
        given, most = set(as_list(margins)), max(own.margins)
        if not given or not given <= {*range(1, most + 1)}:
            raise ValueError(f"margins={margins!r}: images of {size} take 1 to {most} pixels")
        own = replace(own, margins=tuple(sorted(given)))
    if distractors is not None:
        whole_number("distractors", distractors, least=0)
        own = replace(own, distractors=distractors)
    if strokes is None:
        return own
    below, above, share = _between(size, strokes)
    low, high = (spec(each, contour) for each in (below, above))
    values = {n: (1 - share) * getattr(low, n) + share * getattr(high, n) for n in STROKES}
    return replace(own, **values)


def _between(size: int, strokes: float) -> tuple[int, int, float]:
    """Return the sizes below and above `strokes`, and its place between them, 0 to 1."""
    length = _GEOMETRY[size][0]
    alike = [other for other in SIZES if _GEOMETRY[other][0] == length]
    if not alike[0] <= strokes <= alike[-1]:
        raise ValueError(
            f"strokes={strokes}: images of size {size} take {alike[0]} to {alike[-1]}, which share "
            f"paddles of {length} pixels"
        )
    below = max(other for other in alike if other <= strokes)
    above = min(other for other in alike if other >= strokes)
    return below, above, (strokes - below) / (above - below) if above > below else 0.0


# ---- tables


class Tables(NamedTuple):
    """E = K + 360 directions, ring first. Patches are centred on the end that a paddle starts from:
    the tail of a seed, the head (the new end) of a grown one.

    Lists of cells are offsets in an image with `half` more pixels on every side, flat, from the
    first corner of what they belong to; unsigned, which spares numba a test per index. Those of
    direction e are start[e] to start[e + 1].
    """

    half: int  # patches are 2 half + 1 wide
    stroke: Floats  # (E, P, P) the paddle as drawn, 1 inside
    mask_start: Ends  # (E + 1,) the paddle with its margin: cells above 0,
    mask_solid: Ends  # (E,) and where those end that are so much that they may collide
    mask_cell: Cells  # (cells,) from the corner of the patch
    mask_value: NDArray[np.float64]  # (cells,)
    disk: Cells  # (cells,) of the margin as a radius, from the corner of its square
    margin: int
    step: NDArray[np.float64]  # (E, 2) from a pivot to the next, to be rounded up
    ring: Ints  # (K, 2) from the pivot to the new head, in the order of rows and columns
    turn_start: Ends  # (E + 1,) ring cells a snake going in direction e may turn to:
    turn: Ints  # (turns,)
    turn_weight: NDArray[np.float64]  # (turns,)
    usable: NDArray[np.bool_]  # (360,) seed directions that OpenCV's dilation leaves
    head: NDArray[np.float64]  # (360, 2) from the tail of a seed to its head, to be rounded up
    pivot: NDArray[np.float64]  # (360, 2) and from there to its pivot
    foot_start: Ends  # (361,) cells that must be free around the tail of a seed:
    foot: Cells  # (cells,) from the corner of the patch
    foot_box: Ints  # (360, 4) their first and last row, first and last column, from the tail
    second: Ints  # (360, 2) from the first seed's tail to the second's, by the direction between
    border: NDArray[np.float64]  # (W * W,) mask of an empty image with `half` more pixels around
    reach: int  # pixels a marker covers, on each side of its centre
    marker: Floats  # (R, R, R, R), R = 2 reach + 1: rows and columns of the centre in a window


@lru_cache(maxsize=32)
def tables(spec: Spec, margin: int) -> Tables:
    """Depends on the geometry of `spec` only."""
    length, full = spec.length, spec.length + margin
    half = length + int(np.ceil(spec.thickness)) + margin
    width = spec.size + 2 * half
    ring = _ring(full)
    angles = np.concatenate([[math.atan2(*way) for way in ring.tolist()], DEGREES])
    drawn = np.concatenate([_flip(angles[: len(ring)]), DEGREES])
    stroke, mask = _patches(spec, margin, half, drawn)

    # A cell of two masks with less than COLLISION - max in one of them cannot collide.
    least = COLLISION - mask.max()
    cells, values, solid = [], [], []
    for patch in mask:
        at = np.argwhere(patch > 0)
        value = patch[tuple(at.T)]
        order = np.argsort(value < least, kind="stable")
        cells.append(at[order] @ (width, 1))
        values.append(value[order])
        solid.append(np.count_nonzero(value >= least))
    mask_start = _starts(cells)
    turns = [_turns(angle, angles[: len(ring)], spec.continuity) for angle in angles]
    second = np.round(_vector(spec.seed_distance, np.arange(360) * (np.pi / 180)))
    feet = [_footprint(patch, half, full) for patch in mask[len(ring) :]]
    border = np.zeros((width, width))
    image = border[half:-half, half:-half]
    image[:] = 1
    image[spec.padding : -spec.padding, spec.padding : -spec.padding] = 0
    reach, marker = _marker(spec.marker_radius)
    return Tables(
        half=half,
        stroke=stroke,
        mask_start=mask_start,
        mask_solid=mask_start[:-1] + np.array(solid, np.uint64),
        mask_cell=_join(cells, np.uint32),
        mask_value=_join(values, np.float64),
        disk=(np.argwhere(_disk(margin)) @ (width, 1)).astype(np.uint32),
        margin=margin,
        step=_vector(full + margin, angles),
        ring=ring,
        turn_start=_starts([turn for turn, _ in turns]),
        turn=_join([turn for turn, _ in turns], np.int64),
        turn_weight=_join([weight for _, weight in turns], np.float64),
        usable=np.array([_in_all_quadrants(foot) for foot in feet]),
        head=_vector(length, DEGREES),
        pivot=_vector(full, _flip(DEGREES)),
        foot_start=_starts(feet),
        foot=_join([(foot + half) @ (width, 1) for foot in feet], np.uint32),
        foot_box=np.array([np.stack([foot.min(0), foot.max(0)], 1).ravel() for foot in feet]),
        second=second.astype(np.int64),
        border=border.ravel(),
        reach=reach,
        marker=marker,
    )


def _vector(distance: float, angles: np.ndarray) -> np.ndarray:
    """With the last bit of the C library, as in the original. NumPy's depends on the processor, and
    a way is rounded up."""
    return distance * np.array([(math.sin(angle), math.cos(angle)) for angle in angles])


def _flip(angles: np.ndarray) -> np.ndarray:
    return np.where(angles < 0, angles + np.pi, angles - np.pi)


def _ring(radius: int) -> Ints:
    """Cells of a circle, one an arc of a pixel."""
    angles = np.arange(0, 360, 360 / (2 * np.pi * radius)) * (np.pi / 180)
    cells = np.floor(INSIDE + _vector(radius, angles)).astype(np.int64) - INSIDE
    return np.unique(cells, axis=0)


def _turns(angle: float, ring: np.ndarray, continuity: float) -> tuple[np.ndarray, np.ndarray]:
    apart = np.abs(ring - angle)
    apart = np.minimum(np.minimum(apart, 2 * np.pi - apart) * continuity, np.pi / 2)
    weights = np.maximum(np.cos(apart), 0) ** 2
    turn = np.nonzero(weights > 1e-30)[0]
    return turn, weights[turn]


def _patches(
    spec: Spec, margin: int, half: int, angles: np.ndarray
) -> tuple[Floats, NDArray[np.float64]]:
    """Paddles drawn from the centre, and their masks.

    Paddles keep the overshoot of the Lanczos filter, and an image takes a maximum, which drops
    values below 0. Masks are scaled as whole numbers from 0 to 255.
    """
    scale, centre = ANTIALIAS, half * ANTIALIAS
    canvas = []
    for way in _vector(spec.length * scale, angles):
        image = Image.new("F", (2 * centre + 1, 2 * centre + 1))
        y, x = np.ceil(centre + way).astype(int).tolist()
        line = [(centre, centre), (x, y)]
        ImageDraw.Draw(image).line(line, fill=255, width=round(spec.thickness * scale))
        canvas.append(np.asarray(image))
    lines = np.stack(canvas)
    disk = _disk(margin * scale)[None]
    wide = np.asarray(grey_dilation(lines, footprint=disk, mode="constant"), np.uint8)
    width = 2 * half + 1
    stroke = np.stack([_lanczos(image, width) for image in lines]).astype(np.float32) / 255
    mask = np.stack([_lanczos(image, width) for image in wide]) / 255
    return stroke.clip(0), mask


def _lanczos(image: np.ndarray, width: int) -> np.ndarray:
    return np.asarray(Image.fromarray(image).resize((width, width), Image.Resampling.LANCZOS))


def _disk(radius: int) -> np.ndarray:
    y, x = np.ogrid[-radius : radius + 1, -radius : radius + 1]
    return y * y + x * x <= radius * radius


def _footprint(mask: np.ndarray, half: int, full: int) -> np.ndarray:
    """Cells of a seed's mask in a box of 2 full + 1 that has the tail beside its centre."""
    cells = np.argwhere(mask >= 1) - half
    return cells[(np.abs(cells + 1) <= full).all(1)] + 1


def _in_all_quadrants(cells: np.ndarray) -> bool:
    """Whether the original keeps a direction.

    OpenCV's dilation is -inf if a footprint has no cell in the image, and the original drops such a
    direction. With a small L that happens in a corner for most directions.
    """
    signs = np.array([[1, 1], [1, -1], [-1, 1], [-1, -1]])
    return all(((cells * sign) >= 0).all(1).any() for sign in signs)


def _marker(radius: float) -> tuple[int, Floats]:
    """Disks at every place of a window.

    Places before the middle are for markers near the edge of the image, where the filter averages
    fewer pixels. Further inside, all markers look like the middle one.
    """
    reach = int(np.ceil(radius)) + 3  # Lanczos reaches three pixels
    width = 2 * reach + 1
    y, x = np.ogrid[: width * ANTIALIAS, : width * ANTIALIAS]
    disks = np.empty((width, width, width, width), np.float32)
    for i, j in np.ndindex(width, width):
        inside = (y - i * ANTIALIAS) ** 2 + (x - j * ANTIALIAS) ** 2 <= (radius * ANTIALIAS) ** 2
        disks[i, j] = _lanczos(inside.astype(np.float32), width)
    return reach, np.maximum(disks, 0)


def _starts(parts: Sequence[np.ndarray]) -> Ends:
    return np.cumsum([0, *map(len, parts)]).astype(np.uint64)


def _join(parts: Sequence[np.ndarray], dtype: type[T]) -> NDArray[T]:
    return np.concatenate(parts).astype(dtype)
