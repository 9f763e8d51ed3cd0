"""Figures of experiments.lra_speed from its rows: speed-up by task, time and memory by length."""

import re
from collections.abc import Iterable, Sequence
from pathlib import Path

import matplotlib
import numpy as np
from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, NullFormatter, NullLocator

from experiments.common.figures import PAGE, RC, Style, legend, save, token_text
from experiments.lra import published as lra
from experiments.lra.speed_rows import SWEEP, StepRow, measured, newest
from experiments.lra.speed_table import gain, names, row_name

FACTORS = (0.25, 0.5, 0.75, 1, 1.5, 2, 3, 4, 6, 8, 12, 16, 24, 32, 64)  # on the axis of speed-ups


def draw_all(rows: Sequence[StepRow], out: str | Path) -> list[Path]:
    """Writes every figure that the rows give into the folder `out`; the files' paths."""
    out = Path(out)
    out.mkdir(parents=True, exist_ok=True)
    figures: dict[str, Figure] = {}
    with matplotlib.rc_context(RC):
        for device, precision in dict.fromkeys((row.device, row.precision) for row in rows):
            here = [r for r in newest(rows) if (r.device, r.precision) == (device, precision)]
            slug = re.sub(r"[^a-z0-9]+", "-", f"{device} {precision}".lower()).strip("-")
            tasks = [row for row in measured(here) if row.task != SWEEP]
            sweep = [row for row in here if row.task == SWEEP]
            if any(gain(row, tasks) for row in tasks if row.attention != lra.BASE):
                figures[f"lra-speedup-{slug}"] = draw_speedup(tasks)
            if len({row.length for row in measured(sweep)}) > 1:
                figures[f"lra-length-{slug}"] = draw_length(sweep)
        return [path for name, figure in figures.items() for path in save(figure, out / name)]


def _styles(rows: Iterable[StepRow]) -> dict[str, Style]:
    """The style of each line of the legend; masks of one attention differ."""
    found: dict[str, Style] = {}
    attentions = {row_name(row): row.attention for row in rows}
    for name in names(rows):
        same = sum(attentions[other] == attentions[name] for other in found)
        found[name] = lra.style(attentions[name], same)
    return found


def draw_speedup(rows: Sequence[StepRow]) -> Figure:
    """Speed-up over the standard Transformer and peak memory of a step, task by task."""
    tasks = sorted({row.task for row in rows}, key=lra.task_order)
    with_memory = any(row.peak_mib for row in rows)
    figure, grid = plt.subplots(
        1 + with_memory, 1, figsize=(PAGE, 2.7 * (1 + with_memory) + 0.7), squeeze=False
    )
    styles = _styles(rows)
    quantities = [(grid[0, 0], lambda row: gain(row, rows), "speed-up of a training step")]
    if with_memory:
        quantities.append((grid[1, 0], lambda row: row.peak_mib, "peak memory (MiB)"))
    for axes, quantity, label in quantities:
        for i, (name, style) in enumerate(styles.items()):
            own = {row.task: quantity(row) for row in rows if row_name(row) == name}
            shift = 0.7 * ((i + 0.5) / len(styles) - 0.5)
            points = [(t + shift, own[task]) for t, task in enumerate(tasks) if own.get(task)]
            if points:
                axes.plot(*zip(*points, strict=True), color=style.color, marker=style.marker,
                          ls="none", label=name)  # fmt: skip
        axes.set_yscale("log", base=2)
        axes.set_ylabel(label)
        axes.set_xlim(-0.5, len(tasks) - 0.5)
        axes.grid(axis="x", visible=False)
        for edge in range(1, len(tasks)):
            axes.axvline(edge - 0.5, color="0.9", lw=0.6)
    quantities[0][0].axhline(1, color="0.25", lw=1)
    quantities[0][0].yaxis.set_major_locator(FixedLocator(FACTORS))
    quantities[0][0].yaxis.set_minor_locator(NullLocator())
    quantities[0][0].yaxis.set_major_formatter(lambda y, _: f"{y:g}x")
    if with_memory:
        grid[1, 0].yaxis.set_major_formatter(lambda y, _: f"{y:g}")
    sizes = {row.task: (row.batch, row.pair, row.length) for row in rows}
    for axes in grid[:, 0]:
        axes.set_xticks(range(len(tasks)), [_task_text(t, *sizes[t]) for t in tasks])
    legend(figure, [grid[0, 0]], columns=3)
    figure.suptitle(_caption(rows[0]), fontsize=8)
    return figure


def _task_text(task: str, batch: int, pair: int, length: int) -> str:
    twice = "2 x " if pair == 2 else ""
    return f"{lra.LABELS.get(task, task)}\n{batch} x {twice}{token_text(length)}"


def draw_length(rows: Sequence[StepRow]) -> Figure:
    """Time of a step, of a layer alone, and memory, by length with the tokens of a batch fixed."""
    quantities = [
        (lambda row: row.ms_median, "a training step (ms)"),
        (lambda row: row.attention_ms, "attention, one layer (ms)"),
        (lambda row: row.peak_mib, "peak memory (MiB)"),
    ]
    quantities = [q for q in quantities if any(q[0](row) for row in rows)]
    figure, grid = plt.subplots(1, len(quantities), figsize=(PAGE, 3.3), squeeze=False, sharex=True)
    for axes, (quantity, label) in zip(grid.flat, quantities, strict=True):
        for name, style in _styles(rows).items():
            own = sorted((r for r in rows if row_name(r) == name), key=lambda r: r.length)
            points = [(row.length, quantity(row)) for row in own if quantity(row)]
            if not points:
                continue
            short = len(points) < len(own)
            axes.plot(
                *zip(*points, strict=True),
                color=style.color,
                marker=style.marker,
                ls=style.line,
                label=name + (", where it fits" if short else ""),
            )
        axes.set(xscale="log", yscale="log", xlabel="length (tokens)", title=label)
        _ticks(axes, sorted({row.length for row in rows}))
    tokens = {row.batch * row.length for row in rows}
    legend(figure, [grid[0, 0]], columns=3)
    batch = f", {token_text(tokens.pop())} tokens a batch" if len(tokens) == 1 else ""
    figure.suptitle(_caption(rows[0]) + batch, fontsize=8)
    return figure


def _ticks(axes: Axes, lengths: Sequence[int]) -> None:
    axes.xaxis.set_major_locator(FixedLocator(lengths))
    axes.xaxis.set_major_formatter(lambda n, _: token_text(int(n)))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_major_formatter(lambda y, _: f"{y:g}")
    low, high = np.array(axes.get_ylim())
    if high / low > 30:
        axes.yaxis.set_minor_formatter(NullFormatter())


def _caption(row: StepRow) -> str:
    model = f"{row.layers} layers, width {row.dim}, {row.heads} heads"
    return f"{row.device}, {row.precision}; {model}"
