"""Draw learning curves, and accuracy against speed, of training runs, as PNG and SVG.

    python -m experiments.curves
    python -m experiments.curves 'runs=[runs/train/listops,runs/train/text]' out=docs/figures/lra

Each task has accuracy and loss by step and by time, one line a run; where some runs have a name=,
each name has a figure of its own. A last figure has test accuracy against training speed-up. Runs
that share a GPU take longer than alone: there speed=FILE takes the times of steps that the study
lra_speed measured.
"""

from dataclasses import dataclass
from typing import Any

from experiments.common.config import Checked, option
from experiments.common.program import program
from experiments.lra.cells import read_steps
from experiments.lra.curves import draw_all
from experiments.lra.runs import read_runs


@dataclass
class Options(Checked):
    runs: Any = option("runs/train", "folders, globs or archives of runs", several=str)
    speed: str | None = option(None, "rows of the study lra_speed, whose times are taken instead")
    out: str = option("runs/train/plots", "folder")


@program("curves", Options)
def main(options: Options, command: str) -> None:
    steps = read_steps(options.speed) if options.speed else None
    paths = draw_all(read_runs(options.runs), options.out, steps)
    print("\n".join(f"written: {path}" for path in paths))


if __name__ == "__main__":
    main()
