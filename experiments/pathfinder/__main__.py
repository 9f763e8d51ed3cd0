"""Pathfinder images: folders in the format of the Long Range Arena, statistics, pictures.

python -m experiments.pathfinder size=128 examples=200000 out=lra_release
python -m experiments.pathfinder 'size=[32,64,128,256]' statistics=true pictures=runs/pathfinder
python -m experiments.pathfinder 'size=[32,128]' 'contour=[6,14]' shortcuts=true examples=10000
"""

import time
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, ListConfig

from experiments.common.program import program
from experiments.pathfinder import shortcuts
from experiments.pathfinder.generate import check_seed, make
from experiments.pathfinder.official import write
from experiments.pathfinder.parameters import Spec, spec
from experiments.pathfinder.statistics import Statistics, measure, table


def main(config: DictConfig) -> None:
    check_seed(config.seed)
    if config.examples < 1:
        raise ValueError(f"examples={config.examples}: give at least 1")
    if not (config.out or config.pictures or config.statistics or config.shortcuts):
        raise ValueError(
            "nothing to do: give out=FOLDER, statistics=true, shortcuts=true or pictures=FOLDER"
        )
    if config.shortcuts and config.examples < 100:
        raise ValueError(f"examples={config.examples}: shortcuts are fitted, give 100 or more")
    sizes, contours = _list(config.size), _list(config.contour)
    options = {"documented": config.documented, "strokes": config.strokes}
    specs = [spec(s, c, **options) for s in sizes for c in contours]
    measured: dict[tuple[int, int], Statistics] = {}
    short: dict[tuple[int, int], list[float]] = {}
    for each in specs:
        if config.out is not None:
            print(write(Path(config.out), each, config.seed, config.examples, config.workers))
        if config.pictures is not None:
            from experiments.pathfinder.draw import sheet

            level = "" if len(contours) == 1 else f"-{each.contour}"
            path = Path(config.pictures) / f"pathfinder-{each.size}{level}.png"
            sheet(path, each, config.seed)
            print(path)
        if config.statistics:
            measured[each.size, each.contour] = _timed(each, config.seed, config.examples)
        if config.shortcuts:
            short[each.size, each.contour] = shortcuts.shortcuts(each, config.seed, config.examples)
    if measured:
        print(table(measured))
    if short:
        print(shortcuts.table(short))


def _timed(each: Spec, seed: int, n: int) -> Statistics:
    make(each, seed, 0, 1)  # tables and compilation
    start = time.process_time()
    images = make(each, seed, 0, n)
    rate = n / (time.process_time() - start) * 60
    print(f"Pathfinder-{each.size}, {each.contour}: {rate:.0f} images a minute and core")
    return measure(images)


def _list(value: int | ListConfig) -> list[int]:
    return list(value) if isinstance(value, ListConfig) else [value]


@program("pathfinder", module="experiments.pathfinder")
def entry(options: dict[str, Any], command: str) -> None:
    main(DictConfig(options))


if __name__ == "__main__":
    entry()
