"""Pictures of block masks, true at every zoom. They need matplotlib."""

import textwrap
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from masks.checks import file_path, installed, integer
from masks.files import replace
from masks.segments import cover, row_segments
from masks.tiles import EMPTY, FULL, unpack_bits
from masks.types import BlockMask

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Blue and orange of Okabe and Ito, chosen so that colour-blind readers can distinguish them.
COLOURS = {"empty": "#f2f2f2", "partial": "#e69f00", "full": "#0072b2"}
MAX_PIXELS = 512  # a side
EXAMPLE = "mask.png"
MATPLOTLIB = "pictures of masks need matplotlib", "matplotlib>=3.8", "draw"  # for `installed`
FAINTEST = 0.45  # strength of a pixel that stands for hardly any non-empty block
MOST_LINES = 40  # between blocks, where tokens are shown

Span = tuple[int, int]  # first and last, both included


def draw(
    blocks: BlockMask,
    path: str | Path | None,
    ax: "Axes | None",
    *,
    batch: int,
    head: int,
    rows: Span | None = None,
    cols: Span | None = None,
) -> "Axes":
    """Return a picture of one slice; see `BlockMask.draw`."""
    if path is not None:
        file_path(path, EXAMPLE, opened=True)
    with installed(*MATPLOTLIB):
        from matplotlib.axes import Axes
        from matplotlib.figure import Figure
        from matplotlib.patches import Patch

    if ax is not None and (not isinstance(ax, Axes) or ax.name != "rectilinear"):
        raise ValueError(f"ax is {ax!r}: give plain axes, such as those of plt.subplots()")
    batch = integer("batch", batch, min=0, max=blocks.batch - 1)
    head = integer("head", head, min=0, max=blocks.heads - 1)
    q_first, q_last = _span("rows", rows, blocks.n_q)
    k_first, k_last = _span("cols", cols, blocks.n_k)
    height, width = q_last - q_first + 1, k_last - k_first + 1
    aspect = min(2.0, max(0.5, height / width))
    if ax is None:
        ax = Figure(figsize=(7.4, 0.9 + 5.4 * aspect), dpi=150, layout="constrained").subplots()
    # Not more pixels than the axes have, or the renderer would drop some.
    pixels = int(max(16, min(MAX_PIXELS, ax.bbox.width, ax.bbox.height)))
    block_q, block_k = blocks.block_size
    names = list(COLOURS)
    if (rows or cols) and max(height, width) <= pixels:
        names = ["not allowed", "allowed, partial block", "allowed, full block"]
        codes = tokens(blocks, (q_first, q_last), (k_first, k_last), batch=batch, head=head)
        partial, full = (codes == 1).astype(float), (codes == 2).astype(float)
        extent = (k_first, k_last + 1, q_last + 1, q_first)
        _lines(ax, blocks, extent)
    else:
        of_rows = q_first // block_q, q_last // block_q
        of_cols = k_first // block_k, k_last // block_k
        partial, full, zoom_q, zoom_k = shares(
            blocks, pixels, batch=batch, head=head, rows=of_rows, cols=of_cols
        )
        top, left = of_rows[0] * block_q, of_cols[0] * block_k
        right = left + full.shape[1] * zoom_k * block_k
        extent = (left, right, top + full.shape[0] * zoom_q * block_q, top)
    ax.imshow(colour(partial, full), extent=extent, interpolation="nearest", aspect="auto")
    ax.set(xlim=(k_first, k_last + 1), ylim=(q_last + 1, q_first))
    ax.set(xlabel="key (token)", ylabel="query (token)")
    ax.ticklabel_format(style="plain", useOffset=False)
    ax.locator_params(nbins=6)
    ax.set_box_aspect(aspect)

    facts = f"density {blocks.density:.4g}, blocks {block_q} x {block_k}"
    if blocks.batch * blocks.heads > 1:
        facts += f", batch {batch}, head {head}"
    title = textwrap.wrap(textwrap.shorten(blocks.text, 160), 60)
    ax.set_title("\n".join([*title, facts]), fontsize="medium")
    tones = zip(names, COLOURS.values(), strict=True)
    patches = [Patch(facecolor=c, edgecolor="0.5", label=name) for name, c in tones]
    ax.legend(handles=patches[::-1], loc="upper left", bbox_to_anchor=(1.02, 1), frameon=False)
    if path is not None:
        save(ax.figure.figure, path)  # type: ignore[union-attr]  # of a subfigure: the whole
    return ax


def save(figure: "Figure", path: Any) -> None:
    """Write a figure to a path, whose suffix sets the format (PNG without one), or an open file."""
    if hasattr(path, "write"):
        figure.savefig(path)
        return
    path = Path(path)
    path = path if path.suffix else path.with_name(f"{path.name}.png")
    replace(path, lambda file: figure.savefig(file, format=path.suffix[1:]))


def _span(name: str, span: Any, n: int) -> Span:
    """Return the tokens to show, (first, last); all of them by default."""
    if span is None:
        return 0, n - 1
    if not isinstance(span, tuple | list) or len(span) != 2:
        raise ValueError(f"{name} is {span!r}: give (first, last), both included")
    first = integer(f"{name}[0]", span[0], min=0, max=n - 1)
    return first, integer(f"{name}[1]", span[1], min=first, max=n - 1)


def _lines(ax: "Axes", blocks: BlockMask, extent: tuple[int, int, int, int]) -> None:
    """Thin lines between the blocks, unless there are many."""
    left, right, bottom, top = extent
    block_q, block_k = blocks.block_size
    for line, first, stop, block in (
        (ax.axvline, left, right, block_k),
        (ax.axhline, top, bottom, block_q),
    ):
        places = range(-(-first // block) * block, stop, block)
        for place in places if len(places) <= MOST_LINES else ():
            line(place, color="0.55", linewidth=0.5)


def tokens(
    blocks: BlockMask, rows: Span, cols: Span, *, batch: int, head: int
) -> NDArray[np.uint8]:
    """Return the pairs of the queries `rows` and the keys `cols`, first and last included.

    Returns:
        (queries, keys): 0 for a pair that is not allowed, 1 for one that is in a partial block,
        2 for one in a full block.
    """
    grid, (block_q, block_k) = blocks.grid, blocks.block_size
    row = np.arange(rows[0] // block_q, rows[1] // block_q + 1)
    col = np.arange(cols[0] // block_k, cols[1] // block_k + 1)
    x = ((batch * blocks.heads + head) * grid.rows + row[:, None]) * grid.cols + col
    codes = blocks.tiles[np.searchsorted(blocks.starts, x, "right") - 1]
    kinds, which = np.unique(codes, return_inverse=True)
    tiles = np.zeros((len(kinds), block_q, block_k), np.uint8)
    tiles[kinds >= 0] = unpack_bits(blocks.bits[kinds[kinds >= 0]], block_k)
    tiles[kinds == FULL] = 2
    pairs = tiles[which.reshape(codes.shape)].swapaxes(1, 2)
    pairs = pairs.reshape(len(row) * block_q, len(col) * block_k)
    top, left = row[0] * block_q, col[0] * block_k
    return pairs[rows[0] - top : rows[1] + 1 - top, cols[0] - left : cols[1] + 1 - left]


def shares(
    blocks: BlockMask,
    pixels: int,
    *,
    batch: int,
    head: int,
    rows: Span | None = None,
    cols: Span | None = None,
) -> tuple[NDArray[np.float64], NDArray[np.float64], int, int]:
    """Shares of partial and of full blocks in every pixel of a picture, from the runs.

    Args:
        rows, cols: first and last block to show; all of them by default.

    Returns:
        (partial, full, zoom_q, zoom_k): two arrays of at most `pixels` a side, and the blocks that
        a pixel stands for along queries and keys (fewer at the end).
    """
    top, bottom = rows or (0, blocks.rows - 1)
    left, right = cols or (0, blocks.cols - 1)
    n_rows, n_cols = bottom - top + 1, right - left + 1
    zoom_q, zoom_k = -(-n_rows // pixels), -(-n_cols // pixels)
    height, width = -(-n_rows // zoom_q), -(-n_cols // zoom_k)
    line, first, length, tile = row_segments(blocks.grid, blocks.starts, blocks.tiles)
    row = line - (batch * blocks.heads + head) * blocks.rows - top
    stop = np.minimum(first + length - left, n_cols)
    first = np.maximum(first - left, 0)
    inside = (row >= 0) & (row < n_rows) & (first < stop) & (tile != EMPTY)
    ends = np.minimum(np.arange(0, width + 1) * zoom_k, n_cols)
    heights = np.diff(np.minimum(np.arange(0, height + 1) * zoom_q, n_rows))
    area = heights[:, None] * np.diff(ends)
    result = []
    for kind in (inside & (tile != FULL), inside & (tile == FULL)):
        covered = cover(height, n_cols, row[kind] // zoom_q, first[kind], stop[kind])
        result.append(np.add.reduceat(covered, ends[:-1], axis=1) / area)
    return result[0], result[1], zoom_q, zoom_k


def colour(partial: NDArray[np.float64], full: NDArray[np.float64]) -> NDArray[np.float64]:
    """RGB (height, width, 3): the hue is the mix of partial and full, the strength their share."""
    from matplotlib.colors import to_rgb

    empty_rgb, partial_rgb, full_rgb = (np.array(to_rgb(c)) for c in COLOURS.values())
    share = partial + full
    some = np.maximum(share, 1e-12)[..., None]
    hue = (partial[..., None] * partial_rgb + full[..., None] * full_rgb) / some
    strength = np.where(share > 0, FAINTEST + (1 - FAINTEST) * share, 0)[..., None]
    return strength * hue + (1 - strength) * empty_rgb
