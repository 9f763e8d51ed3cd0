"""Draw learning curves, and accuracy against speed, of training runs, as PNG and SVG.

    python -m experiments.curves
    python -m experiments.curves 'runs=[runs/train/listops,runs/train/text]' out=docs/figures/lra

Each task has accuracy and loss by step and by time, one line a run. A last figure has test
accuracy against training speed-up. Runs are folders of experiments.train, or archives.
Runs that share a GPU take longer than alone: speed=FILE takes the times of steps that the study
lra_speed measured.
"""

from typing import Any

from experiments.common.checks import as_list, share
from experiments.common.program import program
from experiments.common.rows import read
from experiments.lra.curves import draw_all
from experiments.lra.runs import read_runs


@program("curves")
def main(options: dict[str, Any], command: str) -> None:
    share("smooth", options["smooth"])
    steps = read(options["speed"]) if options["speed"] else None
    runs = read_runs(as_list(options["runs"]))
    paths = draw_all(runs, options["out"], options["smooth"], steps)
    print("\n".join(f"written: {path}" for path in paths))


if __name__ == "__main__":
    main()
