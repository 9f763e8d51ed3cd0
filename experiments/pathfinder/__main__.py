"""Statistics of Pathfinder images, beside those of the release.

python -m experiments.pathfinder 'size=[32,64,128,256]' 'contour=[6,9,14]'
"""

import time
from dataclasses import dataclass
from typing import Any

import numpy as np

from experiments.common.config import check, option
from experiments.common.program import program
from experiments.common.tables import aligned
from experiments.pathfinder.generate import Images, make
from experiments.pathfinder.geometry import LEVELS, Spec, spec
from experiments.pathfinder.kernels import DISTRACTORS, LABEL, RESTARTS

# The statistics: mean and deviation of the grey levels, pixels of an image above 0, distractors
# placed in it, share of label 1, restarts of the two long snakes; a standard error of two of them.
DIGITS = {"mean": 2, "std": 2, "non-zero": 0, "distractors": 2, "positive": 3, "restarts": 0}
# Of the release: 32 in the notebooks of Zakaria-El-Maachi/LRA-Pathfinder; 64 and 128 from the eight
# images each that tsumansapkota/Solving-LRA-PathX shows, taken apart into their paddles; 256
# counted in one image of NasonovIvan/Pathfinder-Listops.
OFFICIAL: dict[tuple[int, int], dict[str, float]] = {
    (32, 6): {"images": 199_999, "mean": 11.79, "std": 40.16},
    (32, 9): {"images": 200_000, "mean": 15.55, "std": 44.50, "positive": 100_222 / 200_000},
    (32, 14): {
        "images": 200_000, "mean": 19.95, "std": 48.66, "non-zero": 395,
        "positive": 99_920 / 200_000,
    },
    (64, 14): {
        "images": 8, "mean": 16.15, "std": 44.32, "non-zero": 1091, "distractors": 5.5,
        "mean error": 0.43, "non-zero error": 25,
    },
    (128, 14): {
        "images": 8, "mean": 9.43, "std": 36.12, "non-zero": 2640, "distractors": 15.0,
        "mean error": 0.32, "non-zero error": 75,
    },
    (256, 14): {"images": 1, "distractors": 7},
}  # fmt: skip


@dataclass
class Options:
    size: Any = option(128, "32, 64, 128 (Path-X), 256; several for statistics", several=int)
    contour: Any = option(14, "paddles of long snakes: 6 (easy), 9, 14 (hard)", several=int)
    strokes: float | None = option(None, "another size, whose paddles and marks are drawn")
    margins: Any = option(None, "pixels around paddles; images draw one of several", several=int)
    distractors: int | None = option(None, "how many are wanted")
    seed: int = option(0, "of the images", least=0)
    examples: int = option(1000, "images", least=1)

    def __post_init__(self) -> None:
        check(self)


@program("pathfinder", Options, "experiments.pathfinder")
def main(options: Options, command: str) -> None:
    """Measure the images of every size and contour."""
    look = {name: getattr(options, name) for name in ("strokes", "margins", "distractors")}
    specs = [spec(size, c, **look) for size in options.size for c in options.contour]
    pairs = {(s.size, s.contour): _timed(s, options.seed, options.examples) for s in specs}
    print(table(pairs))


def _timed(each: Spec, seed: int, n: int) -> dict[str, float]:
    make(each, seed, 0, 1)  # tables and compilation
    start = time.process_time()
    images = make(each, seed, 0, n)
    rate = n / (time.process_time() - start) * 60
    print(f"Pathfinder-{each.size}, {each.contour}: {rate:.0f} images a minute and core")
    return measure(images)


# ---- how images look


def measure(images: Images) -> dict[str, float]:
    """Return the statistics of images by name."""
    pixels, info, n = images.pixels, images.info, len(images.pixels)
    means, lit = pixels.mean((1, 2)), np.count_nonzero(pixels, axis=(1, 2))
    return {
        "images": n,
        "mean": means.mean(),
        "std": pixels.std(),
        "non-zero": lit.mean(),
        "distractors": info[:, DISTRACTORS].mean(),
        "positive": info[:, LABEL].mean(),
        "restarts": info[:, RESTARTS].mean(),
        "mean error": means.std() / n**0.5,
        "non-zero error": lit.std() / n**0.5,
    }


def table(measured: dict[tuple[int, int], dict[str, float]]) -> str:
    """Return a table by (size, contour) of the generator, and of the release where known."""
    lines: list[Any] = [["size", "level", "source", "images", *DIGITS]]
    for key, ours in measured.items():
        for source, row in (("generated", ours), ("official", OFFICIAL.get(key))):
            if row is not None:
                cells = [_text(row, name, digits) for name, digits in DIGITS.items()]
                lines.append([str(key[0]), LEVELS[key[1]], source, str(row["images"]), *cells])
    return aligned(lines, left=(1, 2))


def _text(row: dict[str, float], name: str, digits: int) -> str:
    if name not in row:
        return ""
    error = row.get(f"{name} error")
    return f"{row[name]:.{digits}f}" + ("" if error is None else f"±{error:.{digits}f}")


if __name__ == "__main__":
    main()
