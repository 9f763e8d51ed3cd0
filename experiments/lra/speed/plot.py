"""Figures of measured training steps: speed-up by task, time and memory by length."""

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from matplotlib import pyplot as plt
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, NullLocator

from experiments.common.figures import (
    PAGE,
    Style,
    curve,
    file_name,
    legend,
    length_axis,
    plain_log_axis,
    save,
    style,
    token_text,
)
from experiments.lra import published as lra
from experiments.lra.cells import RowKey, sorted_rows
from experiments.lra.figures import groups, row_labels, row_styles
from experiments.lra.speed.rows import SWEEP, StepRow, measured, newest
from experiments.lra.speed.table import gain

FACTORS = (0.25, 0.5, 1, 2, 4, 8, 16, 32, 64)  # on the axis of speed-ups
MARKERS = "osD^vPX<"
Quantity = tuple[Callable[[StepRow], float | None], str]


def draw_all(rows: Sequence[StepRow], out: str | Path) -> list[Path]:
    """Writes every figure that the rows support into the folder `out`, and returns the paths."""
    out = Path(out)
    figures: dict[str, Figure] = {}
    with style():
        for place in dict.fromkeys((row.device, row.precision) for row in rows):
            here = [row for row in newest(rows) if (row.device, row.precision) == place]
            tasks = [row for row in measured(here) if row.task != SWEEP]
            sweep = [row for row in here if row.task == SWEEP]
            if any(gain(row, tasks) for row in tasks if row.attention != lra.BASE):
                figures[file_name("lra speedup", *place)] = draw_speedup(tasks)
            if len({row.length for row in measured(sweep)}) > 1:
                figures[file_name("lra length", *place)] = draw_length(sweep)
        return [
            path
            for name, figure in figures.items()
            for path in save(figure, out / name, option="plots")
        ]


def _key(row: StepRow) -> RowKey:
    return RowKey(row.attention, row.option, "")


def draw_speedup(rows: Sequence[StepRow]) -> Figure:
    """Speed-up over the standard Transformer and peak memory of a step, for each attention."""
    quantities: list[Quantity] = [(lambda row: gain(row, rows), "speed-up of a training step")]
    if any(row.peak_mib for row in rows):
        quantities.append((lambda row: row.peak_mib, "peak memory (MiB)"))
    keys = sorted_rows(map(_key, rows))
    tasks = sorted({row.task for row in rows}, key=partial(lra.order, lra.LABELS))
    count = len(quantities)
    figure, grid = plt.subplots(
        count, 1, figsize=(PAGE, 2.2 * count + 0.9), sharex=True, squeeze=False
    )
    colors = plt.rcParams["axes.prop_cycle"].by_key()["color"]
    for axes, (quantity, label) in zip(grid.flat, quantities, strict=True):
        for i, task in enumerate(tasks):
            own = {_key(row): row for row in rows if row.task == task}
            shift = 0.6 * ((i + 0.5) / len(tasks) - 0.5)
            x = [keys.index(key) + shift for key in own if quantity(own[key])]
            y = [value for key in own if (value := quantity(own[key]))]
            look = Style(colors[i % len(colors)], MARKERS[i % len(MARKERS)], "-")
            curve(axes, x, y, look, _task_text(next(iter(own.values()))), line=False)
        plain_log_axis(axes, base=2, unit="x" if quantity is quantities[0][0] else "")
        axes.set_ylabel(label)
        axes.grid(axis="x", visible=False)
        for edge in range(1, len(keys)):
            axes.axvline(edge - 0.5, color="0.9", lw=0.6)
    grid[0, 0].axhline(1, color="0.25", lw=1)
    grid[0, 0].yaxis.set_major_locator(FixedLocator(FACTORS))
    grid[0, 0].yaxis.set_minor_locator(NullLocator())
    labels = row_labels(keys)
    grid[-1, 0].set_xticks(range(len(keys)), [labels[k] for k in keys], rotation=20, ha="right")
    grid[-1, 0].set_xlim(-0.5, len(keys) - 0.5)
    legend(figure, [grid[0, 0]], columns=3, title="batch x length")
    figure.suptitle(_caption(rows[0]), fontsize=8)
    return figure


def _task_text(row: StepRow) -> str:
    twice = "2 x " if row.pair == 2 else ""
    size = f"{row.batch} x {twice}{token_text(row.length)}"
    return f"{lra.LABELS.get(row.task, row.task)}, {size}"


def draw_length(rows: Sequence[StepRow]) -> Figure:
    """Time of a step, of a layer alone, and memory, by length with the tokens of a batch fixed.

    The standard Transformer is in every line of panels.
    """
    quantities: list[Quantity] = [
        (lambda row: row.ms_median, "a training step (ms)"),
        (lambda row: row.attention_ms, "attention, one layer (ms)"),
        (lambda row: row.peak_mib, "peak memory (MiB)"),
    ]
    quantities = [q for q in quantities if any(q[0](row) for row in rows)]
    keys = sorted_rows(map(_key, rows))
    parts, labels, styles = groups(keys), row_labels(keys), row_styles(keys)
    figure, grid = plt.subplots(
        len(parts),
        len(quantities),
        figsize=(PAGE, 2.3 * len(parts) + 0.3),
        squeeze=False,
        sharex=True,
        sharey="col",
    )
    lengths = sorted({row.length for row in rows})
    for number, part in enumerate(parts):
        for axes, (quantity, label) in zip(grid[number], quantities, strict=True):
            for key in part:
                own = sorted((r for r in rows if _key(r) == key), key=lambda r: r.length)
                points = [(row.length, value) for row in own if (value := quantity(row))]
                short = ", where it fits" if len(points) < len(own) else ""
                if points:
                    x, y = zip(*points, strict=True)
                    curve(axes, x, y, styles[key], labels[key] + short)
            length_axis(axes, lengths[::2] if len(lengths) > 4 else lengths)
            plain_log_axis(axes)
            axes.set_title(label if number == 0 else "")
            if number < len(parts) - 1:
                axes.set_xlabel("")
        grid[number, -1].legend(loc="center left", bbox_to_anchor=(1.02, 0.5))
    tokens = {row.batch * row.length for row in rows}
    batch = f", {token_text(tokens.pop())} tokens a batch" if len(tokens) == 1 else ""
    figure.suptitle(_caption(rows[0]) + batch, fontsize=8)
    return figure


def _caption(row: StepRow) -> str:
    model = f"{row.layers} layers, width {row.dim}, {row.heads} heads"
    return f"{row.device}, {row.precision}; {model}"
