"""The mean accuracy over the five tasks, without the tasks that are missing and with them."""

import statistics
from collections.abc import Sequence
from typing import NamedTuple

from experiments.lra import published as lra
from experiments.lra.cells import Cell, Cells, Column, RowKey


class Average(NamedTuple):
    """The mean over the tasks that a row has."""

    value: float
    paper: float | None  # over the same tasks
    tasks: int
    complete: bool
    tested: bool
    of_all: float  # over all five; a missing task counts as chance
    paper_of_all: float | None


def average(cells: Cells, row: RowKey, columns: Sequence[Column]) -> Average | None:
    """Returns the mean accuracy over those of the five tasks that the row has, None without any.

    Of several columns of a task, the first one counts that the row has: see `preferred`.
    """
    chosen: dict[str, Cell] = {}
    for column in preferred(columns):
        cell = cells.get((row, column))
        if cell is not None and cell.accuracy is not None:
            chosen.setdefault(column.task, cell)
    if not chosen:
        return None
    found = {task: cell.accuracy or 0.0 for task, cell in chosen.items()}
    return Average(
        statistics.fmean(found.values()),
        _paper(row, chosen),
        len(chosen),
        all(cell.complete for cell in chosen.values()),
        all(cell.tested for cell in chosen.values()),
        statistics.fmean((lra.CHANCE | found).values()),
        _paper(row, lra.AVERAGED),
    )


def preferred(columns: Sequence[Column]) -> list[Column]:
    """The columns of the five tasks, those that count first.

    For Text these are of the official rule, which chooses the checkpoint on the test split. Then
    come official data, and then the shortest sequences.
    """
    found = [column for column in columns if column.task in lra.AVERAGED]
    return sorted(found, key=lambda c: (c.held_out, c.source != "official", c.length))


def choices(columns: Sequence[Column]) -> list[str]:
    """Notes on tasks of several lengths: which one counts."""
    found = []
    for task in lra.AVERAGED:
        first, *others = [c for c in preferred(columns) if c.task == task] or [Column(task, "")]
        if any(other.length != first.length for other in others):
            then = ", then ".join(column.text for column in others)
            found.append(f"average: of {first.text}, where a row has it, else of {then}")
    return found


def _paper(row: RowKey, tasks: Sequence[str] | dict[str, Cell]) -> float | None:
    """The paper's mean over the tasks, for a row of the reference recipe."""
    values = [lra.PAPER.get((row.attention, task)) for task in tasks]
    known = [value for value in values if value is not None]
    return statistics.fmean(known) if len(known) == len(values) and not row.label else None
