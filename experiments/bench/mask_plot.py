"""Pictures of block masks side by side."""

import re
from collections.abc import Sequence
from typing import Any

from matplotlib import pyplot as plt
from matplotlib.figure import Figure

import masks
from experiments.common.figures import PAGE, RC


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
        text = f"{_wrapped(blocks.text)}\n{blocks.n_q} tokens, density {blocks.density:.3f}"
        axes.set_title(text, fontsize=7)
        for spine in axes.spines.values():
            spine.set(visible=True, color="0.7", lw=0.6)
        if legend := axes.get_legend():
            handles = max(handles, legend.legend_handles, key=len)
            legend.remove()
    labels = [str(handle.get_label()) for handle in handles]
    figure.legend(handles, labels, loc="outside lower center", ncols=len(labels))
    return figure


def _wrapped(text: str, width: int = 30) -> str:
    """Return the text of a mask in lines of about `width`, broken after its operators and
    commas.
    """
    lines = [""]
    for word in re.split(r"(?<=[|&\-+*,])\s*", text):
        if lines[-1] and len(lines[-1]) + len(word) > width:
            lines.append("")
        lines[-1] += word + " "
    return "\n".join(line.strip() for line in lines)
