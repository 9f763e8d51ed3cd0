"""Lines of the table beside the accuracies: differences, and what each cell was trained on."""

from collections.abc import Iterable, Sequence

from experiments.common.text_table import MISSING
from experiments.lra import published as lra
from experiments.lra.cells import Cell, Cells, Column, RowKey, heads
from experiments.lra.statistics import EXAMPLES, SEEDS, Difference, difference

Lines = list[list[str]]
BASES = (lra.BASE, "flash")  # what differences are relative to
COVERS = f"seeds of both rows; {SEEDS}: the interval covers seeds, {EXAMPLES}: test examples"


def cell_difference(cells: Cells, row: RowKey, column: Column, base: str) -> Difference | None:
    """The difference of a tested cell from that of the attention `base` in the same recipe."""
    ours, other = (cells.get((key, column)) for key in (row, RowKey(base, "", row.label)))
    if ours is None or other is None or ours is other:
        return None
    return difference(ours.runs, other.runs)


def difference_lines(
    cells: Cells, rows: Sequence[RowKey], columns: Sequence[Column], base: str
) -> Lines:
    """A line for each attention that shares a seed with `base` on a task."""
    found = []
    for row in rows:
        values = [cell_difference(cells, row, column, base) for column in columns]
        if any(values):
            own = [cells.get((row, column), Cell()) for column in columns]
            texts = [_text(value, cell) for value, cell in zip(values, own, strict=True)]
            found.append([row.text, *texts])
    return [["", *heads(columns)], *found] if found else []


def _text(value: Difference | None, cell: Cell) -> str:
    if value is None:
        return MISSING
    half = "" if value.half is None else f" ± {value.half:.1f}"
    words = ", ".join(filter(None, (str(value.seeds), "+".join(value.covers))))
    return f"{value.value:+.1f}{half} ({words})" + ("" if cell.complete else "†")


def training_lines(cells: Cells, rows: Sequence[RowKey], columns: Sequence[Column]) -> Lines:
    """The numbers of examples of each task, then steps x batch and epochs of each cell."""
    sizes = [_joined(_examples(cells, column)) for column in columns]
    lines = [["", *heads(columns)], ["examples: train / val / test", *sizes]]
    for row in rows:
        texts = [_steps(cells.get((row, column))) for column in columns]
        lines += [[row.text, *texts]] if any(text != MISSING for text in texts) else []
    return lines if len(lines) > 2 else []


def _examples(cells: Cells, column: Column) -> list[str]:
    runs = [run for (_, at), cell in cells.items() if at == column for run in cell.runs]
    return [" / ".join(f"{count:,}" for count in run.examples) for run in runs if run.examples]


def _steps(cell: Cell | None) -> str:
    """Steps x batch (epochs)."""
    if cell is None or not cell.runs:
        return MISSING
    steps = sorted(run.steps for run in cell.runs)
    text = f"{steps[0]:,}" + (f" to {steps[-1]:,}" if steps[-1] > steps[0] else "")
    run = cell.runs[0]
    text += f" x {run.batch}" if run.batch else ""
    if run.batch and run.examples:
        text += f" ({steps[-1] * run.batch / run.examples[0]:.3g})"
    return text + ("" if cell.complete else "†")


def _joined(texts: Iterable[str]) -> str:
    return " or ".join(dict.fromkeys(texts)) or MISSING
