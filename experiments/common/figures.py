"""What all figures share: widths, fonts, the style of curves, one legend, PNG and SVG files.

A figure is drawn inside `style()`, in a paper column (COLUMN inches) or across a page (PAGE):

    with style():
        figure, axes = plt.subplots(figsize=(COLUMN, 2.4))
        curve(axes, lengths, ms, Style("#0072B2", "o", "-"), "FlashAttention", low=p20, high=p80)
        length_axis(axes, lengths)
        legend(figure, [axes])
        paths = save(figure, out / file_name("length", "NVIDIA H200"))  # length-nvidia-h200
"""

import re
import textwrap
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from io import BytesIO
from pathlib import Path
from typing import Any, NamedTuple

import matplotlib
import numpy as np
from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, NullFormatter, NullLocator
from PIL import Image

from experiments.common.files import write_whole

PAGE, COLUMN = 6.9, 3.3  # inches: the width of a page's text, and of one of its two columns
MAX_ENTRIES = 8  # of a legend
COLOURS = 128  # of a PNG file
LEGEND = 100  # characters of a line of a legend
RC: dict[Any, Any] = {
    "font.size": 8,
    "axes.titlesize": 8,
    "axes.labelsize": 8,
    "legend.fontsize": 7,
    "xtick.labelsize": 7.5,
    "ytick.labelsize": 7.5,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "0.9",
    "grid.linewidth": 0.6,
    "lines.linewidth": 1.3,
    "lines.markersize": 4.5,
    "legend.frameon": False,
    "legend.handlelength": 2.4,
    "legend.columnspacing": 1.2,
    "figure.constrained_layout.use": True,
    "savefig.dpi": 300,
    "savefig.bbox": "tight",
    "savefig.pad_inches": 0.02,
    "svg.fonttype": "none",
    "svg.hashsalt": "sparseflash",  # the same picture is the same file
}


class Style(NamedTuple):
    """Colour, marker and line of a curve: any one of the three tells them apart."""

    color: str
    marker: str
    line: str | tuple[float, tuple[float, ...]]


OTHER = Style("#F0E442", "X", ":")


def style() -> AbstractContextManager[None]:
    """Return the context in which figures are drawn; it needs no display."""
    matplotlib.use("Agg")
    return matplotlib.rc_context(RC)


def curve(
    axes: Axes,
    x: Sequence[float],
    y: Sequence[float],
    style: Style,
    label: str | None = None,
    *,
    low: Sequence[float] | None = None,
    high: Sequence[float] | None = None,
    line: bool = True,
    filled: bool = True,
    alpha: float = 1.0,
) -> None:
    """One curve with its error bars.

    low, high: the ends of the error bars, as values of y; None draws none.
    line: False for markers that belong to no curve; filled: False for open markers.
    """
    bars = None
    if low is not None and high is not None:
        bars = np.maximum([np.subtract(y, low), np.subtract(high, y)], 0)
    axes.errorbar(
        x,
        y,
        yerr=bars,
        color=style.color,
        marker=style.marker,
        ls=style.line if line else "none",
        mfc=style.color if filled else "white",
        elinewidth=0.8,
        alpha=alpha,
        label=label,
    )


class Curve(NamedTuple):
    """Values by length, and the standard deviations of some of them."""

    label: str
    style: Style
    y: Mapping[int, float]
    spread: Mapping[int, float] = {}


def length_figure(values: Mapping[str, Mapping[str, Sequence[Curve]]], title: str = "") -> Figure:
    """Return curves over the length: a line of panels for each value, a column for each group.

    values: {label of the y axis: {title of a column: its curves}}. Percentages have a linear axis.
    """
    groups = dict.fromkeys(group for panels in values.values() for group in panels)
    size = (PAGE if len(groups) > 1 else COLUMN, 2.1 * len(values) + 0.6)
    share: dict[str, Any] = {"squeeze": False, "sharex": True, "sharey": "row"}
    figure, grid = plt.subplots(len(values), len(groups), figsize=size, **share)
    every = (one for panels in values.values() for curves in panels.values() for one in curves)
    lengths = sorted({n for one in every for n in one.y})
    for line, (name, panels) in zip(grid, values.items(), strict=True):
        for axes, group in zip(line, groups, strict=True):
            for label, look, y, spread in panels.get(group, ()):
                ends = [[a + sign * spread.get(n, 0) for n, a in y.items()] for sign in (-1, 1)]
                low, high = ends if spread else (None, None)
                label = textwrap.fill(label, 40)
                curve(axes, [*y], [*y.values()], look, label, low=low, high=high)
            length_axis(axes, lengths[:: 1 + len(lengths) * len(groups) // 12])
            axes.set_xlabel("length (tokens)" if line[0] is grid[-1, 0] else "")
            if "%" not in name:
                plain_log_axis(axes)
        line[0].set_ylabel(name)
    for top, axes, group in zip(grid[0], grid[-1], groups, strict=True):
        top.set_title(group, loc="left")
        axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.3))
    figure.suptitle(title, fontsize=8)
    return figure


def reference(axes: Axes, x: Sequence[float], y: Sequence[float], label: str) -> None:
    """Draw a thin grey line that curves are compared with, such as the ideal."""
    axes.plot(x, y, color="0.5", lw=1, ls=(0, (1, 1.5)), label=label)


def legend(
    figure: Figure,
    axes: Sequence[Axes],
    columns: int = 3,
    title: str | None = None,
    most: int = MAX_ENTRIES,
) -> None:
    """One legend below all panels, each label once, in fewer columns where it would be wider than
    the figure.

    Of more than `most` labels it shows the first and counts the others, so draw what matters
    first, and group what belongs together under one label.
    """
    found = [pair for a in axes for pair in zip(*a.get_legend_handles_labels(), strict=True)]
    handles = {label: handle for handle, label in reversed(found)}
    labels = list(dict.fromkeys(label for _, label in found))
    if len(labels) > most:
        more = f"and {len(labels) - most} more"
        labels, title = labels[:most], more if title is None else f"{title}; {more}"
    for ncols in range(columns, 0, -1):
        drawn = figure.legend(
            [handles[label] for label in labels],
            [textwrap.fill(label, LEGEND) for label in labels],
            loc="outside lower center",
            ncols=ncols,
            title=title,
            title_fontsize=RC["legend.fontsize"],
        )
        if ncols == 1 or drawn.get_window_extent().width <= figure.bbox.width:
            return
        drawn.remove()


def length_axis(axes: Axes, lengths: Sequence[int]) -> None:
    """Make a logarithmic x axis with a tick at each length."""
    axes.set(xscale="log", xlabel="length (tokens)")
    axes.xaxis.set_major_locator(FixedLocator(sorted(set(lengths))))
    axes.xaxis.set_major_formatter(lambda n, _: token_text(int(n)))
    axes.xaxis.set_minor_locator(NullLocator())


def plain_log_axis(axes: Axes, base: int = 10, unit: str = "") -> None:
    """Make a logarithmic y axis with plain numbers: 0.5, 1, 2x where unit is "x"."""
    axes.set_yscale("log", base=base)
    axes.yaxis.set_major_formatter(lambda y, _: f"{y:g}{unit}")
    axes.yaxis.set_minor_formatter(NullFormatter())


def token_text(n: int) -> str:
    """Return a length as a tick has it: 16k for 16384."""
    return f"{n // 1024}k" if n % 1024 == 0 else str(n)


def file_name(*words: object) -> str:
    """Words as the stem of a file name: lower case, hyphens between them."""
    return re.sub(r"[^a-z0-9]+", "-", " ".join(map(str, words)).lower()).strip("-")


def save(
    figure: Figure, stem: Path, kinds: Sequence[str] = ("png", "svg"), option: str = "out"
) -> list[Path]:
    """Write `stem`.png and `stem`.svg and closes the figure; their paths.

    option: names the setting of the folder, for the error where it cannot be written.
    """
    paths = [stem.with_name(f"{stem.name}.{kind}") for kind in kinds]
    for path in paths:
        drawn, kind = BytesIO(), path.suffix[1:]
        figure.savefig(drawn, format=kind, metadata={"Date": None} if kind == "svg" else None)
        if kind == "png":  # in so many colours it takes a third of the bytes
            picture, drawn = Image.open(drawn).convert("RGB").quantize(COLOURS), BytesIO()
            picture.save(drawn, format="png", optimize=True, dpi=(RC["savefig.dpi"],) * 2)
        write_whole(path, lambda file, drawn=drawn: file.write(drawn.getvalue()), option)
    plt.close(figure)
    return paths
