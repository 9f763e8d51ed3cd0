"""Parameters of the four Pathfinder releases of the Long Range Arena.

The documented values are from google-research/long-range-arena, lra_benchmarks/data/pathfinder.py.
The released images have another number of distractors, and `spec` returns the one that they show.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from experiments.common.config import as_list, whole_number

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

    @property
    def level(self) -> str:
        return LEVELS[self.contour]


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
    if type(size) is not int or size not in _GEOMETRY:
        raise ValueError(f"Pathfinder of size {size}: choose from {', '.join(map(str, SIZES))}")
    if type(contour) is not int or contour not in LEVELS:
        raise ValueError(
            f"contour={contour}: choose from {', '.join(map(str, LEVELS))} (easy to hard)"
        )
    own = Spec(size, contour, *_GEOMETRY[size], _DISTRACTORS[size][contour])
    if margins is not None:
        given, most = as_list(margins), max(own.margins)
        for margin in given or [margins]:
            if type(margin) is not int or not 1 <= margin <= most:
                raise ValueError(f"margins={margins!r}: images of {size} take 1 to {most} pixels")
        own = replace(own, margins=tuple(sorted(set(given))))
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
    if isinstance(strokes, bool) or not isinstance(strokes, int | float):
        raise ValueError(f"strokes={strokes!r}: give a size, or a number between two")
    length = _GEOMETRY[size][0]
    alike = [other for other in SIZES if _GEOMETRY[other][0] == length]
    if not alike[0] <= strokes <= alike[-1]:
        choices = f"{alike[0]}" if len(alike) == 1 else f"{alike[0]} to {alike[-1]}"
        raise ValueError(
            f"strokes={strokes}: images of size {size} can have those of {choices}, "
            f"which share paddles of {length} pixels"
        )
    below = max(other for other in alike if other <= strokes)
    above = min(other for other in alike if other >= strokes)
    return below, above, (strokes - below) / (above - below) if above > below else 0.0
