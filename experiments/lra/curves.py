"""Figures of training runs: learning curves, accuracy against speed, and the names of rows."""

import math
import re
import textwrap
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from itertools import cycle, product
from pathlib import Path
from typing import Any, TypeVar

import pandas as pd
from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter

from experiments.common import figures as f
from experiments.common.figures import MAX_ENTRIES, Style
from experiments.lra import published as lra
from experiments.lra.cells import (
    Cell,
    Cells,
    Column,
    RowKey,
    Steps,
    heads,
    make_cells,
    sorted_columns,
    sorted_rows,
    speedup,
)  # fmt: skip
from experiments.lra.runs import Run

T = TypeVar("T")
USUAL_CONTOUR = "contour 14"  # which labels leave out
UNITS = ((7200, 3600, "h"), (180, 60, "min"), (0, 1, "s"))  # from so many seconds on


# ---- names and styles of rows


def row_labels(keys: Sequence[RowKey]) -> dict[RowKey, str]:
    """Return short names of the rows of a figure, all different.

    A name leaves out what all rows share. A mask is named by its patterns, and only if two names
    would be equal without it.
    """
    words = {key: [key.name, *filter(None, key.label.split(", "))] for key in keys}
    for own in words.values():
        if "contour" in " ".join(key.label for key in keys) and "contour" not in " ".join(own):
            own.insert(1, USUAL_CONTOUR)
    shared = set.intersection(*map(set, words.values())) if len(keys) > 1 else set()
    labels = {
        key: ", ".join(word for word in own if word not in shared) or key.name
        for key, own in words.items()
    }
    for describe in (pattern_names, str):
        count = Counter(labels.values())
        labels = {
            key: f"{text}, {describe(key.mask)}" if count[text] > 1 and key.mask else text
            for key, text in labels.items()
        }
    return labels


def pattern_names(mask: str) -> str:
    """Return the patterns of a mask text: "butterfly + local" of "butterfly:64|local:64"."""
    parts = [part.partition(">>")[0].strip("( )") for part in re.split(r"[|&]", mask)]
    return " + ".join(re.split(r"[:(]", part)[0].replace("_", " ") for part in parts)


def row_styles(keys: Sequence[RowKey]) -> dict[RowKey, Style]:
    """Return the style of each row.

    Rows of one attention differ in marker and dashes, and in colour if there is no other attention.
    """
    if len({key.attention for key in keys}) == 1:
        return dict(zip(keys, cycle(lra.STYLES.values()), strict=False))
    styles: dict[RowKey, Style] = {}
    for key in keys:
        same = sum(other.attention == key.attention for other in styles)
        styles[key] = lra.style(key.attention, same)
    return styles


def groups(items: Sequence[T], other_entries: int = 0) -> list[list[T]]:
    """Divide what a figure shows into groups with legends of at most MAX_ENTRIES entries.

    The first item, the reference, is in every group.

    other_entries: entries of the legend for other things.
    """
    room = MAX_ENTRIES - other_entries
    if len(items) <= room:
        return [list(items)]
    count = math.ceil((len(items) - 1) / (room - 1))
    size = math.ceil((len(items) - 1) / count)
    return [[items[0], *items[1 + i * size : 1 + (i + 1) * size]] for i in range(count)]


# ---- learning curves


def draw_all(runs: Sequence[Run], out: str | Path, steps: Steps | None = None) -> list[Path]:
    """Write every figure that the runs support into the folder `out`; return the paths.

    steps: measured training steps, whose times replace those of the runs in accuracy against speed.

    Raises ValueError if no run has a measurement yet.
    """
    figures: dict[str, Figure] = {}
    with f.style():
        for pretraining in (False, True):
            cells, _ = make_cells(runs, pretraining=pretraining)
            columns = sorted_columns(c for _, c in cells)
            for column, head in zip(columns, heads(columns), strict=True):
                rows = sorted_rows(row for row, at in cells if at == column)
                found = {row: cells[row, column] for row in rows}
                # beside usual runs those with a name=, of other steps say, have their own figure
                names = {row: cell.runs[0].settings.get("name") for row, cell in found.items()}
                if None not in names.values():
                    names = dict.fromkeys(names)
                for name in dict.fromkeys(names.values()):
                    own = {row: cell for row, cell in found.items() if names[row] == name}
                    words = head, "pretraining" * pretraining, name
                    if any(run.lines for cell in own.values() for run in cell.runs):
                        for stem, figure in _curves(", ".join(filter(None, words)), own).items():
                            while stem in figures:  # of a name that differs in signs or capitals
                                stem += "-2"
                            figures[stem] = figure
        cells, _ = make_cells(runs, steps)
        placed = sorted_columns(column for row, column in cells if _point(cells, row, column))
        if placed:
            figures["accuracy-speed"] = draw_accuracy_speed(cells, placed)
        if not figures:
            raise ValueError("no run has a measurement yet: nothing to draw")
        return [
            path for name, figure in figures.items() for path in f.save(figure, Path(out, name))
        ]


def _curves(title: str, cells: Mapping[RowKey, Cell]) -> dict[str, Figure]:
    """Return the figures of a column by file name. Many rows take several figures."""
    rows, others = list(cells), len(_baselines(cells.values()))
    styles, labels = row_styles(rows), row_labels(rows)
    return {
        f.file_name("curves", title, number if number > 1 else ""): draw_curves(
            title, {labels[row]: (cells[row], styles[row]) for row in part}
        )
        for number, part in enumerate(groups(rows, other_entries=others), 1)
    }


def draw_curves(title: str, cells: dict[str, tuple[Cell, Style]]) -> Figure:
    """Draw accuracy above and loss below, by step on the left and by wall time on the right.

    cells: the rows to draw with their styles, by name.
    """
    figure, grid = plt.subplots(2, 2, figsize=(f.PAGE, 4.6), sharex="col", sharey="row")
    runs = [run for cell, _ in cells.values() for run in cell.runs]
    longest = max(run.seconds for run in runs)
    _, second, unit = next(u for u in UNITS if longest >= u[0])
    for name, (cell, look) in cells.items():
        for run in cell.runs:
            for kind in ("train", "val"):
                for axes, (quantity, scale) in zip(
                    grid, (("accuracy", 100), ("loss", 1)), strict=True
                ):
                    lines = [x for x in run.of(kind) if x.get(quantity) is not None]
                    y = pd.Series([scale * x[quantity] for x in lines], dtype=float)
                    if kind == "train":  # means over 2 % of the lines, over fewer at both ends
                        window = 2 * (len(y) // 100) + 1
                        y = y.rolling(window, center=True, min_periods=1).mean()
                    label = name if kind == "val" or not run.of("val") else None
                    _curve(axes[0], [x["step"] for x in lines], y, kind, look, label)
                    _curve(axes[1], [x["seconds"] / second for x in lines], y, kind, look, label)
    baselines = _baselines(cell for cell, _ in cells.values())
    for axes, (name, value) in product(grid[0], baselines.items()):
        dash = ":" if name == "majority" else "-."
        axes.axhline(value, color="0.45", lw=1, ls=dash, label=f"shortcut: {name}")
    grid[0, 0].set_ylabel("accuracy (%)")
    grid[1, 0].set_ylabel("loss")
    grid[1, 0].set_xlabel("step")
    grid[1, 0].xaxis.set_major_formatter(EngFormatter(sep=""))  # 10k
    grid[1, 1].set_xlabel(f"wall time ({unit})")
    f.legend(figure, list(grid[0]), title="pale: training; strong, with markers: validation")
    devices = ", ".join(dict.fromkeys(run.device for run in runs))
    several = any(len(cell.runs) > 1 for cell, _ in cells.values())
    seeds = "a line for each run" if several else "single runs"
    figure.suptitle(f"{title}; {devices}; {seeds}", fontsize=8)
    return figure


def _baselines(cells: Iterable[Cell]) -> dict[str, float]:
    """Return accuracies of shortcuts; runs that predict hidden tokens have none."""
    runs = [run for cell in cells for run in cell.runs if not run.pretraining]
    return {name: x for run in runs for name, x in run.baselines.items()}


def _curve(axes: Axes, x: Any, y: Any, kind: str, look: Style, label: str | None) -> None:
    if len(x):
        options: dict[str, Any] = {"alpha": 0.35, "lw": 0.8}
        if kind == "val":
            options = {"marker": look.marker, "ms": 3, "markevery": max(1, len(x) // 8)}
        axes.plot(x, y, color=look.color, ls=look.line, label=label, **options)


# ---- accuracy against speed


def draw_accuracy_speed(cells: Cells, columns: Sequence[Column]) -> Figure:
    """Draw test accuracy against speed-up over the Transformer; open markers: cut short."""
    across = min(2, len(columns))
    down = -(-len(columns) // across)
    size = (f.PAGE / 2 * across, 2.4 * down + 0.4)
    figure, grid = plt.subplots(down, across, figsize=size, squeeze=False)
    for axes in grid.flat[len(columns) :]:
        axes.set_visible(False)
    rows = sorted_rows(row for row, column in cells if column in columns)
    styles, labels = row_styles(rows), row_labels(rows)
    for axes, column in zip(grid.flat, columns, strict=False):
        for row in rows:
            if (point := _point(cells, row, column)) is None:
                continue
            cell, (x, y) = cells[row, column], point
            low, high = (None if cell.spread is None else [y + s * cell.spread] for s in (-1, 1))
            look: dict[str, Any] = {"low": low, "high": high, "line": False}
            f.curve(axes, [x], [y], styles[row], labels[row], filled=cell.complete, **look)
        axes.set_title(textwrap.fill(column.text, 36))
        axes.set_xscale("log", base=2)
        axes.margins(0.3, 0.15)
        axes.xaxis.set_major_formatter(lambda x, _: f"{x:g}x")
    for axes in grid[:, 0]:
        axes.set_ylabel("test accuracy (%)")
    for axes in grid[-1]:
        axes.set_xlabel("training speed-up over the Transformer")
    drawn = [cells[key] for key in cells if key[1] in columns and _point(cells, *key)]
    notes = ["bars: standard deviation of the seeds; no bar: a single run"]
    if all(cell.spread is None for cell in drawn):
        notes = ["single runs"]
    notes += ["open: cut short"] if not all(cell.complete for cell in drawn) else []
    figure.suptitle("; ".join(notes), fontsize=8)
    f.legend(figure, list(grid.flat), most=len(rows))
    return figure


def _point(cells: Cells, row: RowKey, column: Column) -> tuple[float, float] | None:
    """Return (speed-up, accuracy) of a tested cell, None if either is missing."""
    cell, factor = cells.get((row, column)), speedup(cells, row, column)
    if cell is None or factor is None or cell.accuracy is None or not cell.tested:
        return None
    return factor, cell.accuracy
