"""A sheet of images of both labels, as they are and with their two long snakes in colour."""

from io import BytesIO
from pathlib import Path

import matplotlib
import numpy as np

from experiments.common.figures import with_palette
from experiments.common.files import write_whole
from experiments.pathfinder.generate import Images, ends, make
from experiments.pathfinder.parameters import Spec
from experiments.pathfinder.render import LABEL, MARKERS

matplotlib.use("Agg")
import matplotlib.pyplot as plt

COLOURS = ("tab:orange", "tab:cyan")


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
