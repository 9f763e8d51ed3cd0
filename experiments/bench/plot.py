"""Figures of experiments.speed from its rows: speed-up by sparsity, time by length, and masks."""

import re
from collections.abc import Callable, Iterable, Sequence
from textwrap import fill
from typing import Any

import numpy as np
from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator

import masks
from experiments.bench.cases import DENSE, LAYOUTS, Case
from experiments.bench.providers import PROVIDERS
from experiments.bench.tables import SpeedRow, best_dense, grouped, label_of, shape_of
from experiments.common import figures as f
from experiments.common.figures import PAGE, RC

FLEX = ("flex", "flex_autotuned")  # the peer beside ours in speed-ups
GREY = "0.35"


def draw_speed(rows: Sequence[SpeedRow]) -> dict[str, Figure]:
    """Every figure that the measured rows give, by file name."""
    figures: dict[str, Figure] = {}
    for group in grouped(rows, lambda r: tuple(x for x in shape_of(r) if x != r.direction)):
        if len({r.density for r in _compared(group)}) > 1:
            figures[_file("speedup", group[0])] = draw_speedup(group)
    for group in grouped(rows, lambda r: caption(r, length=False)):
        if any(len(line) > 1 for line in _by_length(group)):
            figures[_file("length", group[0], length=False)] = draw_length(group)
    if found := patterns(rows):
        figures["masks"] = draw_masks(found)
    return figures


def patterns(rows: Sequence[SpeedRow], most: int = 12) -> list[masks.BlockMask]:
    """Return the masks of the rows, random blocks once, each at the length most rows have."""
    chosen: dict[str, Case] = {}
    for row in sorted(rows, key=lambda r: (-sum(r.n_q == s.n_q for s in rows), r.density)):
        case = Case(**{name: row[name] for name in Case.__dataclass_fields__})
        if row.mask != DENSE and len(chosen) < most:
            chosen.setdefault("random" if row.random else row.mask, case)
    return [case.blocks for case in chosen.values() if case.blocks is not None]


# ---- speed-up and rate by sparsity


def draw_speedup(rows: Sequence[SpeedRow]) -> Figure:
    """Draw a row of two panels for each direction, against sparsity: the speed-up of ours and of
    FlexAttention over the fastest dense attention, and the rate of the computed blocks of all.

    Masks without a block are left out: half the density is a step to the right, and density 0 has
    no place on that axis.
    """
    rows = [row for row in rows if row.density]
    best, ours = best_dense(rows), best_dense(rows, own=True)
    deepest = max(np.log2(1 / row.density) for row in rows)
    letters = _letters(rows)
    figure, panels = _panels(rows, columns=2)
    for (left, right), group in panels:
        direction = group[0].direction
        left.set_title(f"{direction}: speed-up over the fastest dense", loc="left")
        right.set_title(f"{direction}: TFLOP/s of the computed blocks", loc="left")
        for axes in (left, right):
            _sparsity_axis(axes, deepest)
        right.set_ylim(0, 1.1 * max(row.tflops or 0 for row in group))
        dense, own = (found.get(shape_of(group[0])) for found in (best, ours))
        if dense is None:
            left.text(0.5, 0.5, "no dense row", transform=left.transAxes, ha="center")
        else:
            _dense_notes(left, dense, own)
            x = np.linspace(0, deepest)
            f.reference(left, list(x), list(2**x), "ideal: 1 / density")
            f.plain_log_axis(left, base=2, unit="x")
            left.yaxis.set_major_locator(FixedLocator([2.0**i for i in range(-6, 12)]))
        for provider in _masked_providers(group):
            measured = [r for r in group if r.provider == provider]
            if dense is not None and (measured[0].own or provider in FLEX):
                _curves(left, measured, lambda row, ms, dense=dense: dense.ms / ms, letters)
            _curves(right, measured, lambda row, ms: (row.tflops or 0) * row.ms / ms, letters)
        _keys(right, group, letters)
    for axes in panels[-1][0]:
        axes.set_xlabel("sparsity: blocks that are skipped (%)")
    f.legend(figure, [axes for row, _ in panels for axes in row], columns=4, most=12)
    figure.suptitle(caption(rows[0]), fontsize=8)
    return figure


def _sparsity_axis(axes: Axes, deepest: float) -> None:
    """Mark sparsity at equal steps of halved density."""
    ticks = range(int(np.ceil(deepest - 1e-9)) + 1)
    axes.set_xticks(list(ticks), [f"{100 * (1 - 0.5**t):.3g}" for t in ticks])


def _dense_notes(axes: Axes, dense: SpeedRow, own: SpeedRow | None) -> None:
    """Say which dense attention is the 1x, and where our own stands."""
    axes.axhline(1, color=GREY, lw=1)
    text = f"1x: {label_of(dense.provider)}, dense"
    if own is not None and own is not dense:
        text += f"\n{dense.ms / own.ms:.2f}x: {label_of(own.provider)}, dense"
    axes.text(0.03, 0.97, text, transform=axes.transAxes, va="top", fontsize=6.5)


def _letters(rows: Iterable[SpeedRow]) -> dict[str, str]:
    """Return a letter for each mask that is neither random nor dense, in the order of the rows."""
    texts = dict.fromkeys(r.mask for r in rows if r.mask != DENSE and not r.random)
    return {text: "abcdefghijklmnopqrstuvwxyz"[i % 26] for i, text in enumerate(texts)}


def _pattern(mask: str) -> str:
    """Return the text of a mask without its numbers, which the masks of one pattern share."""
    return re.sub(r"[\d.]+", "#", mask)


def _curves(
    axes: Axes,
    rows: Sequence[SpeedRow],
    value: Callable[[SpeedRow, float], float],
    letters: dict[str, str],
) -> None:
    """Draw random masks as a curve for each block size, smaller ones paler, and others as open
    markers with the letter of their mask; one pattern at several densities is a curve.

    value: of a row and one of its times in ms, what the axis shows.
    """
    name, style = label_of(rows[0].provider), _style(rows[0].provider)
    masked = sorted((r for r in rows if r.mask != DENSE), key=lambda r: r.density)
    by_block = grouped((r for r in masked if r.random), lambda r: (r.block_q, r.block_k))
    by_block.sort(key=lambda group: -group[0].block_q)
    look: dict[str, Any] = {"color": style.color, "fontsize": 6.5, "zorder": 9}
    look |= {"textcoords": "offset points", "xytext": (5, -2)}
    for i, group in enumerate(by_block):
        _points(axes, group, value, style, None if i else name, alpha=max(0.3, 1 - 0.25 * i))
        if i:
            at = float(np.log2(1 / group[0].density)), value(group[0], group[0].ms)
            box = {"fc": "white", "ec": "none", "pad": 0.6, "alpha": 0.8}
            axes.annotate(str(group[0].block_q), at, bbox=box, **look)
    label = None if by_block else name
    for group in grouped((r for r in masked if not r.random), lambda r: _pattern(r.mask)):
        several = len({r.density for r in group}) > 1
        _points(axes, group, value, style, label, line=several, filled=False)
        label = None
        for row in group:
            at = float(np.log2(1 / row.density)), value(row, row.ms)
            axes.annotate(letters[row.mask], at, **look)


def _points(
    axes: Axes,
    rows: Sequence[SpeedRow],
    value: Callable[[SpeedRow, float], float],
    style: f.Style,
    label: str | None,
    **look: Any,
) -> None:
    """Draw the values of rows, with those of the 20th and the 80th percentile of their times."""
    x = [float(np.log2(1 / r.density)) for r in rows]
    low, y, high = (
        [value(r, r[name] or r.ms) for r in rows] for name in ("ms_p80", "ms_median", "ms_p20")
    )
    f.curve(axes, x, y, style, label, low=low, high=high, **look)


def _keys(axes: Axes, rows: Sequence[SpeedRow], letters: dict[str, str]) -> None:
    """Add legend entries of what several curves share, and of what the letters stand for."""
    for mask, letter in letters.items():
        axes.plot([], [], "o", mfc="white", color=GREY, label=fill(f"{letter}: {mask}", 34))
    sizes = sorted({r.block_q for r in rows if r.random})
    if len(sizes) > 1:
        axes.plot([], [], color=GREY, alpha=0.5, label=f"pale: blocks below {sizes[-1]}")


def _masked_providers(rows: Sequence[SpeedRow]) -> list[str]:
    """Return the providers that have masked rows, ours first."""
    own = {r.provider: r.own for r in _compared(rows)}
    return sorted(own, key=lambda name: not own[name])


def _compared(rows: Sequence[SpeedRow]) -> list[SpeedRow]:
    """Return the rows of random masks, or of all masks where no mask is random."""
    masked = [r for r in rows if r.mask != DENSE and r.density]
    return [r for r in masked if r.random] or masked


# ---- time by length


def draw_length(rows: Sequence[SpeedRow]) -> Figure:
    """Time against length on logarithmic axes: dense filled, masked open, a panel a direction."""
    figure, panels = _panels(rows)
    for (axes,), group in panels:
        axes.set_title(f"{group[0].direction}, time (ms)", loc="left")
        labelled: set[str] = set()
        lines = [line for line in _by_length(group) if len(line) > 1]
        for line in sorted(lines, key=lambda line: not line[0].own):
            provider, dense = line[0].provider, line[0].mask == DENSE
            name, style = label_of(provider), _style(provider)
            style = style._replace(line="-" if dense else "--")
            label = None if provider in labelled else name
            labelled.add(provider)
            x, y = [r.n_q for r in line], [r.ms for r in line]
            f.curve(axes, x, y, style, label, filled=dense)
        for mask in dict.fromkeys(line[0].mask for line in lines):
            kind = ("--", "white") if mask != DENSE else ("-", GREY)
            text = "dense" if mask == DENSE else "open: structured mask"
            axes.plot([], [], "o", ls=kind[0], mfc=kind[1], color=GREY, label=text)
        f.length_axis(axes, [r.n_q for r in group])
        axes.set_xlabel("")
        f.plain_log_axis(axes)
    panels[-1][0][0].set_xlabel("length (tokens)")
    f.legend(figure, [axes for (axes,), _ in panels], columns=2)
    texts = dict.fromkeys(r.mask for r in rows if r.mask != DENSE and not r.random)
    figure.suptitle("\n".join([caption(rows[0], length=False), *list(texts)[:2]]), fontsize=8)
    return figure


def _by_length(rows: Iterable[SpeedRow]) -> list[list[SpeedRow]]:
    """Return the rows that differ in nothing but their length together, short to long."""
    rows = sorted(rows, key=lambda r: r.n_q)
    return grouped(rows, lambda r: (r.provider, r.direction, r.mask, r.block_q, r.block_k))


# ---- what the figures share


def caption(row: SpeedRow, *, length: bool = True) -> str:
    """Return the device and the shape of a row, short."""
    heads = f"H {row.heads}" if row.heads == row.kv_heads else f"H {row.heads}/{row.kv_heads}"
    tokens = f", N {row.n_q}" if length else ""
    dims = f"D {row.head_dim}" if row.v_dim == row.head_dim else f"D {row.head_dim}/{row.v_dim}"
    layout = "" if row.layout == LAYOUTS[0] else f", {row.layout}"
    return f"{row.device}: B {row.batch}, {heads}{tokens}, {dims}, {row.dtype}{layout}"


def _file(kind: str, row: SpeedRow, *, length: bool = True) -> str:
    """Return the stem of a file, such as speedup-h200-b2-h16-n16384-d128-bfloat16."""
    text = caption(row, length=length).removeprefix("NVIDIA ")
    return f.file_name(kind, re.sub(r"\b([BHND]) (?=\d)", r"\1", text))


def _panels(
    rows: Sequence[SpeedRow], columns: int = 1
) -> tuple[Figure, list[tuple[Sequence[Axes], list[SpeedRow]]]]:
    """Return a row of panels for each direction, one above the other, and the rows of each."""
    groups = sorted(grouped(rows, lambda r: r.direction), key=lambda g: g[0].direction != "forward")
    width = f.PAGE if columns > 1 else f.COLUMN
    size = (width, 0.2 + 1.95 * len(groups))
    figure, grid = plt.subplots(len(groups), columns, figsize=size, sharex=True, squeeze=False)
    return figure, list(zip(grid, groups, strict=True))


def _style(provider: str) -> f.Style:
    return PROVIDERS[provider].style if provider in PROVIDERS else f.OTHER


def draw_masks(found: Sequence[masks.BlockMask]) -> Figure:
    """Block masks, a panel each, with their text, length and density."""
    columns = min(4, len(found))
    lines = -(-len(found) // columns)
    size = PAGE / max(columns, 3)
    # The resolution is given here already because a mask draws as many pixels as its axes have.
    figure, grid = plt.subplots(
        lines,
        columns,
        figsize=(size * columns, (size + 0.45) * lines + 0.3),
        dpi=RC["savefig.dpi"],
        squeeze=False,
    )
    for axes in grid.flat[len(found) :]:
        axes.set_visible(False)
    handles: list[Any] = []
    for axes, blocks in zip(grid.flat, found, strict=False):
        blocks.draw(ax=axes)
        axes.set(xlabel="", ylabel="", xticks=[], yticks=[])
        text = f"{fill(blocks.text, 30)}\n{blocks.n_q} tokens, density {blocks.density:.3f}"
        axes.set_title(text, fontsize=7)
        for spine in axes.spines.values():
            spine.set(visible=True, color="0.7", lw=0.6)
        if legend := axes.get_legend():
            handles = max(handles, legend.legend_handles, key=len)
            legend.remove()
    labels = [str(handle.get_label()) for handle in handles]
    figure.legend(handles, labels, loc="outside lower center", ncols=len(labels))
    return figure
