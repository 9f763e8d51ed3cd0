"""Accuracy against length: training runs that read the first bytes of whole documents.

The form is that of Table 5 of the FlashAttention paper. We had no access to its data: MIMIC-III is
restricted. Runs are folders of experiments.train with task=files or task=imdb_whole, or archives.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from matplotlib import pyplot as plt
from matplotlib.figure import Figure

from experiments.common import figures as f
from experiments.common.tables import MISSING, markdown
from experiments.lra.cells import Cell, Cells, Column, make_cells, sorted_rows
from experiments.lra.figures import row_labels, row_styles
from experiments.lra.runs import Run, read_runs, unpacked, write_archive
from experiments.lra.table import accuracy_text, baseline_lines, density_lines
from experiments.studies import runner

TASKS = ("files", "text")
# Dao et al. 2022 (arXiv 2205.14135v2), Table 5: micro-F1 of a pretrained RoBERTa by length
PAPER = {
    "MIMIC-III": {512: 52.8, 1024: 50.7, 2048: 51.7, 4096: 54.6, 8192: 56.4, 16384: 57.1},
    "ECtHR": {512: 72.2, 1024: 74.3, 2048: 77.1, 4096: 78.6, 8192: 80.7, 16384: 79.2},
}


@dataclass(kw_only=True)
class Options(runner.Options):
    name: str = "long_documents"
    runs: list[str] = field(default_factory=lambda: ["runs/train"])  # folders, globs or archives
    rows: str = "runs/long_documents.jsonl.gz"  # an archive, written again from the runs


DEFAULTS = dict.fromkeys(("cuda", "cpu"), Options())


def collect(options: Options) -> None:
    """Write the archive of the runs on whole documents."""
    documents(runs := read_runs(options.runs))
    write_archive([run for run in runs if run.task in TASKS], Path(options.rows))


def documents(runs: Sequence[Run]) -> dict[str, Cells]:
    """Return the cells of each set of documents, by name.

    A set has one task, one source of data and one rule for the validation split.

    Raise ValueError if no run is of whole documents.
    """
    cells, _ = make_cells([run for run in runs if run.task in TASKS and run.length])
    sets: dict[str, Cells] = {}
    for (row, column), cell in cells.items():
        name = Column(column.task, column.source, held_out=column.held_out).text
        sets.setdefault(name, {})[row, column] = cell
    if not sets:
        raise ValueError(
            "no run has task=files or task=imdb_whole; "
            "train first: python -m experiments.sweep sweep=files"
        )
    return sets


def tables(frame: Any) -> dict[str, str]:
    """Return a table of each set of documents of an archive, and the paper's."""
    made = {name: markdown(lines(cells)) for name, cells in _sets(frame).items()}
    return made | {"paper": markdown(paper_lines())}


def _sets(frame: Any) -> dict[str, Cells]:
    return documents([unpacked(row) for row in frame.to_dict("records")])


def lines(cells: Cells) -> list[list[str]]:
    """Return accuracy, density and milliseconds of a training step by length, and shortcuts.

    The last column has the gain of the longest length over the shortest.
    """
    columns = by_length(cells)
    made = [["", *[f.token_text(column.length) for column in columns], "gain"]]
    for row in sorted_rows(key for key, _ in cells):
        own = [cells.get((row, column)) for column in columns]
        made.append([f"{row.text}, accuracy (%)", *map(accuracy_text, own), _gain(own)])
        made += [[*line, ""] for line in density_lines(own)]
        made.append(["  ms a step", *map(_ms, own), ""])
    return made + [[*line, ""] for line in baseline_lines(cells, columns)]


def paper_lines() -> list[list[str]]:
    """Return the paper's table."""
    made = [["", *map(f.token_text, PAPER["ECtHR"]), "gain"]]
    for name, scores in PAPER.items():
        first, *_, last = scores.values()
        texts = [f"{score:.1f}" for score in scores.values()]
        made.append([f"{name}, micro-F1 (%)", *texts, f"{last - first:+.1f}"])
    return made


def by_length(cells: Cells) -> list[Column]:
    """Return the columns, short documents first."""
    return sorted({column for _, column in cells}, key=lambda column: column.length)


def _gain(cells: Sequence[Cell | None]) -> str:
    first, last = (cell.accuracy if cell else None for cell in (cells[0], cells[-1]))
    return MISSING if len(cells) < 2 or first is None or last is None else f"{last - first:+.1f}"


def _ms(cell: Cell | None) -> str:
    times = () if cell is None else cell.ms_by_place.values()
    return ", ".join(f"{ms:.3g}" for ms in times) or MISSING


def figures(frame: Any) -> dict[str, Figure]:
    """Return a figure of each set of documents."""
    sets = _sets(frame).items()
    return {f.file_name("long-documents", name): _draw(name, cells) for name, cells in sets}


def _draw(name: str, cells: Cells) -> Figure:
    """Return accuracy by length on the left, and the time of a training step on the right."""
    figure, (left, right) = plt.subplots(1, 2, figsize=(f.PAGE, 2.5))
    columns, rows = by_length(cells), sorted_rows(key for key, _ in cells)
    styles, labels = row_styles(rows), row_labels(rows)
    shortcuts: dict[str, dict[int, float]] = {}
    for row in rows:
        own = {c.length: cells[row, c] for c in columns if (row, c) in cells}
        y = {n: cell.accuracy for n, cell in own.items() if cell.accuracy is not None}
        spread = [own[n].spread or 0.0 for n in y]
        low = [value - s for value, s in zip(y.values(), spread, strict=True)]
        high = [value + s for value, s in zip(y.values(), spread, strict=True)]
        f.curve(left, [*y], [*y.values()], styles[row], labels[row], low=low, high=high)
        ms = {n: next(iter(cell.ms_by_place.values()), None) for n, cell in own.items()}
        ms = {n: value for n, value in ms.items() if value is not None}
        f.curve(right, [*ms], [*ms.values()], styles[row], labels[row])
    for column in columns:  # of all rows; the last run counts
        for run in (run for key, cell in cells.items() if key[1] == column for run in cell.runs):
            for shortcut, value in run.baselines.items():
                shortcuts.setdefault(shortcut, {})[column.length] = value
    for shortcut, values in shortcuts.items():
        if shortcut != "majority":
            f.reference(left, [*values], [*values.values()], f"shortcut: {shortcut}")
    for axes in (left, right):
        f.length_axis(axes, [column.length for column in columns])
    f.plain_log_axis(right)
    left.set_ylabel("test accuracy (%)")
    right.set_ylabel("ms a training step")
    f.legend(figure, [left])
    runs = [run for cell in cells.values() for run in cell.runs]
    devices = ", ".join(dict.fromkeys(run.device for run in runs))
    seeds = max(len(cell.runs) for cell in cells.values())
    several = "bars: standard deviation of the seeds" if seeds > 1 else "single runs"
    figure.suptitle(f"{name}; {devices}; {several}", fontsize=8)
    return figure
