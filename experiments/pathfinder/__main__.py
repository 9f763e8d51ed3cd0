"""Pathfinder images: folders in the format of the Long Range Arena, statistics, pictures.

python -m experiments.pathfinder size=128 examples=200000 out=lra_release
python -m experiments.pathfinder 'size=[32,64,128,256]' statistics=true pictures=runs/pathfinder
"""

import time
from pathlib import Path
from typing import Any

from experiments.common.checks import as_list, at_least_one, check_options
from experiments.common.program import program
from experiments.pathfinder.generate import check_seed, make
from experiments.pathfinder.official import write
from experiments.pathfinder.parameters import Spec, spec
from experiments.pathfinder.statistics import Statistics, measure, table


@program("pathfinder", module="experiments.pathfinder")
def main(options: dict[str, Any], command: str) -> None:
    """Write, measure or draw the images of every size and contour."""
    seed, examples = options["seed"], options["examples"]
    check_seed(seed)
    check_options(options, whole="examples workers", optional="workers")
    if not any(options[name] for name in ("out", "pictures", "statistics")):
        raise ValueError("nothing to do: give out=FOLDER, statistics=true or pictures=FOLDER")
    sizes, contours = as_list(options["size"]), as_list(options["contour"])
    look = {name: options[name] for name in ("documented", "strokes", "margins", "distractors")}
    at_least_one(options, "size contour")
    specs = [spec(size, contour, **look) for size in sizes for contour in contours]
    measured: dict[tuple[int, int], Statistics] = {}
    for each in specs:
        if options["out"] is not None:
            print(write(Path(options["out"]), each, seed, examples, options["workers"]))
        if options["pictures"] is not None:
            from experiments.pathfinder.draw import sheet

            level = "" if len(contours) == 1 else f"-{each.contour}"
            path = Path(options["pictures"]) / f"pathfinder-{each.size}{level}.png"
            sheet(path, each, seed)
            print(path)
        if options["statistics"]:
            measured[each.size, each.contour] = _timed(each, seed, examples)
    if measured:
        print(table(measured))


def _timed(each: Spec, seed: int, n: int) -> Statistics:
    make(each, seed, 0, 1)  # tables and compilation
    start = time.process_time()
    images = make(each, seed, 0, n)
    rate = n / (time.process_time() - start) * 60
    print(f"Pathfinder-{each.size}, {each.contour}: {rate:.0f} images a minute and core")
    return measure(images)


if __name__ == "__main__":
    main()
