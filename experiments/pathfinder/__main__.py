"""Statistics and pictures of Pathfinder images.

python -m experiments.pathfinder 'size=[32,64,128,256]' statistics=true pictures=runs/pathfinder
"""

import time
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np

from experiments.common.config import check, option
from experiments.common.figures import with_palette
from experiments.common.files import write_whole
from experiments.common.program import program
from experiments.common.tables import aligned
from experiments.pathfinder.generate import Images, ends, make
from experiments.pathfinder.parameters import LEVELS, Spec, spec
from experiments.pathfinder.render import DISTRACTORS, LABEL, MARKERS, RESTARTS

matplotlib.use("Agg")
import matplotlib.pyplot as plt

COLOURS = ("tab:orange", "tab:cyan")
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
    statistics: bool = option(False, "true: print them beside those of the release")
    pictures: str | None = option(None, "folder to draw pathfinder-{size}.png in")

    def __post_init__(self) -> None:
        check(self)
        if not (self.pictures or self.statistics):
            raise ValueError("nothing to do: give statistics=true or pictures=FOLDER")


@program("pathfinder", Options, "experiments.pathfinder")
def main(options: Options, command: str) -> None:
    """Measure or draw the images of every size and contour."""
    names = ("strokes", "margins", "distractors")
    look = {name: getattr(options, name) for name in names}
    measured: dict[tuple[int, int], dict[str, float]] = {}
    for each in [spec(size, c, **look) for size in options.size for c in options.contour]:
        if options.pictures is not None:
            level = "" if len(options.contour) == 1 else f"-{each.contour}"
            path = Path(options.pictures) / f"pathfinder-{each.size}{level}.png"
            sheet(path, each, options.seed)
            print(path)
        if options.statistics:
            measured[each.size, each.contour] = _timed(each, options.seed, options.examples)
    if measured:
        print(table(measured))


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


def sheet(path: Path, spec: Spec, seed: int, columns: int = 4) -> None:
    """Write a picture of the first `columns` images of a seed for each label, plain and traced."""
    images = make(spec, seed, 0, 16 * columns)
    figure, axes = plt.subplots(4, columns, figsize=(2.2 * columns, 9.2), layout="constrained")
    for label in (0, 1):
        chosen = np.flatnonzero(images.info[:, LABEL] == label)[:columns]
        for column, image in enumerate(chosen):
            for row in (2 * label, 2 * label + 1):
                axis = axes[row, column]
                grey = {"cmap": "gray", "vmin": 0, "vmax": 255, "interpolation": "nearest"}
                axis.imshow(images.pixels[image], **grey)
                axis.set(xticks=[], yticks=[])
                if column == 0:
                    axis.set_ylabel(f"label {label}" + (", traced" if row % 2 else ""))
            _trace(axes[2 * label + 1, column], images, int(image), spec)
    figure.suptitle(f"Pathfinder-{spec.size}, contour {spec.contour}, seed {seed}")
    drawn = BytesIO()
    figure.savefig(drawn, dpi=110)
    plt.close(figure)
    write_whole(path, lambda file: file.write(with_palette(drawn, 48).getvalue()), "out")


def _trace(axis, images: Images, image: int, spec: Spec) -> None:
    placed = images.placed[image, : images.counts[image]]
    both = ends(images, spec)[image, : images.counts[image]]
    for snake, colour in enumerate(COLOURS):
        for start, end in both[placed[:, 0] == snake]:
            axis.plot([start[1], end[1]], [start[0], end[0]], color=colour, linewidth=1.5)
    markers = images.info[image, MARKERS : MARKERS + 4].reshape(2, 2)
    axis.plot(markers[:, 1], markers[:, 0], "o", color="red", fillstyle="none", markersize=9)


if __name__ == "__main__":
    main()
