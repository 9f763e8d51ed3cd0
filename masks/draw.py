"""Pictures of block masks: full, partial and empty blocks, true at every zoom."""

import textwrap
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from masks.block_lists import FULL, row_segments
from masks.block_mask import BlockMask

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# Blue and orange of Okabe and Ito, who chose them to be told apart by colour-blind readers.
COLOURS = {"empty": "#f2f2f2", "partial": "#e69f00", "full": "#0072b2"}
MAX_PIXELS = 512  # a side
FAINTEST = 0.45  # strength of a pixel that stands for hardly any non-empty block


def draw(
    blocks: BlockMask, path: str | Path | None, ax: "Axes | None", *, batch: int, head: int
) -> "Axes":
    """See `BlockMask.draw`."""
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    for name, index, extent in (("batch", batch, blocks.batch), ("head", head, blocks.heads)):
        if not 0 <= index < extent:
            raise ValueError(f"{name} is {index}: this mask has 0 to {extent - 1}")
    aspect = min(2.0, max(0.5, blocks.n_q / blocks.n_k))
    if ax is None:
        ax = Figure(figsize=(7.4, 0.9 + 5.4 * aspect), dpi=150, layout="constrained").subplots()
    # Not more pixels than the axes have, or the renderer would drop some.
    pixels = int(max(16, min(MAX_PIXELS, ax.bbox.width, ax.bbox.height)))
    partial, full, zoom_q, zoom_k = shares(blocks, pixels, batch=batch, head=head)
    block_q, block_k = blocks.block_size
    bottom, right = full.shape[0] * zoom_q * block_q, full.shape[1] * zoom_k * block_k
    colours, extent = _colour(partial, full), (0, right, bottom, 0)
    ax.imshow(colours, extent=extent, interpolation="nearest", aspect="auto")
    ax.set(xlim=(0, blocks.n_k), ylim=(blocks.n_q, 0), xlabel="key (token)", ylabel="query (token)")
    ax.ticklabel_format(style="plain")
    ax.locator_params(nbins=6)
    ax.set_box_aspect(aspect)

    facts = f"density {blocks.density:.4g}, blocks {block_q} x {block_k}"
    if blocks.batch * blocks.heads > 1:
        facts += f", batch {batch}, head {head}"
    title = textwrap.wrap(textwrap.shorten(blocks.text, 160), 60)
    ax.set_title("\n".join([*title, facts]), fontsize="medium")
    patches = [Patch(facecolor=c, edgecolor="0.5", label=name) for name, c in COLOURS.items()]
    ax.legend(handles=patches[::-1], loc="upper left", bbox_to_anchor=(1.02, 1), frameon=False)
    if path is not None:
        ax.figure.savefig(path)  # type: ignore[union-attr]
    return ax


def shares(
    blocks: BlockMask, pixels: int, *, batch: int, head: int
) -> tuple[NDArray[np.float64], NDArray[np.float64], int, int]:
    """Shares of partial and of full blocks in every pixel of a picture, from the runs.

    Returns:
        (partial, full, zoom_q, zoom_k): two arrays of at most `pixels` a side, and the blocks that
        a pixel stands for along queries and keys (fewer at the end).
    """
    zoom_q, zoom_k = -(-blocks.rows // pixels), -(-blocks.cols // pixels)
    height, width = -(-blocks.rows // zoom_q), -(-blocks.cols // zoom_k)
    line, first, length, tile = row_segments(blocks.grid, blocks.starts, blocks.tiles)
    row = line - (batch * blocks.heads + head) * blocks.rows
    inside = (row >= 0) & (row < blocks.rows)
    ends = np.minimum(np.arange(0, width + 1) * zoom_k, blocks.cols)
    area = np.diff(np.minimum(np.arange(0, height + 1) * zoom_q, blocks.rows))[:, None] * np.diff(
        ends
    )
    result = []
    for kind in (inside & (tile != FULL), inside & (tile == FULL)):
        begin = row[kind] // zoom_q * (blocks.cols + 1) + first[kind]
        size = height * (blocks.cols + 1)
        change = np.bincount(begin, minlength=size) - np.bincount(
            begin + length[kind], minlength=size
        )
        covered = np.cumsum(change.reshape(height, -1), axis=1)[
            :, : blocks.cols
        ]  # non-empty by column
        result.append(np.add.reduceat(covered, ends[:-1], axis=1) / area)
    return result[0], result[1], zoom_q, zoom_k


def _colour(partial: NDArray[np.float64], full: NDArray[np.float64]) -> NDArray[np.float64]:
    """RGB (height, width, 3): the hue is the mix of partial and full, the strength their share."""
    from matplotlib.colors import to_rgb

    empty_rgb, partial_rgb, full_rgb = (np.array(to_rgb(c)) for c in COLOURS.values())
    share = partial + full
    some = np.maximum(share, 1e-12)[..., None]
    hue = (partial[..., None] * partial_rgb + full[..., None] * full_rgb) / some
    strength = np.where(share > 0, FAINTEST + (1 - FAINTEST) * share, 0)[..., None]
    return strength * hue + (1 - strength) * empty_rgb
