"""Accuracy against length: training runs that read the first bytes of whole documents.

    python -m experiments.sweep sweep=files               # on a CPU: sweep=files_small
    python -m experiments.studies.long_documents
    python -m experiments.studies.long_documents 'runs=[runs/train/files-*,runs/train/imdb-*]'

The form is that of Table 5 of the FlashAttention paper. Its data are not at hand: MIMIC-III is
restricted. Runs are folders of experiments.train with task=files or task=imdb_whole, or archives.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib import pyplot as plt
from matplotlib.figure import Figure

from experiments.common.checks import as_list, at_least_one
from experiments.common.figures import (
    PAGE,
    curve,
    file_name,
    legend,
    length_axis,
    plain_log_axis,
    reference,
    save,
    style,
    token_text,
)
from experiments.common.files import write_text
from experiments.common.program import program
from experiments.common.tables import MISSING, markdown
from experiments.lra.cells import Cell, Cells, Column, make_cells, sorted_rows
from experiments.lra.figures import row_labels, row_styles
from experiments.lra.runs import Run, read_runs, write_archive
from experiments.lra.table import accuracy_text, baseline_lines, density_lines

TASKS = ("files", "text")
# Dao et al. 2022 (arXiv 2205.14135v2), Table 5: micro-F1 of a pretrained RoBERTa by length
PAPER = {
    "MIMIC-III": {512: 52.8, 1024: 50.7, 2048: 51.7, 4096: 54.6, 8192: 56.4, 16384: 57.1},
    "ECtHR": {512: 72.2, 1024: 74.3, 2048: 77.1, 4096: 78.6, 8192: 80.7, 16384: 79.2},
}


def documents(runs: Sequence[Run]) -> dict[str, Cells]:
    """Return the cells of each set of documents, by name.

    A set has one task, one source of data and one rule for the validation split.

    Raises ValueError if no run is of whole documents.
    """
    cells, _ = make_cells([run for run in runs if run.task in TASKS and run.length])
    found: dict[str, Cells] = {}
    for (row, column), cell in cells.items():
        name = Column(column.task, column.source, held_out=column.held_out).text
        found.setdefault(name, {})[row, column] = cell
    if not found:
        raise ValueError(
            "no run has task=files or task=imdb_whole; "
            "train first: python -m experiments.sweep sweep=files"
        )
    return found


def lines(cells: Cells) -> list[list[str]]:
    """Accuracy, density and milliseconds of a training step by length, and shortcuts.

    The last column has the gain of the longest length over the shortest.
    """
    columns = by_length(cells)
    found = [["", *[token_text(column.length) for column in columns], "gain"]]
    for row in sorted_rows(key for key, _ in cells):
        own = [cells.get((row, column)) for column in columns]
        accuracies = [accuracy_text(cell) for cell in own]
        found.append([f"{row.text}, accuracy (%)", *accuracies, _gain(own)])
        found += [[*line, ""] for line in density_lines(own)]
        found.append(["  ms a step", *[_ms(cell) for cell in own], ""])
    return found + [[*line, ""] for line in baseline_lines(cells, columns)]


def paper_lines() -> list[list[str]]:
    """Return the paper's table."""
    found = [["", *map(token_text, PAPER["ECtHR"]), "gain"]]
    for name, scores in PAPER.items():
        values = list(scores.values())
        texts = [f"{value:.1f}" for value in values]
        found.append([f"{name}, micro-F1 (%)", *texts, f"{values[-1] - values[0]:+.1f}"])
    return found


def by_length(cells: Cells) -> list[Column]:
    return sorted({column for _, column in cells}, key=lambda column: column.length)


def _gain(cells: Sequence[Cell | None]) -> str:
    first, last = (cell.accuracy if cell else None for cell in (cells[0], cells[-1]))
    return MISSING if len(cells) < 2 or first is None or last is None else f"{last - first:+.1f}"


def _ms(cell: Cell | None) -> str:
    times = () if cell is None else cell.ms_by_place.values()
    return ", ".join(f"{ms:.3g}" for ms in times) or MISSING


def draw(name: str, cells: Cells) -> Figure:
    """Accuracy by length on the left, and the time of a training step on the right."""
    figure, (left, right) = plt.subplots(1, 2, figsize=(PAGE, 2.5))
    columns = by_length(cells)
    rows = sorted_rows(key for key, _ in cells)
    styles, labels = row_styles(rows), row_labels(rows)
    for row in rows:
        own = {c.length: cells[row, c] for c in columns if (row, c) in cells}
        y = {n: cell.accuracy for n, cell in own.items() if cell.accuracy is not None}
        spread = [own[n].spread or 0.0 for n in y]
        low = [value - s for value, s in zip(y.values(), spread, strict=True)]
        high = [value + s for value, s in zip(y.values(), spread, strict=True)]
        curve(left, [*y], [*y.values()], styles[row], labels[row], low=low, high=high)
        ms = {n: next(iter(cell.ms_by_place.values()), None) for n, cell in own.items()}
        ms = {n: value for n, value in ms.items() if value is not None}
        curve(right, [*ms], [*ms.values()], styles[row], labels[row])
    for shortcut, values in _shortcuts(cells).items():
        reference(left, [*values], [*values.values()], f"shortcut: {shortcut}")
    for axes in (left, right):
        length_axis(axes, [column.length for column in columns])
    plain_log_axis(right)
    left.set_ylabel("test accuracy (%)")
    right.set_ylabel("ms a training step")
    legend(figure, [left])
    runs = [run for cell in cells.values() for run in cell.runs]
    devices = ", ".join(dict.fromkeys(run.device for run in runs))
    seeds = {len(cell.runs) for cell in cells.values()}
    several = "bars: standard deviation of the seeds" if max(seeds) > 1 else "single runs"
    figure.suptitle(f"{name}; {devices}; {several}", fontsize=8)
    return figure


def _shortcuts(cells: Cells) -> dict[str, dict[int, float]]:
    """Return the accuracy of each shortcut but the majority class, by length."""
    found: dict[str, dict[int, float]] = {}
    for _, column in sorted(cells, key=lambda key: key[1].length):
        for run in [run for (_, at), cell in cells.items() if at == column for run in cell.runs]:
            for name, value in run.baselines.items():
                if name != "majority":
                    found.setdefault(name, {})[column.length] = value
    return found


def tables(found: Mapping[str, Cells]) -> str:
    """Return a table of each set of documents and the paper's, as Markdown."""
    parts = {f"{name}: accuracy against length": lines(cells) for name, cells in found.items()}
    parts["FlashAttention paper, Table 5, RoBERTa"] = paper_lines()
    return "\n\n".join(f"### {title}\n\n{markdown(table)}" for title, table in parts.items())


def write(found: Mapping[str, Cells], out: Path) -> list[Path]:
    """Write the tables, and a figure of each set of documents; returns the paths."""
    paths = [out / "long_documents.md"]
    write_text(paths[0], tables(found) + "\n", "out")
    with style():
        for name, cells in found.items():
            paths += save(draw(name, cells), out / file_name("long-documents", name))
    return paths


@program("long_documents", "experiments.studies.long_documents")
def main(options: dict[str, Any], command: str) -> None:
    at_least_one(options, "runs")
    runs = read_runs(as_list(options["runs"]))
    found, paths = documents(runs), []
    if options["archive"]:
        paths.append(Path(options["archive"]))
        write_archive([run for run in runs if run.task in TASKS], paths[-1])
    paths += write(found, Path(options["out"]))
    print(tables(found))
    print("\n".join(f"written: {path}" for path in paths))


if __name__ == "__main__":
    main()
