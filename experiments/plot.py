"""Draws what experiments.speed measured, from its CSV alone, as PNG and SVG.

    python -m experiments.plot csv=runs/speed/speed.csv out=runs/speed/plots
    python -m experiments.plot csv=docs/results/h100/page.csv.gz 'pages=[README.md]'

Three kinds of figure: speed-up against sparsity, time against length, and the masks themselves.
In a page, a table stands between `<!-- rows: NAME -->` and `<!-- end -->`; NAME is density, masks,
rates, ratios, peers, peer_counts, or versions, which has a column for each Triton of the rows. A
page with tables of several files names them: `<!-- rows: NAME h100/page.csv.gz -->`.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import masks
from experiments.bench.cases import DENSE, Case
from experiments.bench.reports.mask_plot import draw_masks
from experiments.bench.reports.page import fill
from experiments.bench.reports.plot import draw_speed
from experiments.bench.reports.table import newest
from experiments.bench.rows import SpeedRow
from experiments.common.checks import as_list
from experiments.common.figures import save, style
from experiments.common.files import read_text, write_text
from experiments.common.program import program
from experiments.common.records import OK, read


def measured(csv: str | Path, triton: str | None = None) -> list[SpeedRow]:
    """The rows of `csv` with a time, of one version of Triton or of the last one.

    Raises ValueError if the file is missing or holds no such row.
    """
    rows = [row for row in read(csv, SpeedRow) if triton in (None, row.triton)]
    rows = [row for row in newest(rows) if row.status == OK]
    if not rows:
        with_it = f" with triton={triton}" if triton else ""
        remedy = "measure first: python -m experiments.speed"
        raise ValueError(f"{csv} holds no measured row{with_it}; {remedy}")
    return rows


def draw_all(rows: Sequence[SpeedRow], out: str | Path) -> list[Path]:
    """Writes every figure that the rows give into the folder `out`; the files' paths."""
    out = Path(out)
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
    """Draws the figures, fills the tables of the pages, and prints the paths."""
    triton = None if options["triton"] is None else str(options["triton"])
    rows = measured(options["csv"], triton)
    every = [row for row in read(options["csv"], SpeedRow) if triton in (None, row.triton)]
    filled = {}
    for page in map(Path, as_list(options["pages"])):
        text = read_text(page, "name another page", f"pages={page}")
        filled[page] = fill(text, every, str(options["csv"]))
    print(f"rows: {options['csv']}")
    for path in draw_all(rows, options["out"]):
        print(f"plot: {path}")
    for page, text in filled.items():
        write_text(page, text, "pages")
        print(f"page: {page}")


if __name__ == "__main__":
    main()
