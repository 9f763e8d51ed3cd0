"""Learning curves, and accuracy against speed, from the folders of training runs, as PNG and SVG.

    python -m experiments.curves
    python -m experiments.curves 'runs=[runs/train/listops,runs/train/text]' out=docs/figures/lra

For each task: accuracy and loss by step and by wall time, training pale and validation strong, one
line a run. Then test accuracy against training speed-up, a panel a task.
"""

import re
import textwrap
from collections.abc import Sequence
from itertools import cycle
from pathlib import Path
from typing import Any

import hydra
import matplotlib
import numpy as np
from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from omegaconf import DictConfig

from experiments.common.figures import PAGE, RC, Style, legend, save, token_text
from experiments.lra import published as lra
from experiments.lra.cells import Cell, Cells, Column, RowKey, make_cells, speedup
from experiments.lra.run_files import read_runs
from experiments.lra.runs import Run

RULES = ((0, (1, 1.5)), (0, (4, 2, 1, 2)))  # dashes of the shortcuts
UNITS = ((7200, 3600, "h"), (180, 60, "min"), (0, 1, "s"))  # from so many seconds on


def draw_all(runs: Sequence[Run], out: str | Path, smooth: float = 0.02) -> list[Path]:
    """Writes every figure that the runs give into the folder `out`; the files' paths.

    Raises ValueError where no run has got as far as a measurement.
    """
    out = Path(out)
    figures: dict[str, Figure] = {}
    cells, _ = make_cells(runs)
    with matplotlib.rc_context(RC):
        for what, found in (("", cells), ("-pretraining", make_cells(runs, pretraining=True)[0])):
            for column in _columns(found):
                chosen = {row: found[row, c] for row, c in _sorted(found) if c == column}
                if any(_measured(run) for cell in chosen.values() for run in cell.runs):
                    title = column.text + what.replace("-", ", ")
                    figures[f"curves-{_slug(column)}{what}"] = draw_curves(title, chosen, smooth)
        columns = _columns(cells)
        placed = [c for c in columns if any(_point(cells, row, c) for row, d in cells if d == c)]
        if placed:
            figures["accuracy-speed"] = draw_accuracy_speed(cells, placed)
        if not figures:
            raise ValueError("no run has a measurement yet: nothing to draw")
        out.mkdir(parents=True, exist_ok=True)
        return [path for name, figure in figures.items() for path in save(figure, out / name)]


def _columns(cells: Cells) -> list[Column]:
    return sorted({c for _, c in cells}, key=lambda c: (lra.task_order(c.task), c))


def _sorted(cells: Cells) -> list[tuple[RowKey, Column]]:
    return sorted(cells, key=lambda k: (lra.attention_order(k[0].attention), k))


def _measured(run: Run) -> bool:
    return bool(run.of("train") or run.of("val"))


# ---- learning curves


def draw_curves(title: str, cells: dict[RowKey, Cell], smooth: float = 0.02) -> Figure:
    """Accuracy above and loss below, by step on the left and by wall time on the right."""
    figure, grid = plt.subplots(2, 2, figsize=(PAGE, 5.2), sharex="col", sharey="row")
    longest = max(run.seconds for cell in cells.values() for run in cell.runs)
    _, second, unit = next(u for u in UNITS if longest >= u[0])
    styles = row_styles(list(cells))
    for row, cell in cells.items():
        for run in cell.runs:
            for panels, quantity, factor in zip(grid, ("accuracy", "loss"), (100, 1), strict=True):
                for kind in ("train", "val"):
                    x, y = _series(run, kind, quantity)
                    if kind == "train":
                        y = _smoothed(y, smooth)
                    label = row.text if kind == "val" or not run.of("val") else None
                    for axes, at in zip(panels, (x[:, 0], x[:, 1] / second), strict=True):
                        _curve(axes, at, factor * y, kind, styles[row], label)
    baselines = {n: b for cell in cells.values() for r in cell.runs for n, b in r.baselines.items()}
    for axes in grid[0]:
        for (name, value), dash in zip(baselines.items(), cycle(RULES), strict=False):
            axes.axhline(value, color="0.45", lw=1, ls=dash, label=f"shortcut: {name}")
    grid[0, 0].set_ylabel("accuracy (%)")
    grid[1, 0].set_ylabel("loss")
    grid[1, 0].set_xlabel("step")
    grid[1, 1].set_xlabel(f"wall time ({unit})")
    legend(figure, list(grid[0]), title="training pale, validation strong with markers")
    figure.suptitle(f"{title}; {_devices(cells.values())}", fontsize=8)
    return figure


def _series(run: Run, kind: str, quantity: str) -> tuple[np.ndarray, np.ndarray]:
    """(step, seconds) and the quantity of the lines of a kind."""
    lines = [line for line in run.of(kind) if line.get(quantity) is not None]
    x = np.array([[line["step"], line["seconds"]] for line in lines], float).reshape(-1, 2)
    return x, np.array([line[quantity] for line in lines], float)


def _smoothed(y: np.ndarray, share: float) -> np.ndarray:
    """The mean over a window of `share` of the curve, which shrinks at both ends."""
    half = int(share * len(y) / 2)
    if not half:
        return y
    sums = np.cumsum([0.0, *y])
    low = np.maximum(np.arange(len(y)) - half, 0)
    high = np.minimum(np.arange(len(y)) + half + 1, len(y))
    return (sums[high] - sums[low]) / (high - low)


def _curve(
    axes: Axes, x: np.ndarray, y: np.ndarray, kind: str, style: Style, label: str | None
) -> None:
    if not len(x):
        return
    options: dict[str, Any] = {"alpha": 0.35, "lw": 0.8}
    if kind == "val":
        options = {"marker": style.marker, "ms": 3, "markevery": max(1, len(x) // 8)}
    axes.plot(x, y, color=style.color, ls=style.line, label=label, **options)


def row_styles(keys: Sequence[RowKey]) -> dict[RowKey, Style]:
    """The style of each line; lines of one attention differ in marker and dashes."""
    styles: dict[RowKey, Style] = {}
    for key in keys:
        same = sum(other.attention == key.attention for other in styles)
        styles[key] = lra.style(key.attention, same)
    return styles


def _devices(cells: Any) -> str:
    return ", ".join(dict.fromkeys(run.device for cell in cells for run in cell.runs))


# ---- accuracy against speed


def draw_accuracy_speed(cells: Cells, columns: Sequence[Column]) -> Figure:
    """Test accuracy against speed-up over the Transformer: filled complete, open cut short."""
    across = min(3, len(columns))
    down = -(-len(columns) // across)
    figure, grid = plt.subplots(
        down,
        across,
        figsize=(PAGE / 3 * max(across, 1.6), 2.3 * down + 0.9),
        squeeze=False,
        sharex=True,
    )
    for axes in grid.flat[len(columns) :]:
        axes.set_visible(False)
    styles = row_styles(list(dict.fromkeys(row for row, _ in _sorted(cells))))
    for axes, column in zip(grid.flat, columns, strict=False):
        for row, at in _sorted(cells):
            if at == column and (point := _point(cells, row, column)):
                _mark(axes, point, cells[row, column], styles[row], row.text)
        axes.set_title(textwrap.fill(column.text, 36))
        axes.set_xscale("log", base=2)
        axes.margins(0.08)  # whole markers
        axes.xaxis.set_major_formatter(lambda x, _: f"{x:g}x")
    for axes in grid[:, 0]:
        axes.set_ylabel("test accuracy (%)")
    for axes in grid[-1]:
        axes.set_xlabel("training speed-up")
    legend(
        figure,
        list(grid.flat[: len(columns)]),
        columns=min(3, across + 1),
        title="open: cut short; bars: standard deviation of the seeds",
    )
    return figure


def _point(cells: Cells, row: RowKey, column: Column) -> tuple[float, float] | None:
    """(speed-up, accuracy) of a tested cell; None where either is missing."""
    cell, factor = cells.get((row, column)), speedup(cells, row, column)
    if cell is None or factor is None or cell.accuracy is None or not cell.tested:
        return None
    return factor, cell.accuracy


def _mark(axes: Axes, point: tuple[float, float], cell: Cell, style: Style, label: str) -> None:
    axes.errorbar(
        *point,
        yerr=cell.spread,
        color=style.color,
        marker=style.marker,
        ls="none",
        ms=5.5,
        mfc=style.color if cell.complete else "white",
        elinewidth=0.8,
        label=label,
    )


def _slug(column: Column) -> str:
    words = [column.task, column.source.lower()]
    words += [token_text(column.length)] if column.length else []
    return re.sub(r"[^a-z0-9_]+", "-", " ".join(words)).strip("-")


@hydra.main(version_base="1.3", config_path="conf", config_name="curves")
def entry(config: DictConfig) -> None:
    matplotlib.use("Agg")  # no display is needed
    runs = config.runs if isinstance(config.runs, str) else list(config.runs)
    paths = draw_all(read_runs(runs), config.out, config.smooth)
    print("\n".join(f"written: {path}" for path in paths))


if __name__ == "__main__":
    entry()
