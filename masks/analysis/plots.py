"""Pictures of loads, of the reach, and of a mask with both. They need matplotlib."""

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from masks.analysis import loads
from masks.analysis.reach import Reach, reach
from masks.analysis.segments import Segments
from masks.analysis.stats import stats
from masks.checks import file_path
from masks.draw import COLOURS, EXAMPLE, NEEDS_MATPLOTLIB, Span, draw, save

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from masks.types import BlockMask

BARS = 24
SHOWN_LAYERS = 24


def draw_loads(blocks: "BlockMask", ax: "Axes", *, batch: int = 0, head: int = 0) -> "Axes":
    """Histogram of the non-empty blocks of a query block (forward) and of a key block (backward).

    The scale of the counts is logarithmic where few blocks are far busier than the others.
    """
    from matplotlib.ticker import MaxNLocator

    segments = Segments.of(blocks, batch, head)
    both = loads.row_loads(segments)[0], loads.column_loads(segments)[0]
    low, high = (int(pick([pick(a) for a in both])) for pick in (min, max))
    bars = min(BARS, high - low + 1)
    edges = np.linspace(low - 0.5, high + 0.5, bars + 1).tolist()
    styles = zip(
        both, ("query blocks", "key blocks"), (COLOURS["full"], COLOURS["partial"]), strict=True
    )
    for values, name, tone in styles:
        label = f"{name}: mean {values.mean():.3g}, most {values.max()}"
        if name == "query blocks":
            ax.hist(values, edges, color=tone, alpha=0.35, label=label)
        else:
            ax.hist(values, edges, histtype="step", color=tone, linewidth=1.6, label=label)
    lopsided = high > 4 * max(1.0, float(np.concatenate(both).mean()))
    ax.set(xlabel="non-empty blocks", ylabel="blocks with so many")
    if lopsided:
        ax.set_yscale("log", nonpositive="clip")
        ax.set_ylim(bottom=0.5)
    ax.xaxis.set_major_locator(MaxNLocator(integer=True))
    ax.legend(frameon=False, fontsize="small", loc="lower left", bbox_to_anchor=(0, 1), ncols=1)
    return ax


def draw_reach(found: Reach, ax: "Axes") -> "Axes":
    """Share of the wanted pairs that are seen after every layer; a band between two bounds."""
    from matplotlib.ticker import MaxNLocator

    layers = np.arange(1, len(found.upper) + 1)
    upper, lower = 100 * np.array(found.upper), 100 * np.array(found.lower)
    if not found.exact and not np.allclose(upper, lower):
        ax.fill_between(layers, lower, upper, color=COLOURS["full"], alpha=0.2, linewidth=0)
        ax.plot(layers, lower, color=COLOURS["full"], linewidth=1, linestyle="--", label="at least")
        ax.plot(layers, upper, color=COLOURS["full"], marker="o", markersize=3, label="at most")
        ax.legend(frameon=False, fontsize="small", loc="lower right")
    else:
        ax.plot(layers, upper, color=COLOURS["full"], marker="o", markersize=3)
    wanted = "the keys before it" if found.causal else "all keys"
    ax.set(xlabel="layers", ylabel=f"seen of {wanted} (%)", ylim=(0, 103))
    ax.set_xlim(0.5, len(layers) + 0.5)
    ax.xaxis.set_major_locator(MaxNLocator(integer=True))
    ax.set_title(f"all seen: {found.depth}", fontsize="medium")
    return ax


def overview(
    blocks: "BlockMask",
    path: str | Path | None = None,
    *,
    batch: int = 0,
    head: int = 0,
    rows: Span | None = None,
    cols: Span | None = None,
) -> "Axes":
    """Picture, loads and reach on one figure; the reach of self-attention only.

    The reach is that of all heads together, up to 24 layers, and of the pairs with k <= q where the
    mask is causal.

    Returns:
        The axes of the picture; `.figure` has the others.
    """
    if path is not None:
        file_path(path, EXAMPLE, opened=True)
    with NEEDS_MATPLOTLIB:
        from matplotlib.figure import Figure

    figure = Figure(figsize=(10.6, 6.2), dpi=150, layout="constrained")
    page = figure.add_gridspec(2, 2, width_ratios=(1.9, 1))
    picture = figure.add_subplot(page[:, 0])
    draw(blocks, None, picture, batch=batch, head=head, rows=rows, cols=cols)
    legend = picture.get_legend()
    if legend is not None:
        handles = [handle for handle in legend.legend_handles if handle is not None]
        names = [text.get_text() for text in legend.get_texts()]
        legend.remove()
        picture.legend(
            handles, names, loc="upper center", bbox_to_anchor=(0.5, -0.12), ncols=3, frameon=False
        )
    draw_loads(blocks, figure.add_subplot(page[0, 1]), batch=batch, head=head)
    if blocks.n_q == blocks.n_k:
        causal = stats(blocks, batch=batch).causal
        found = reach(blocks, SHOWN_LAYERS, causal=causal, batch=batch)
        draw_reach(found, figure.add_subplot(page[1, 1]))
    if path is not None:
        save(figure, path)
    return picture
