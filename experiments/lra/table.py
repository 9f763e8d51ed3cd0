"""The Long Range Arena table of training runs: Markdown, text and CSV.

Accuracy by task and its averages, training speed-up and peak memory, differences between attentions
with their intervals, steps and data, each task's speed, every run with its wall time, and the
shortcuts that an accuracy has to beat. The values of the paper (Dao et al. 2022) are in brackets.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from experiments.common import records
from experiments.common.files import write_text
from experiments.common.text_table import MISSING, aligned, markdown
from experiments.lra import published as lra
from experiments.lra.averages import Average, average, choices
from experiments.lra.cell_rows import CellRow, cell_row, paper_value
from experiments.lra.cells import (
    Cell,
    Cells,
    Column,
    RowKey,
    heads,
    make_cells,
    mean_speedup,
    sorted_columns,
    sorted_rows,
    speedup,
    with_times,
)
from experiments.lra.runs import Run
from experiments.lra.speed.rows import StepRow
from experiments.lra.table_statistics import (
    BASES,
    COVERS,
    Lines,
    difference_lines,
    training_lines,
)

ALL_FIVE = "of all five"
CUT, VALIDATION, UNTRACED, RECONSTRUCTED = "†", "‡", "§", "*"
LEGEND = {
    "[x]": "the paper's value",
    CUT: "cut short: fewer steps than planned",
    VALIDATION: "best validation accuracy; the run was not tested",
    UNTRACED: "untraced: no commit holds the exact code of the run",
    RECONSTRUCTED: "the run did not record its mask: the default of its commit",
    MISSING: "not run",
    ALL_FIVE: "a missing task counts as a guess (10 or 50 %); for rows with three tasks or more",
    "(n)": COVERS,
}

RUN_COLUMNS: tuple[str, ...] = (
    *("task", "attention", "seed", "steps", "planned", "minutes", "ms a step"),
    *("test %", "val %", "density %", "device", "date"),
)


@dataclass(frozen=True)
class Section:
    """A table under its title."""

    title: str
    lines: Lines
    left: tuple[int, ...] = (0,)


class Table:
    """The cells of the table, with the times of measured steps if given.

    whole: also show the attentions and tasks of the paper that have no run.
    """

    def __init__(
        self, runs: Sequence[Run], steps: Sequence[StepRow] | None = None, whole: bool = False
    ):
        self.cells, self.notes = make_cells(runs)
        if steps is not None:
            self.cells = with_times(self.cells, steps)
        keys, found = {row for row, _ in self.cells}, {column for _, column in self.cells}
        if whole:
            usual = {key.attention for key in keys if not key.label}
            keys |= {RowKey(name, "", "") for name in lra.ATTENTIONS if name not in usual}
            tasks = {column.task for column in found}
            found |= {Column(task, "") for task in lra.AVERAGED if task not in tasks}
        columns = sorted_columns(found)
        self.columns = [c for c in columns if c.task not in lra.PATH]
        self.paths = [c for c in columns if c.task in lra.PATH]
        self.rows = sorted_rows(keys)

    def sections(self) -> list[Section]:
        """The tables that the runs support."""
        found = [Section("Accuracy (%), speed-up and memory", self._accuracy())]
        if self.paths:
            found.append(Section("Path-X and Path-256: accuracy (%)", self._paths()))
        everywhere = [*self.columns, *self.paths]
        for base in BASES:
            if lines := difference_lines(self.cells, self.rows, everywhere, base):
                name = lra.ATTENTIONS[base]
                title = f"Difference from the {name}" if base == lra.BASE else f"From {name}"
                found.append(Section(f"{title}: points ± 95 % interval, paired", lines))
        if lines := training_lines(self.cells, self.rows, everywhere):
            found.append(Section("Training: steps x batch (epochs)", lines))
        found.append(
            Section("A training step: ms (speed-up over the Transformer) MiB", self._speed())
        )
        return [*found, Section("Runs", self._runs(), (0, 1, 2, 10, 11))]

    def _accuracy(self) -> Lines:
        head = heads(self.columns)
        lines = [["", *head, "average", ALL_FIVE, "speed-up", "peak MiB"]]
        for row in self.rows:
            cells = [self.cells.get((row, c)) for c in self.columns]
            paper = [paper_value(row, c) for c in self.columns]
            lines.append([row.text, *map(accuracy_text, cells, paper)])
            lines[-1] += _average_texts(average(self.cells, row, self.columns))
            lines[-1].append(self._mean_speedup_text(row))
            peak = [cell.memory_mib for cell in cells if cell and cell.memory_mib]
            lines[-1].append(f"{max(peak):.0f}" if peak else MISSING)
            lines += density_lines(cells, width=4)
        return lines + baseline_lines(self.cells, self.columns, width=4)

    def _mean_speedup_text(self, row: RowKey) -> str:
        value, count = mean_speedup(self.cells, row, self.columns)
        timed = {c for r, c in self.cells if r.attention == lra.BASE and c.task in lra.TIMED}
        some = f" ({count} of {len(timed)})" if count < len(timed) else ""
        ours = MISSING if value is None else f"{value:.2f}x{some}"
        paper = lra.PAPER_SPEEDUP.get(row.attention)
        return ours if paper is None or row.label else f"{ours} [{paper:.1f}x]"

    def _paths(self) -> Lines:
        lines = [["", *heads(self.paths)]]
        for row in self.rows:
            cells = [self.cells.get((row, c)) for c in self.paths]
            paper = [paper_value(row, c) for c in self.paths]
            if any(cells) or any(paper):
                lines.append([row.text, *map(accuracy_text, cells, paper)])
                lines += density_lines(cells)
        return lines + baseline_lines(self.cells, self.paths)

    def _speed(self) -> Lines:
        columns = [*self.columns, *self.paths]
        lines = [["", *heads(columns)]]
        for row in self.rows:
            lines.append([row.text, *[self._speed_text(row, c) for c in columns]])
        return lines

    def _speed_text(self, row: RowKey, column: Column) -> str:
        cell = self.cells.get((row, column))
        if cell is None or not cell.ms_by_place:
            return MISSING
        ms = ", ".join(f"{ms:.2f}" for ms in cell.ms_by_place.values())
        factor = speedup(self.cells, row, column)
        times = "" if factor is None else f" ({factor:.2f}x)"
        return ms + times + (f" {cell.memory_mib:.0f}" if cell.memory_mib else "")

    def _runs(self) -> Lines:
        lines: Lines = [list(RUN_COLUMNS)]
        columns = [*self.columns, *self.paths]
        for column, head in zip(columns, heads(columns), strict=True):
            for row in self.rows:
                cell = self.cells.get((row, column), Cell())
                lines += [_run_line(run, head, row) for run in cell.runs]
        return lines

    def cell_rows(self) -> list[CellRow]:
        """Every cell, the missing ones too."""
        return [
            cell_row(self.cells, row, column)
            for column in (*self.columns, *self.paths)
            for row in self.rows
        ]

    def footnotes(self) -> list[str]:
        """The marks, the data in full, masks by name, cut runs, and what was left out."""
        found = [f"{mark} {meaning}" for mark, meaning in LEGEND.items()]
        found += choices(self.columns)
        found += [f"{c.text}: {c.source}" for c in (*self.columns, *self.paths) if "," in c.source]
        for (row, column), cell in self.cells.items():
            if cell.reconstructed:
                mask = f"{row.text} on {column.text}: {cell.resolved_mask}"
                found.append(f"{RECONSTRUCTED} {mask}")
            for run in cell.runs:
                if not run.complete:
                    planned = run.planned_steps or "an unknown number"
                    found.append(f"{CUT} {run.place}: {run.steps} of {planned} steps")
        return found + self.notes


def accuracy_text(cell: Cell | None, paper: float | None) -> str:
    text = MISSING
    if cell is not None and cell.accuracy is not None:
        text = f"{cell.accuracy:.1f}"
        if cell.spread is not None:
            text += f" ± {cell.spread:.1f} ({len(cell.accuracies)})"
        text += _marks(cell.complete, cell.tested) + ("" if cell.traced else UNTRACED)
    elif cell is not None:
        text = CUT
    return text if paper is None else f"{text} [{paper:.1f}]"


def _average_texts(found: Average | None) -> tuple[str, str]:
    """The mean without the missing tasks, and with them at chance."""
    if found is None:
        return MISSING, MISSING
    marks, missing = _marks(found.complete, found.tested), len(lra.AVERAGED) - found.tasks
    own, every = f"{found.value:.1f}{marks}", f"{found.of_all:.1f}{marks}"
    own += f" ({found.tasks} of {len(lra.AVERAGED)})" if missing else ""
    own += "" if found.paper is None else f" [{found.paper:.1f}]"
    every += "" if found.paper_of_all is None else f" [{found.paper_of_all:.1f}]"
    return own, every if found.tasks > missing else MISSING


def _marks(complete: bool, tested: bool) -> str:
    return ("" if complete else CUT) + ("" if tested else VALIDATION)


def density_lines(cells: Sequence[Cell | None], width: int = 0) -> Lines:
    """The densities below a block-sparse row, with `width` empty cells at the end."""
    texts = [
        "" if cell is None or cell.density is None
        else f"{cell.density:.1f}" + RECONSTRUCTED * cell.reconstructed
        for cell in cells
    ]  # fmt: skip
    return [["  density of its blocks (%)", *texts, *[""] * width]] if any(texts) else []


def baseline_lines(cells: Cells, columns: Sequence[Column], width: int = 0) -> Lines:
    """A line for each shortcut, with `width` empty cells at the end."""
    found: dict[str, dict[Column, float]] = {}
    for (_, column), cell in cells.items():
        for run in cell.runs:
            for name, value in run.baselines.items():
                found.setdefault(name, {})[column] = value
    lines = []
    for name, values in found.items():
        texts = [f"{values[c]:.1f}" if c in values else "" for c in columns]
        if any(texts):
            lines.append([f"shortcut: {name}", *texts, *[""] * width])
    return lines


def _run_line(run: Run, head: str, row: RowKey) -> list[str]:
    def text(value: float | None, form: str = ".1f") -> str:
        return MISSING if value is None else format(value, form)

    return [
        head,
        row.text,
        str(run.seed),
        str(run.steps) + ("" if run.complete else CUT),
        str(run.planned_steps or MISSING),
        f"{run.seconds / 60:.1f}",
        text(run.ms_per_step, ".2f"),
        text(run.accuracy) + ("" if run.traced else UNTRACED),
        text(run.val_accuracy),
        "" if run.density is None else text(run.density) + RECONSTRUCTED * run.reconstructed,
        run.device,
        run.date[:10],
    ]


def as_text(table: Table) -> str:
    """All tables aligned for a terminal."""
    return _document(table, aligned, "{title}", "{note}")


def as_markdown(table: Table) -> str:
    return _document(table, markdown, "### {title}\n", "- {note}")


def _document(table: Table, draw: Callable[..., str], title: str, note: str) -> str:
    parts = [
        f"{title.format(title=s.title)}\n{draw(s.lines, left=s.left)}" for s in table.sections()
    ]
    notes = [note.format(note=text) for text in table.footnotes()]
    return "\n\n".join([*parts, "\n".join(notes)]) + "\n"


def as_csv(table: Table) -> str:
    return records.as_csv(table.cell_rows(), CellRow)


def write(table: Table, stem: Path) -> list[Path]:
    """Writes `stem`.md and `stem`.csv, and returns their paths."""
    texts = {".md": as_markdown(table), ".csv": as_csv(table)}
    paths = [stem.with_name(stem.name + suffix) for suffix in texts]
    for path, text in zip(paths, texts.values(), strict=True):
        write_text(path, text, "out")
    return paths
