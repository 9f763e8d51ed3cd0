"""The Long Range Arena table of training runs, as Markdown, text and CSV.

Accuracy by task and its averages, training speed-up and peak memory, differences between attentions
with their intervals, steps and data, each task's speed, every run with its wall time, and the
shortcuts that an accuracy has to beat. The values of the paper (Dao et al. 2022) are in brackets.
"""

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from experiments.common.files import write_text
from experiments.common.tables import MISSING, aligned, markdown
from experiments.lra import published as lra
from experiments.lra.cells import (
    EXAMPLES,
    SEEDS,
    Cell,
    Cells,
    Column,
    Difference,
    RowKey,
    Steps,
    average,
    cell_difference,
    heads,
    make_cells,
    mean_speedup,
    paper_value,
    preferred,
    sorted_columns,
    sorted_rows,
    speedup,
)
from experiments.lra.runs import Run, unpacked

Lines = list[list[str]]
BASES = {lra.BASE: "from_standard", "flash": "from_flash"}  # what differences are relative to
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
    "(n)": f"seeds of both rows; {SEEDS}: the interval covers seeds, {EXAMPLES}: test examples",
}
TITLES = {
    "accuracy": "Accuracy (%), speed-up and memory",
    "paths": "Path-X and Path-256: accuracy (%)",
    "from_standard": "Difference from the Transformer: points ± 95 % interval, paired",
    "from_flash": "From FlashAttention: points ± 95 % interval, paired",
    "training": "Training: steps x batch (epochs)",
    "speed": "A training step: ms (speed-up over the Transformer) MiB",
    "runs": "Runs",
}
RUN_COLUMNS: tuple[str, ...] = (
    *("task", "attention", "seed", "steps", "planned", "minutes", "ms a step"),
    *("test %", "val %", "density %", "device", "date"),
)


def tables(frame: pd.DataFrame, steps: pd.DataFrame | None = None) -> dict[str, str]:
    """Return the tables of an archive of runs as Markdown: accuracy, paths, from_standard,
    from_flash, training, speed and runs, those that the runs support.

    steps: rows of the study lra_speed. Their times and memory replace those of the runs, and the
        attentions and tasks of the paper that have no run are shown too.
    """
    runs = [unpacked(row) for row in frame.to_dict("records")]
    rows = None if steps is None else steps.to_dict("records")
    found = Table(runs, rows, whole=steps is not None)  # type: ignore[arg-type]
    return {name: markdown(lines, left) for name, (lines, left) in found.sections.items()}


class Table:
    """The cells of the table and its sections, {name: (lines, columns that are aligned left)}.

    steps: as of `make_cells`.
    whole: also show the attentions and tasks of the paper that have no run.
    """

    def __init__(self, runs: Sequence[Run], steps: Steps | None = None, whole: bool = False):
        self.cells, self.notes = make_cells(runs, steps)
        keys, found = {row for row, _ in self.cells}, {column for _, column in self.cells}
        if whole:
            usual = {key.attention for key in keys if not key.label}
            keys |= {RowKey(name, "", "") for name in lra.ATTENTIONS if name not in usual}
            tasks = {column.task for column in found}
            found |= {Column(task, "") for task in lra.AVERAGED if task not in tasks}
        columns = sorted_columns(found)
        self.whole, self.rows = whole, sorted_rows(keys)
        self.columns = [c for c in columns if c.task not in lra.PATH]
        paths = [c for c in columns if c.task in lra.PATH]
        self.all = [*self.columns, *paths]
        made = {"accuracy": self._accuracy(self.columns), "paths": self._accuracy(paths)}
        for base, name in BASES.items():
            made[name] = self._grid(self.all, self._difference(base))
        made["training"] = self._grid(self.all, self._steps)
        if made["training"]:
            sizes = ("examples: train / val / test", *map(self._examples, self.all))
            made["training"].insert(1, [*sizes])
        made["speed"] = self._grid(self.all, self._speed)
        made["runs"] = self._runs()
        self.sections = {
            name: (lines, (0, 1, 2, 10, 11) if name == "runs" else (0,))
            for name, lines in made.items()
            if len(lines) > 1
        }

    def _grid(self, columns: Sequence[Column], text: Callable[[RowKey, Column], str]) -> Lines:
        """Return a line for each row that has a text in one of the columns."""
        body = [[row.text, *(text(row, column) for column in columns)] for row in self.rows]
        body = [line for line in body if any(cell != MISSING for cell in line[1:])]
        return [["", *heads(columns)], *body] if body else []

    def _accuracy(self, columns: Sequence[Column]) -> Lines:
        main = columns is self.columns
        more = ["average", ALL_FIVE, "speed-up", "peak MiB"] if main else []
        lines, blank = [["", *heads(columns), *more]], [""] * len(more)
        for row in self.rows:
            cells = [self.cells.get((row, c)) for c in columns]
            if not any(cells) and not self.whole:
                continue
            texts = [accuracy_text(self.cells.get((row, c)), paper_value(row, c)) for c in columns]
            if main:
                texts += _average_texts(average(self.cells, row, columns))
                texts.append(self._mean_speedup_text(row))
                peak = [cell.memory_mib for cell in cells if cell and cell.memory_mib]
                texts.append(f"{max(peak):.0f}" if peak else MISSING)
            if main or any(text != MISSING for text in texts):
                lines += [[row.text, *texts], *(line + blank for line in density_lines(cells))]
        if len(lines) == 1:
            return []
        lines += [line + blank for line in baseline_lines(self.cells, columns)]
        shown = [i for i, name in enumerate(lines[0]) if name not in more or _any(lines, i)]
        return [[line[i] for i in shown] for line in lines]

    def _mean_speedup_text(self, row: RowKey) -> str:
        value, count = mean_speedup(self.cells, row, self.columns)
        timed = {c for r, c in self.cells if r.attention == lra.BASE and c.task in lra.TIMED}
        some = f" ({count} of {len(timed)})" if count < len(timed) else ""
        ours = MISSING if value is None else f"{value:.2f}x{some}"
        paper = lra.PAPER_SPEEDUP.get(row.attention)
        return ours if paper is None or row.label else f"{ours} [{paper:.1f}x]"

    def _difference(self, base: str) -> Callable[[RowKey, Column], str]:
        def text(row: RowKey, column: Column) -> str:
            found = cell_difference(self.cells, row, column, base)
            if found is None:
                return MISSING
            half = "" if found.half is None else f" ± {found.half:.1f}"
            words = ", ".join(filter(None, (str(found.seeds), "+".join(found.covers))))
            mark = "" if self.cells[row, column].complete else CUT
            return f"{found.value:+.1f}{half} ({words}){mark}"

        return text

    def _steps(self, row: RowKey, column: Column) -> str:
        """Return steps x batch (epochs)."""
        cell = self.cells.get((row, column))
        if cell is None:
            return MISSING
        steps, run = sorted(run.steps for run in cell.runs), cell.runs[0]
        text = f"{steps[0]:,}" + (f" to {steps[-1]:,}" if steps[-1] > steps[0] else "")
        text += f" x {run.batch}" if run.batch else ""
        if run.batch and run.examples:
            text += f" ({steps[-1] * run.batch / run.examples[0]:.3g})"
        return text + ("" if cell.complete else CUT)

    def _examples(self, column: Column) -> str:
        runs = [run for (_, at), cell in self.cells.items() if at == column for run in cell.runs]
        texts = [" / ".join(f"{n:,}" for n in run.examples) for run in runs if run.examples]
        return " or ".join(dict.fromkeys(texts)) or MISSING

    def _speed(self, row: RowKey, column: Column) -> str:
        cell = self.cells.get((row, column))
        if cell is None or not cell.ms_by_place:
            return MISSING
        ms = ", ".join(f"{ms:.2f}" for ms in cell.ms_by_place.values())
        factor = speedup(self.cells, row, column)
        times = "" if factor is None else f" ({factor:.2f}x)"
        return ms + times + (f" {cell.memory_mib:.0f}" if cell.memory_mib else "")

    def _runs(self) -> Lines:
        lines: Lines = [list(RUN_COLUMNS)]
        for column, head in zip(self.all, heads(self.all), strict=True):
            for row in self.rows:
                cell = self.cells.get((row, column), Cell())
                lines += [[head, row.text, *_run_texts(run)] for run in cell.runs]
        return lines

    def footnotes(self) -> list[str]:
        """Return the marks, the data in full, masks by name, cut runs, and what was left out."""
        shown = [cell for lines, _ in self.sections.values() for line in lines for cell in line]
        needs = {"[x]": "[", "(n)": "("}
        found = [
            f"{mark} {meaning}"
            for mark, meaning in LEGEND.items()
            if any(needs.get(mark, mark) in text for text in shown)
        ]
        for task in lra.AVERAGED:  # of several lengths, which one counts
            first, *others = [c for c in preferred(self.columns) if c.task == task] or [None]
            if first and any(other.length != first.length for other in others if other):
                then = ", then ".join(column.text for column in others if column)
                found.append(f"average: of {first.text}, where a row has it, else of {then}")
        found += [f"{c.text}: {c.source}" for c in self.all if "," in c.source]
        for (row, column), cell in self.cells.items():
            if cell.reconstructed:
                mask = f"{row.text} on {column.text}: {cell.resolved_mask}"
                found.append(f"{RECONSTRUCTED} {mask}")
            for run in cell.runs:
                if not run.complete:
                    planned = run.planned_steps or "an unknown number"
                    found.append(f"{CUT} {run.place}: {run.steps} of {planned} steps")
        return found + self.notes

    def text(self, draw: Callable[..., str] = aligned, title: str = "{}", note: str = "{}") -> str:
        """Return all sections and notes: for a terminal, or with `markdown`."""
        parts = [
            f"{title.format(TITLES[name])}\n{draw(lines, left)}"
            for name, (lines, left) in self.sections.items()
        ]
        return "\n\n".join([*parts, "\n".join(map(note.format, self.footnotes()))]) + "\n"

    def frame(self) -> pd.DataFrame:
        """Return a line for each cell, those without runs too; accuracies in percent."""
        pairs = [(row, column) for column in self.all for row in self.rows]
        return pd.DataFrame([self._numbers(row, column) for row, column in pairs])

    def _numbers(self, row: RowKey, column: Column) -> dict[str, Any]:
        cell = self.cells.get((row, column), Cell())
        run, runs = cell.runs[0] if cell.runs else None, cell.runs
        found: dict[str, Any] = {
            "attention": row.attention,
            "mask": row.mask,
            "resolved_mask": cell.resolved_mask,
            "density": cell.density,
            "name": row.label,
            "task": column.task,
            "source": column.source,
            "held_out": column.held_out,
            "accuracy": cell.accuracy,
            "spread": cell.spread,
            "runs": len(runs),
            "split": "" if cell.accuracy is None else "test" if cell.tested else "val",
            "complete": cell.complete if runs else None,
            "traced": cell.traced if runs else None,
            "paper": paper_value(row, column),
            "ms_per_step": next(iter(cell.ms_by_place.values()), None),
            "speedup": speedup(self.cells, row, column),
            "memory_mib": cell.memory_mib,
        }
        for base, name in BASES.items():
            nothing = Difference(float("nan"), None, 0, "")
            value, half, _, covers = cell_difference(self.cells, row, column, base) or nothing
            found |= {name: value, f"{name}_half": half, f"{name}_covers": covers}
        return found | {
            "batch": run.batch if run else None,
            "train_examples": run.examples[0] if run and run.examples else None,
            "test_examples": run.examples[-1] if run and run.examples else None,
            "steps": min((run.steps for run in runs), default=None),
            "seconds": max((run.seconds for run in runs), default=None),
            "device": " and ".join(dict.fromkeys(run.device for run in runs)),
        }

    def write(self, stem: Path) -> list[Path]:
        """Write `stem`.md and `stem`.csv; return their paths."""
        texts = {
            ".md": self.text(markdown, "### {}\n", "- {}"),
            ".csv": self.frame().to_csv(index=False, float_format="%.6g"),
        }
        for suffix, text in texts.items():
            write_text(stem.with_name(stem.name + suffix), text, "out")
        return [stem.with_name(stem.name + suffix) for suffix in texts]


def _any(lines: Lines, column: int) -> bool:
    return any(line[column] not in (MISSING, "") for line in lines[1:])


def accuracy_text(cell: Cell | None, paper: float | None = None) -> str:
    """Return mean ± spread (seeds), marks and the paper's value."""
    text = MISSING
    if cell is not None and cell.accuracy is not None:
        text = f"{cell.accuracy:.1f}"
        if cell.spread is not None:
            text += f" ± {cell.spread:.1f} ({len(cell.accuracies)})"
        text += _marks(cell.complete, cell.tested) + ("" if cell.traced else UNTRACED)
    elif cell is not None:
        text = CUT
    return text if paper is None else f"{text} [{paper:.1f}]"


def _average_texts(found: Any) -> tuple[str, str]:
    """Return the mean without the missing tasks, and with them at chance."""
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


def density_lines(cells: Sequence[Cell | None]) -> Lines:
    """Return the line of densities below a block-sparse row, if there is one."""
    texts = [
        "" if cell is None or cell.density is None
        else f"{cell.density:.1f}" + RECONSTRUCTED * cell.reconstructed
        for cell in cells
    ]  # fmt: skip
    return [["  density of its blocks (%)", *texts]] if any(texts) else []


def baseline_lines(cells: Cells, columns: Iterable[Column]) -> Lines:
    """Return a line for each shortcut."""
    found: dict[str, dict[Column, float]] = {}
    for (_, column), cell in cells.items():
        for run in cell.runs:
            for name, value in run.baselines.items():
                found.setdefault(name, {})[column] = value
    lines = [
        [f"shortcut: {name}", *(f"{values[c]:.1f}" if c in values else "" for c in columns)]
        for name, values in found.items()
    ]
    return [line for line in lines if any(line[1:])]


def _run_texts(run: Run) -> list[str]:
    def text(value: float | None, form: str = ".1f") -> str:
        return MISSING if value is None else format(value, form)

    return [
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
