"""Windows on a canvas that end at its borders, and the lines through a token."""

from dataclasses import dataclass
from functools import reduce
from operator import or_

import numpy as np

from masks.algebra import Mask
from masks.checks import choice
from masks.patterns.canvas import OnCanvas, Window, canvas_extents, per_axis, plain
from masks.runs import Bools, Grid, Ints
from masks.spec import call_text, pattern

NORMS = ("chebyshev", "manhattan", "euclidean")


@pattern()
def local_2d(
    canvas: tuple[int, ...], radius: int | tuple[int, ...], *, norm: str = "chebyshev"
) -> Mask:
    """The tokens within `radius` of the query on a line, an image or a video.

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
    radii = per_axis("radius", radius, canvas, least=0)
    norm = choice("norm", norm, NORMS)
    if norm != "chebyshev" and len(set(radii)) > 1:
        raise ValueError(f"radius is {radius!r}: give one integer for the norm {norm!r}")
    key = call_text("local_2d", canvas, plain(radii), norm=(norm, "chebyshev"))
    return Local(key, canvas, radii) if norm == "chebyshev" else Ball(key, canvas, radii, norm)


@pattern()
def axial(canvas: tuple[int, ...]) -> Mask:
    """The tokens on the lines through the query along each axis (arXiv 1912.12180).

    Key and query differ along one axis at most: the same row or the same column of an image. Every
    query sees sum(canvas) - len(canvas) + 1 keys. It is the union of `local_2d` masks of radius 0
    along all axes but one.
    """
    canvas = canvas_extents(canvas)
    radii = np.diag(np.array(canvas) - 1).tolist()
    return reduce(or_, [local_2d(canvas, tuple(line)) for line in radii])


@dataclass(frozen=True, repr=False, eq=False)
class Local(OnCanvas):
    radii: tuple[int, ...]

    def window(self, axis: int) -> Window:
        place, radius = np.arange(self.canvas[axis]), min(self.radii[axis], self.canvas[axis])
        return Window(place - radius, place + radius)  # unclipped: the same everywhere


@dataclass(frozen=True, repr=False, eq=False)
class Ball(Local):
    norm: str
    solid = False

    def allowed(self, grid: Grid, s: Ints, q: Ints, k: Ints) -> Bools:
        radius = min(self.radii[0], sum(self.canvas))  # no distance is larger
        power = 1 if self.norm == "manhattan" else 2
        pairs = zip(self._coordinates(q), self._coordinates(k), strict=True)
        near = sum((abs(at_q - at_k) ** power for at_q, at_k in pairs), 0) <= radius**power
        return near & (s >= 0)  # of the shape asked for
