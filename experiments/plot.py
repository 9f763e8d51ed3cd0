"""Draws what experiments.speed measured, from its CSV alone, as PNG and SVG.

    python -m experiments.plot csv=runs/speed/speed.csv out=runs/speed/plots

Three kinds of figure: speed-up against sparsity, time against length, and the masks themselves.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import masks
from experiments.bench.cases import DENSE, Case
from experiments.bench.reports.mask_plot import draw_masks
from experiments.bench.reports.plot import draw_speed
from experiments.bench.reports.table import newest
from experiments.bench.rows import SpeedRow
from experiments.common.figures import save, style
from experiments.common.program import program
from experiments.common.records import OK, read


def draw_all(csv: str | Path, out: str | Path) -> list[Path]:
    """Writes every figure that the rows of `csv` give into the folder `out`; the files' paths.

    Raises ValueError if the file is missing or holds no measured row.
    """
    rows = [row for row in newest(read(csv, SpeedRow)) if row.status == OK]
    if not rows:
        raise ValueError(f"{csv} holds no measured row; measure first: python -m experiments.speed")
    out = Path(out)
    out.mkdir(parents=True, exist_ok=True)
    with style():
        figures = draw_speed(rows)
        if found := patterns(rows):
            figures["masks"] = draw_masks(found)
        return [path for name, figure in figures.items() for path in save(figure, out / name)]


def patterns(rows: Sequence[SpeedRow], most: int = 12) -> list[masks.BlockMask]:
    """The masks of the rows, random blocks once, each at the length most rows have."""
    chosen: dict[str, Case] = {}
    for row in sorted(rows, key=lambda r: (-sum(r.n_q == s.n_q for s in rows), r.density)):
        case = Case(**{name: getattr(row, name) for name in Case.__dataclass_fields__})
        if row.mask != DENSE and len(chosen) < most:
            chosen.setdefault("random" if row.random else row.mask, case)
    return [case.blocks for case in chosen.values() if case.blocks is not None]


@program("plot")
def main(options: dict[str, Any], command: str) -> None:
    """Draws the figures and prints their paths."""
    paths = draw_all(options["csv"], options["out"])
    print("\n".join([f"rows: {options['csv']}", *(f"plot: {path}" for path in paths)]))


if __name__ == "__main__":
    main()
