"""Accuracy against length: training runs that read the first bytes of whole documents.

The form is that of Table 5 of the FlashAttention paper. We had no access to its data: MIMIC-III is
restricted. Runs are folders of experiments.train with task=files, or task=text for whole reviews,
or archives.
"""

from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from experiments.common import figures as f
from experiments.lra import table
from experiments.lra.cells import Cells, Column, make_cells, sorted_rows
from experiments.lra.curves import row_labels, row_styles
from experiments.lra.runs import read_runs, unpacked, write_archive
from experiments.studies import runner

KEY = ("run", "settings", "curves")
TASKS = ("files", "text")


@dataclass(kw_only=True)
class Options(runner.Options):
    runs: list[str] = field(default_factory=lambda: ["runs/train"])  # folders, globs or archives
    rows: str = "runs/long_documents.jsonl.gz"  # an archive, written again from the runs


def collect(options: Options) -> None:
    """Write the archive of the runs on whole documents."""
    runs = [run for run in read_runs(options.runs) if run.task in TASKS and run.length]
    if not runs:
        remedy = "train first: python -m experiments.sweep sweep=files"
        raise ValueError(f"runs: none has task=files or task=text; {remedy}")
    write_archive(runs, Path(options.rows))


def tables(frame: Any) -> dict[str, str]:
    """Return the tables of experiments.table, of which accuracy has lengths across."""
    return table.tables(frame)


def _sets(frame: Any) -> dict[str, Cells]:
    """Return the cells of each set of documents by name: of one task, one source of data and one
    rule for the validation split.
    """
    cells, _ = make_cells([unpacked(row) for row in frame.to_dict("records")])
    sets: dict[str, Cells] = {}
    for (row, column), cell in cells.items():
        name = Column(column.task, column.source, held_out=column.held_out).text
        sets.setdefault(name, {})[row, column] = cell
    return sets


def figures(frame: Any) -> dict[str, Figure]:
    """Return a figure of each set of documents."""
    sets = _sets(frame).items()
    return {f.file_name("long-documents", name): _draw(name, cells) for name, cells in sets}


def _draw(name: str, cells: Cells) -> Figure:
    """Return accuracy and the time of a training step by length, on the most frequent device."""
    timed = Counter(device for cell in cells.values() for device, _ in cell.ms_by_place)
    one = timed.most_common(1)[0][0] if timed else ""
    columns = sorted({column for _, column in cells}, key=lambda column: column.length)
    rows = sorted_rows(key for key, _ in cells)
    styles, labels = row_styles(rows), row_labels(rows)
    accuracy, steps = [], []
    for row in rows:
        own = {c.length: cells[row, c] for c in columns if (row, c) in cells}
        y = {n: cell.accuracy for n, cell in own.items() if cell.accuracy is not None}
        spread = {n: own[n].spread or 0.0 for n in y}
        times = ((n, at, ms) for n, cell in own.items() for (at, _), ms in cell.ms_by_place.items())
        ms = {n: ms for n, device, ms in times if device == one}
        accuracy.append(f.Curve(labels[row], styles[row], y, spread))
        steps.append(f.Curve(labels[row], styles[row], ms))
    values = {"test accuracy (%)": {"": accuracy}, "ms a training step": {"": steps}}
    devices = dict.fromkeys(run.device for cell in cells.values() for run in cell.runs)
    title = f"{name}; {', '.join(devices)}" + f"; times of {one}" * (len(devices) > 1)
    return f.length_figure(values, title)
