"""Draw what experiments.speed measured, from its rows alone, as PNG and SVG.

    python -m experiments.plot rows=runs/speed/speed.jsonl out=runs/speed/plots

Two kinds of figure: speed-up against sparsity, and time against length.
"""

from dataclasses import dataclass
from pathlib import Path

from experiments.bench.plot import draw_speed
from experiments.bench.run import KEY
from experiments.bench.tables import newest
from experiments.common.config import Checked, option
from experiments.common.figures import save, style
from experiments.common.program import program
from experiments.common.rows import read


@dataclass
class Options(Checked):
    rows: str = option("runs/speed/speed.jsonl", "of experiments.speed")
    out: str = option("runs/speed/plots", "folder")
    unstable: bool = option(True, "false: leave out cells whose rounds differ by more than 15 %")


@program("plot", Options)
def main(options: Options, command: str) -> None:
    """Draw the figures and print their paths."""
    path = options.rows
    rows = [row for row in newest(read(path, "python -m experiments.speed", KEY)) if row.ok]
    shaky = [row for row in rows if not row.stable]
    if not options.unstable:
        rows = [row for row in rows if row.stable]
    if not rows:
        raise ValueError(f"rows={path} has no time: measure first, experiments.speed")
    print(f"rows: {path}")
    if shaky:
        what = "drawn, with their range" if options.unstable else "left out"
        print(f"rounds differ by more than 15 % in {len(shaky)} of the cells: {what}")
    with style():
        figures = draw_speed(rows)
        for name, figure in figures.items():
            for file in save(figure, Path(options.out) / name):
                print(f"plot: {file}")
    if not figures:
        print("no plot: measure masks of two densities, or two lengths, of one shape")


if __name__ == "__main__":
    main()
