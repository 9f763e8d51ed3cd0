"""Pathfinder images: folders in the format of the Long Range Arena, statistics, pictures.

python -m experiments.pathfinder size=128 examples=200000 out=lra_release
python -m experiments.pathfinder 'size=[32,64,128,256]' statistics=true pictures=runs/pathfinder
"""

import sys
import time
from pathlib import Path

import hydra
from omegaconf import DictConfig, ListConfig

from experiments.pathfinder.generate import check_seed, make
from experiments.pathfinder.official import write
from experiments.pathfinder.parameters import Spec, spec
from experiments.pathfinder.statistics import Statistics, measure, table


def main(config: DictConfig) -> None:
    check_seed(config.seed)
    if config.examples < 1:
        raise ValueError(f"examples={config.examples}: give at least 1")
    if config.out is None and config.pictures is None and not config.statistics:
        raise ValueError("nothing to do: give out=FOLDER, statistics=true or pictures=FOLDER")
    sizes, contours = _list(config.size), _list(config.contour)
    specs = [spec(s, c, documented=config.documented) for s in sizes for c in contours]
    measured: dict[tuple[int, int], Statistics] = {}
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
    if measured:
        print(table(measured))


def _timed(each: Spec, seed: int, n: int) -> Statistics:
    make(each, seed, 0, 1)  # tables and compilation
    start = time.process_time()
    images = make(each, seed, 0, n)
    rate = n / (time.process_time() - start) * 60
    print(f"Pathfinder-{each.size}, {each.contour}: {rate:.0f} images a minute and core")
    return measure(images)


def _list(value: int | ListConfig) -> list[int]:
    return list(value) if isinstance(value, ListConfig) else [value]


@hydra.main(version_base="1.3", config_path="../conf", config_name="pathfinder")
def entry(config: DictConfig) -> None:
    try:
        main(config)
    except ValueError as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    entry()
