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

    If a task has data of several sources, the official one counts, and for Text the official rule,
    which chooses the checkpoint on the test split.
    """
    chosen: dict[str, Cell] = {}
    for column in sorted(columns, key=lambda c: (c.held_out, c.source != "official")):
        cell = cells.get((row, column))
        if column.task in lra.AVERAGED and cell is not None and cell.accuracy is not None:
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


def _paper(row: RowKey, tasks: Sequence[str] | dict[str, Cell]) -> float | None:
    """The paper's mean over the tasks, for a row of the reference recipe."""
    values = [lra.PAPER.get((row.attention, task)) for task in tasks]
    known = [value for value in values if value is not None]
    return statistics.fmean(known) if len(known) == len(values) and not row.label else None
