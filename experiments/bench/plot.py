"""Figures of experiments.speed from its rows: speed-up by sparsity, and time by length."""

import re
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator

from experiments.bench.cases import DENSE
from experiments.bench.providers import PROVIDERS
from experiments.bench.tables import SpeedRow, best_dense, caption, grouped, label_of, shape_of
from experiments.common import figures as f

FLEX = ("flex", "flex_autotuned")  # the peer beside ours in speed-ups
GREY = "0.35"


def draw_speed(rows: Sequence[SpeedRow]) -> dict[str, Figure]:
    """Every figure that the measured rows give, by file name."""
    figures: dict[str, Figure] = {}
    for group in grouped(rows, lambda r: tuple(x for x in shape_of(r) if x != r.direction)):
        if len({r.density for r in _compared(group)}) > 1:
            figures[_file("speedup", group[0])] = draw_speedup(group)
    for group in grouped(rows, lambda r: caption(r, length=False)):
        if figure := draw_length(group):
            figures[_file("length", group[0], length=False)] = figure
    return figures


def draw_speedup(rows: Sequence[SpeedRow]) -> Figure:
    """Draw a row of two panels for each direction, against sparsity: the speed-up of ours and of
    FlexAttention over the fastest dense attention, and the rate of the computed blocks of all.

    Masks without a block are left out: half the density is a step to the right, and density 0 has
    no place on that axis.
    """
    rows = [row for row in rows if row.density]
    best, ours = best_dense(rows), best_dense(rows, own=True)
    deepest = float(max(np.log2(1 / row.density) for row in rows))
    groups = sorted(grouped(rows, lambda r: r.direction), key=lambda g: g[0].direction != "forward")
    size = (f.PAGE, 0.2 + 1.95 * len(groups))
    figure, grid = plt.subplots(len(groups), 2, figsize=size, sharex=True, squeeze=False)
    for (left, right), group in zip(grid, groups, strict=True):
        direction = group[0].direction
        left.set_title(f"{direction}: speed-up over the fastest dense", loc="left")
        right.set_title(f"{direction}: TFLOP/s of the computed blocks", loc="left")
        right.set_ylim(0, 1.1 * max(row.tflops or 0 for row in group))
        dense, own = (found.get(shape_of(group[0])) for found in (best, ours))
        if dense is not None:
            _dense_notes(left, dense, own)
            x = np.linspace(0, deepest)
            f.reference(left, list(x), list(2**x), "ideal: 1 / density")
            f.plain_log_axis(left, base=2, unit="x")
            left.yaxis.set_major_locator(FixedLocator([2.0**i for i in range(-6, 12)]))
        providers = {r.provider: r.own for r in _compared(group)}
        for provider in sorted(providers, key=lambda name: not providers[name]):
            measured = [r for r in group if r.provider == provider and r.mask != DENSE]
            if dense is not None and (providers[provider] or provider in FLEX):
                _curves(left, measured, lambda row, ms, dense=dense: dense.ms / ms)
            _curves(right, measured, lambda row, ms: (row.tflops or 0) * row.ms / ms)
        if any(not row.random for row in group if row.mask != DENSE):
            right.plot([], [], "o", mfc="white", color=GREY, label="open: other masks")
    ticks = range(int(np.ceil(deepest - 1e-9)) + 1)  # equal steps of halved density
    for axes in grid[-1]:
        axes.set_xticks(list(ticks), [f"{100 * (1 - 0.5**t):.3g}" for t in ticks])
        axes.set_xlabel("sparsity: blocks that are skipped (%)")
    f.legend(figure, list(grid.flat), columns=4, most=12)
    figure.suptitle(caption(rows[0]), fontsize=8)
    return figure


def _dense_notes(axes: Axes, dense: SpeedRow, own: SpeedRow | None) -> None:
    """Say which dense attention is the 1x, and where our own stands."""
    axes.axhline(1, color=GREY, lw=1)
    text = f"1x: {label_of(dense.provider)}, dense"
    if own is not None and own is not dense:
        text += f"\n{dense.ms / own.ms:.2f}x: {label_of(own.provider)}, dense"
    axes.text(0.03, 0.97, text, transform=axes.transAxes, va="top", fontsize=6.5)


def _curves(
    axes: Axes, rows: Sequence[SpeedRow], value: Callable[[SpeedRow, float], float]
) -> None:
    """Draw random masks as a curve for each block size, smaller ones paler, and others as open
    markers, with the 20th and the 80th percentile of their times.

    value: of a row and one of its times in ms, what the axis shows.
    """
    rows = sorted(rows, key=lambda r: (-r.block_q, r.density))
    for group in grouped(rows, lambda r: (r.random, r.block_q, r.block_k) if r.random else ()):
        provider, random = group[0].provider, group[0].random
        low, y, high = (
            [value(r, r[name] or r.ms) for r in group] for name in ("ms_p80", "ms_median", "ms_p20")
        )
        name, most = label_of(provider), max(r.block_q for r in rows)
        pale = random and group[0].block_q < most
        label = f"{name}, blocks of {group[0].block_q}" if pale else name
        look: dict[str, Any] = {"line": random, "filled": random, "alpha": 0.5 if pale else 1.0}
        x = [float(np.log2(1 / r.density)) for r in group]
        f.curve(axes, x, y, _style(provider), label, low=low, high=high, **look)


def _compared(rows: Sequence[SpeedRow]) -> list[SpeedRow]:
    """Return the rows of random masks, or of all masks where no mask is random."""
    masked = [r for r in rows if r.mask != DENSE and r.density]
    return [r for r in masked if r.random] or masked


def draw_length(rows: Sequence[SpeedRow]) -> Figure | None:
    """Return time against length, a panel a direction, of what several lengths were measured of."""
    what = lambda r: (r.provider, r.mask, r.block_q, r.block_k)  # noqa: E731
    values: dict[str, dict[str, list[f.Curve]]] = {}
    for direction in sorted({r.direction for r in rows}, reverse=True):
        own = sorted((r for r in rows if r.direction == direction), key=lambda r: r.n_q)
        lines = [line for line in grouped(own, what) if len(line) > 1]
        curves = []
        for line in sorted(lines, key=lambda line: not line[0].own):
            masked = line[0].mask != DENSE
            look = _style(line[0].provider)._replace(line="--" if masked else "-")
            name = label_of(line[0].provider) + (f": {line[0].mask}" if masked else "")
            curves.append(f.Curve(name, look, {r.n_q: r.ms for r in line}))
        if curves:
            values[f"{direction} (ms)"] = {"": curves}
    return f.length_figure(values, caption(rows[0], length=False)) if values else None


# ---- what the figures share


def _file(kind: str, row: SpeedRow, *, length: bool = True) -> str:
    """Return the stem of a file, such as speedup-h200-b2-h16-n16384-d128-bfloat16."""
    text = caption(row, length=length).removeprefix("NVIDIA ")
    return f.file_name(kind, re.sub(r"\b([BHND]) (?=\d)", r"\1", text))


def _style(provider: str) -> f.Style:
    return PROVIDERS[provider].style if provider in PROVIDERS else f.OTHER
