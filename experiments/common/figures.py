"""What all figures share: the width of a page, fonts and lines, one legend, PNG and SVG."""

import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure

PAGE = 6.9  # inches: the width of a page's text; half of it is a column
LEGEND = 100  # characters of a line of a legend
RC: dict[Any, Any] = {
    "font.size": 8,
    "axes.titlesize": 8,
    "axes.labelsize": 8,
    "legend.fontsize": 7.5,
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
    "legend.handlelength": 2.8,
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


def legend(
    figure: Figure, axes: Sequence[Axes], columns: int = 3, title: str | None = None
) -> None:
    """One legend below all panels, each label once, in fewer columns where it would be wider than
    the figure.
    """
    found = [pair for a in axes for pair in zip(*a.get_legend_handles_labels(), strict=True)]
    handles = {label: handle for handle, label in reversed(found)}
    labels = list(dict.fromkeys(label for _, label in found))
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


def token_text(n: int) -> str:
    """A length as a tick has it: 16k for 16384."""
    return f"{n // 1024}k" if n % 1024 == 0 else str(n)


def save(figure: Figure, stem: Path) -> list[Path]:
    """Writes `stem`.png and `stem`.svg and closes the figure; their paths."""
    paths = [stem.with_name(f"{stem.name}.{kind}") for kind in ("png", "svg")]
    for path in paths:
        figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)
    plt.close(figure)
    return paths
