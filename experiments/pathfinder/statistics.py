"""Statistics of generated images beside those of the Long Range Arena release."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from experiments.common.tables import aligned
from experiments.pathfinder.generate import Images
from experiments.pathfinder.parameters import LEVELS
from experiments.pathfinder.render import DISTRACTORS, LABEL, RESTARTS


@dataclass(frozen=True)
class Statistics:
    """Statistics of a set of images. None: unknown."""

    images: int
    mean: float | None = None  # grey level over all pixels
    std: float | None = None
    non_zero: float | None = None  # pixels of an image
    distractors: float | None = None  # placed in an image
    positive: float | None = None  # share of label 1
    restarts: float | None = None  # of the pair of long snakes, per image
    mean_error: float | None = None  # one standard error of `mean`
    non_zero_error: float | None = None


# Of the release: 32 in the notebooks of Zakaria-El-Maachi/LRA-Pathfinder; 64 and 128 from the eight
# images each that tsumansapkota/Solving-LRA-PathX shows, taken apart into their paddles; 256
# counted in one image of NasonovIvan/Pathfinder-Listops.
OFFICIAL = {
    (32, 6): Statistics(199_999, 11.79, 40.16),
    (32, 9): Statistics(200_000, 15.55, 44.50, positive=100_222 / 200_000),
    (32, 14): Statistics(200_000, 19.95, 48.66, 395, positive=99_920 / 200_000),
    (64, 14): Statistics(8, 16.15, 44.32, 1091, 5.5, mean_error=0.43, non_zero_error=25),
    (128, 14): Statistics(8, 9.43, 36.12, 2640, 15.0, mean_error=0.32, non_zero_error=75),
    (256, 14): Statistics(1, distractors=7),
}


def measure(images: Images) -> Statistics:
    pixels, info, n = images.pixels, images.info, len(images.pixels)
    means = pixels.mean((1, 2))
    non_zero = np.count_nonzero(pixels, axis=(1, 2))
    return Statistics(
        n,
        float(means.mean()),
        float(pixels.std()),
        float(non_zero.mean()),
        float(info[:, DISTRACTORS].mean()),
        float(info[:, LABEL].mean()),
        float(info[:, RESTARTS].mean()),
        float(means.std() / n**0.5),
        float(non_zero.std() / n**0.5),
    )


def table(measured: dict[tuple[int, int], Statistics]) -> str:
    """Return a table by (size, contour) of the generator, and of the release where known."""
    head = "size level source images mean std non-zero distractors positive restarts"
    lines: list[Sequence[str]] = [head.split()]
    for (size, contour), ours in measured.items():
        for source, row in (("generated", ours), ("official", OFFICIAL.get((size, contour)))):
            if row is not None:
                lines.append([str(size), LEVELS[contour], source, *_cells(row)])
    return aligned(lines, left=(1, 2))


def _cells(row: Statistics) -> list[str]:
    return [
        str(row.images),
        _text(row.mean, 2, row.mean_error),
        _text(row.std, 2),
        _text(row.non_zero, 0, row.non_zero_error),
        _text(row.distractors, 2),
        _text(row.positive, 3),
        _text(row.restarts, 0),
    ]


def _text(value: float | None, digits: int, error: float | None = None) -> str:
    if value is None:
        return ""
    return f"{value:.{digits}f}" + ("" if error is None else f"±{error:.{digits}f}")
