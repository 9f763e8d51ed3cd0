"""Learning curves of training runs, and accuracy against speed."""

import textwrap
from collections.abc import Iterable, Sequence
from itertools import cycle
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from experiments.common.figures import PAGE, Style, curve, file_name, legend, save, style
from experiments.lra.cells import (
    ALONE,
    Cell,
    Cells,
    Column,
    RowKey,
    Steps,
    make_cells,
    sorted_columns,
    sorted_rows,
    speedup,
)
from experiments.lra.figures import by_contour, groups, row_labels, row_styles
from experiments.lra.runs import Run

RULES = ((0, (1, 1.5)), (0, (4, 2, 1, 2)))  # dashes of the shortcuts
UNITS = ((7200, 3600, "h"), (180, 60, "min"), (0, 1, "s"))  # from so many seconds on


def draw_all(
    runs: Sequence[Run], out: str | Path, smooth: float = 0.02, steps: Steps | None = None
) -> list[Path]:
    """Write every figure that the runs support into the folder `out`; return the paths.

    steps: measured training steps, whose times replace those of the runs where there are any.

    Raises ValueError if no run has a measurement yet.
    """
    out = Path(out)
    figures: dict[str, Figure] = {}
    with style():
        for pretraining in (False, True):
            cells, _ = make_cells(runs, steps, pretraining=pretraining)
            columns = sorted_columns(c for _, c in cells)
            texts = [column.text for column in columns]
            for column in columns:
                chosen = {row: cells[row, column] for row in _rows(cells, [column])}
                if any(run.lines for cell in chosen.values() for run in cell.runs):
                    # the numbers of examples, where the columns differ in nothing else
                    more = [column.counts] * (texts.count(column.text) > 1)
                    more += ["pretraining"] * pretraining
                    figures |= _curves(chosen, column, more, smooth)
        cells, _ = make_cells(runs, steps)
        placed = sorted_columns(column for row, column in cells if _point(cells, row, column))
        if placed:
            figures["accuracy-speed"] = draw_accuracy_speed(cells, placed)
        if not figures:
            raise ValueError("no run has a measurement yet: nothing to draw")
        return [path for name, figure in figures.items() for path in save(figure, out / name)]


def _rows(cells: Cells, columns: Sequence[Column]) -> list[RowKey]:
    """Return the rows that have one of the columns, in order."""
    return sorted_rows(row for row, column in cells if column in columns)


# ---- learning curves


def _curves(
    cells: dict[RowKey, Cell], column: Column, more: Sequence[str], smooth: float
) -> dict[str, Figure]:
    """Return the figures of a column by file name. Many rows take several figures."""
    figures = {}
    others = len(_baselines(cells.values()))
    for contour, rows in by_contour(list(cells), other_entries=others).items():
        title = ", ".join(filter(None, (column.text, contour, *more)))
        styles, labels = row_styles(rows), row_labels(rows)
        for number, part in enumerate(groups(rows, other_entries=others), 1):
            place = number if number > 1 else ""
            name = file_name("curves", column.text, contour, *more, place)
            looks = {labels[row]: (cells[row], styles[row]) for row in part}
            figures[name] = draw_curves(title, looks, smooth)
    return figures


def draw_curves(title: str, cells: dict[str, tuple[Cell, Style]], smooth: float = 0.02) -> Figure:
    """Draw accuracy above and loss below, by step on the left and by time on the right.

    Time is that of measured steps if all rows have them, else the wall time of the runs.

    cells: the rows to draw with their styles, by name.
    smooth: the share of a curve over which training values are averaged.
    """
    figure, grid = plt.subplots(2, 2, figsize=(PAGE, 4.6), sharex="col", sharey="row")
    runs = [run for cell, _ in cells.values() for run in cell.runs]
    times = [_seconds_alone(cell) for cell, _ in cells.values()]
    timed = None not in times
    longest = max(
        run.steps * (seconds or 0.0) if timed else run.seconds
        for (cell, _), seconds in zip(cells.values(), times, strict=True)
        for run in cell.runs
    )
    _, second, unit = next(u for u in UNITS if longest >= u[0])
    for (name, (cell, look)), seconds in zip(cells.items(), times, strict=True):
        for run in cell.runs:
            for panels, quantity, factor in zip(grid, ("accuracy", "loss"), (100, 1), strict=True):
                for kind in ("train", "val"):
                    x, y = _series(run, kind, quantity, seconds if timed else None)
                    if kind == "train":
                        y = _smoothed(y, smooth)
                    label = name if kind == "val" or not run.of("val") else None
                    for axes, at in zip(panels, (x[:, 0], x[:, 1] / second), strict=True):
                        _curve(axes, at, factor * y, kind, look, label)
    for axes in grid[0]:
        baselines = _baselines(cell for cell, _ in cells.values())
        for (name, value), dash in zip(baselines.items(), cycle(RULES), strict=False):
            axes.axhline(value, color="0.45", lw=1, ls=dash, label=f"shortcut: {name}")
    grid[0, 0].set_ylabel("accuracy (%)")
    grid[1, 0].set_ylabel("loss")
    grid[1, 0].set_xlabel("step")
    grid[1, 1].set_xlabel(f"{_timed_on(cells) if timed else 'wall time'} ({unit})")
    legend(figure, list(grid[0]), title="pale: training; strong, with markers: validation")
    devices = ", ".join(dict.fromkeys(run.device for run in runs))
    several = any(len(cell.runs) > 1 for cell, _ in cells.values())
    seeds = "a line for each run" if several else "single runs"
    figure.suptitle(f"{title}; {devices}; {seeds}", fontsize=8)
    return figure


def _baselines(cells: Iterable[Cell]) -> dict[str, float]:
    """Return accuracies of shortcuts; runs that predict hidden tokens have none."""
    runs = [run for cell in cells for run in cell.runs if not run.pretraining]
    return {name: x for run in runs for name, x in run.baselines.items()}


def _seconds_alone(cell: Cell) -> float | None:
    """Return the time of a measured training step, alone on its device, or None."""
    return next((ms / 1000 for (_, how), ms in cell.ms_by_place.items() if how == ALONE), None)


def _timed_on(cells: dict[str, tuple[Cell, Style]]) -> str:
    """Return where the steps were measured, which may not be the device of the runs."""
    places = (place for cell, _ in cells.values() for place in cell.ms_by_place)
    return "steps alone on " + ", ".join(dict.fromkeys(d for d, how in places if how == ALONE))


def _series(
    run: Run, kind: str, quantity: str, alone: float | None
) -> tuple[np.ndarray, np.ndarray]:
    """Return (step, seconds) and the quantity of the lines of a kind; alone: s of a step."""
    lines = [line for line in run.of(kind) if line.get(quantity) is not None]
    x = np.array([[line["step"], line["seconds"]] for line in lines], float).reshape(-1, 2)
    if alone is not None:
        x[:, 1] = alone * x[:, 0]
    return x, np.array([line[quantity] for line in lines], float)


def _smoothed(y: np.ndarray, share: float) -> np.ndarray:
    """Return the mean over a window of `share` of the curve, which shrinks at both ends."""
    half = int(share * len(y) / 2)
    if not half:
        return y
    sums = np.cumsum([0.0, *y])
    low = np.maximum(np.arange(len(y)) - half, 0)
    high = np.minimum(np.arange(len(y)) + half + 1, len(y))
    return (sums[high] - sums[low]) / (high - low)


def _curve(
    axes: Axes, x: np.ndarray, y: np.ndarray, kind: str, look: Style, label: str | None
) -> None:
    if not len(x):
        return
    options: dict[str, Any] = {"alpha": 0.35, "lw": 0.8}
    if kind == "val":
        options = {"marker": look.marker, "ms": 3, "markevery": max(1, len(x) // 8)}
    axes.plot(x, y, color=look.color, ls=look.line, label=label, **options)


# ---- accuracy against speed


def draw_accuracy_speed(cells: Cells, columns: Sequence[Column]) -> Figure:
    """Draw test accuracy against speed-up over the Transformer; open markers: cut short."""
    across = min(2, len(columns))
    down = -(-len(columns) // across)
    size = (PAGE / 2 * across, 2.4 * down + 0.4)
    figure, grid = plt.subplots(down, across, figsize=size, squeeze=False)
    for axes in grid.flat[len(columns) :]:
        axes.set_visible(False)
    rows = _rows(cells, columns)
    styles, labels = row_styles(rows), row_labels(rows)
    for axes, column in zip(grid.flat, columns, strict=False):
        for row in rows:
            point = _point(cells, row, column)
            if point is None:
                continue
            cell, (x, y) = cells[row, column], point
            spread = cell.spread
            low = None if spread is None else [y - spread]
            high = None if spread is None else [y + spread]
            look: dict[str, Any] = {"low": low, "high": high, "line": False}
            curve(axes, [x], [y], styles[row], labels[row], filled=cell.complete, **look)
        axes.set_title(textwrap.fill(column.text, 36))
        axes.set_xscale("log", base=2)
        axes.margins(0.3, 0.15)
        axes.xaxis.set_major_formatter(lambda x, _: f"{x:g}x")
    for axes in grid[:, 0]:
        axes.set_ylabel("test accuracy (%)")
    for axes in grid[-1]:
        axes.set_xlabel("training speed-up over the Transformer")
    drawn = [cells[row, column] for row, column in cells if column in columns]
    notes = ["bars: standard deviation of the seeds; no bar: a single run"]
    if all(cell.spread is None for cell in drawn):
        notes = ["single runs"]
    notes += ["open: cut short"] if not all(cell.complete for cell in drawn) else []
    figure.suptitle("; ".join(notes), fontsize=8)
    legend(figure, list(grid.flat), most=len(rows))
    return figure


def _point(cells: Cells, row: RowKey, column: Column) -> tuple[float, float] | None:
    """Return (speed-up, accuracy) of a tested cell, None if either is missing."""
    cell, factor = cells.get((row, column)), speedup(cells, row, column)
    if cell is None or factor is None or cell.accuracy is None or not cell.tested:
        return None
    return factor, cell.accuracy
