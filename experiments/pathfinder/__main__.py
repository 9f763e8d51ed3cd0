"""Statistics of generated Pathfinder images; docs/results/pathfinder.md has those of the release.

python -m experiments.pathfinder 'size=[32,64,128,256]' 'contour=[6,9,14]'
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd

from experiments.common.config import Checked, option
from experiments.common.program import program
from experiments.common.tables import aligned
from experiments.pathfinder.generate import Images, make
from experiments.pathfinder.geometry import spec
from experiments.pathfinder.kernels import DISTRACTORS, LABEL, RESTARTS


@dataclass
class Options(Checked):
    size: Any = option(128, "32, 64, 128 (Path-X), 256; several for statistics", several=int)
    contour: Any = option(14, "paddles of long snakes: 6 (easy), 9, 14 (hard)", several=int)
    strokes: float | None = option(None, "another size, whose paddles and marks are drawn")
    margins: Any = option(None, "pixels around paddles; images draw one of several", several=int)
    distractors: int | None = option(None, "how many are wanted")
    seed: int = option(0, "of the images", least=0)
    examples: int = option(1000, "images", least=1)


@program("pathfinder", Options, "experiments.pathfinder")
def main(options: Options, command: str) -> None:
    """Measure the images of every size and contour."""
    look = {name: getattr(options, name) for name in ("strokes", "margins", "distractors")}
    specs = [spec(size, c, **look) for size in options.size for c in options.contour]
    found = [
        {"size": s.size, "contour": s.contour} | measure(make(s, options.seed, 0, options.examples))
        for s in specs
    ]
    print(aligned(pd.DataFrame(found).map("{:.5g}".format)))


def measure(images: Images) -> dict[str, float]:
    """Return the mean and deviation of the grey levels, the pixels of an image above 0, the
    distractors placed in it, the share of label 1, the restarts of the two long snakes, and the
    standard errors of two of them.
    """
    pixels, info, n = images.pixels, images.info, len(images.pixels)
    means, lit = pixels.mean((1, 2)), np.count_nonzero(pixels, axis=(1, 2))
    return {
        "images": n,
        "mean": means.mean(),
        "mean error": means.std() / n**0.5,
        "std": pixels.std(),
        "non-zero": lit.mean(),
        "non-zero error": lit.std() / n**0.5,
        "distractors": info[:, DISTRACTORS].mean(),
        "positive": info[:, LABEL].mean(),
        "restarts": info[:, RESTARTS].mean(),
    }


if __name__ == "__main__":
    main()
