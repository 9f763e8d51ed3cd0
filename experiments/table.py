"""Print the Long Range Arena table of training runs.

    python -m experiments.table
    python -m experiments.table 'runs=[runs/train,other/*/train]'
    python -m experiments.table runs=runs/train/image archive=docs/results/lra/runs/image.jsonl.gz

Runs are folders of experiments.train, or archives of them. See docs/guide/lra.md.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from experiments.common.config import Checked, option
from experiments.common.program import program
from experiments.lra.cells import read_steps
from experiments.lra.runs import read_runs, write_archive
from experiments.lra.table import Table


@dataclass
class Options(Checked):
    runs: Any = option("runs/train", "folders, globs or archives of runs", several=str)
    speed: str | None = option(None, "rows of the study lra_speed, whose times are taken instead")
    archive: str | None = option(None, "a file to write the runs into, one compact line each")


@program("table", Options)
def main(options: Options, command: str) -> None:
    runs = read_runs(options.runs)
    steps = read_steps(options.speed) if options.speed else None
    print(Table(runs, steps).text())
    if options.archive:
        write_archive(runs, Path(options.archive))
        print(f"written: {options.archive}")


if __name__ == "__main__":
    main()
