"""Statistics and pictures of Pathfinder images.

python -m experiments.pathfinder 'size=[32,64,128,256]' statistics=true pictures=runs/pathfinder
"""

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from experiments.common.config import check, option
from experiments.common.program import program
from experiments.pathfinder.generate import make
from experiments.pathfinder.look import measure, sheet, table
from experiments.pathfinder.parameters import Spec, spec


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


if __name__ == "__main__":
    main()
