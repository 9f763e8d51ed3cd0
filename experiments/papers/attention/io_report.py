"""Rows of experiments.papers.io as the paper's Figure 2: a table and two panels."""

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from matplotlib import pyplot as plt
from matplotlib.axes import Axes

from experiments.common.figures import (
    PAGE,
    Style,
    curve,
    file_name,
    legend,
    reference,
    save,
    style,
)
from experiments.common.records import OK, torches
from experiments.common.text_table import MISSING, markdown, short
from experiments.papers.attention.methods import METHODS
from experiments.papers.attention.published import FIGURE_2, FIGURE_2_DEVICE, FIGURE_2_SHAPE
from experiments.papers.attention.rows import IoRow
from sparseflash.cost import flash_accesses

TIME, BYTES = Style("#D55E00", "D", "-"), Style("#0072B2", "s", "--")
TILES = (64, 128, 256, 512)  # keys of a tile in the paper's figure


def newest(rows: Sequence[IoRow]) -> list[IoRow]:
    """One row for each measurement: the last, with the device and the dtype of the last row."""
    last = rows[-1]
    here = [row for row in rows if (row.device, row.dtype) == (last.device, last.dtype)]
    what = lambda r: (r.part, r.method, r.batch, r.heads, r.n, r.head_dim, r.block, r.mask)  # noqa: E731
    return list({what(row): row for row in here}.values())


def tables(rows: Sequence[IoRow]) -> str:
    """The three tables as Markdown, with what is published."""
    rows = newest(rows)
    parts = [f"{rows[-1].device}, {rows[-1].dtype}, torch {torches(rows)}."]
    for part, make in (("shape", shape_table), ("block", block_table), ("sparsity", sparse_table)):
        if found := [row for row in rows if row.part == part]:
            parts += [shape_words(found[0]), make(found)]
    parts += ["Keys of a tile in the paper's loops, and what they move:", tile_table()]
    return "\n\n".join(parts) + "\n"


def named(rows: Sequence[IoRow]) -> dict[str, Callable[[], str]]:
    """The tables that a page may hold: shape, block, sparsity and tiles."""
    rows = newest(rows)
    made = {"shape": shape_table, "block": block_table, "sparsity": sparse_table}
    found = {
        part: partial(make, [row for row in rows if row.part == part])
        for part, make in made.items()
    }
    return {**found, "tiles": tile_table}


def shape_words(row: IoRow) -> str:
    """The shape of a part."""
    sizes = f"Batch {row.batch}, {row.heads} heads of {row.head_dim}, {row.n:,} tokens"
    return f"{sizes}, forward and backward."


def shape_table(rows: Sequence[IoRow]) -> str:
    """Work, bytes and time of each method; at the paper's shape, the ratio to the first."""
    bytes_of = ["forward, model GB", "forward, counted GB", "model GB", "counted GB"]
    lines = [["attention", "GFLOP", *bytes_of, "ms", "kept MiB", "faster than standard"]]
    base = next((r for r in rows if r.method == "standard" and r.status == OK), None)
    for row in rows:
        gain = base.ms / row.ms if base and row.status == OK else None
        forward = row.forward_model_gb, row.forward_counted_gb
        cells = [row.gflop, *forward, row.model_gb, row.counted_gb, row.ms_median, row.saved_mib]
        texts = [*map(short, cells), MISSING if gain is None else f"{gain:.2f}x"]
        if row.status != OK:
            texts[5] = row.status.split(":")[0]
        lines.append([METHODS[row.method].label, *texts])
    for name, found in FIGURE_2.items():
        label = {"standard": "standard", "flash": "FlashAttention"}[name]
        gain = FIGURE_2["standard"].ms / found.ms
        cells = [f"{found.gflop:g}", MISSING, MISSING, MISSING, f"{found.hbm_gb:g}"]
        cells += [f"{found.ms:g}", MISSING]
        lines.append([f"{label}, published ({FIGURE_2_DEVICE})", *cells, f"{gain:.2f}x"])
    return markdown(lines)


def block_table(rows: Sequence[IoRow]) -> str:
    """Time and bytes against the size of a block of the mask."""
    lines = [["block", "density", "model GB", "counted GB", "ms"]]
    for row in sorted(rows, key=lambda r: r.block):
        cells = (row.density, row.model_gb, row.counted_gb, row.ms_median)
        lines.append([str(row.block), *map(short, cells)])
    return markdown(lines)


def sparse_table(rows: Sequence[IoRow]) -> str:
    """Time against density, beside the time that falls with the density."""
    lines = [["density", "model GB", "counted GB", "ms", "faster than dense", "ideal"]]
    dense = next((r for r in rows if r.block == 0 and r.status == OK), None)
    for row in sorted(rows, key=lambda r: (r.block > 0, -(r.density or 0))):
        gain = f"{dense.ms / row.ms:.2f}x" if dense and row.status == OK else MISSING
        ideal = f"{1 / row.density:.2f}x" if row.density else MISSING
        name = "no mask" if row.block == 0 else short(row.density)
        cells = (row.model_gb, row.counted_gb, row.ms_median)
        lines.append([name, *map(short, cells), gain, ideal])
    return markdown(lines)


def tile_table() -> str:
    """HBM bytes of the paper's forward loop at the paper's shape, by the keys of a tile."""
    heads, n, d = (FIGURE_2_SHAPE[name] for name in ("heads", "n", "head_dim"))
    heads *= FIGURE_2_SHAPE["batch"]
    lines = [["keys of a tile", "forward GB"]]
    lines += [[str(t), f"{2 * heads * flash_accesses(n, d, 4 * d * t) / 1e9:.2f}"] for t in TILES]
    return markdown(lines)


def draw(rows: Sequence[IoRow], out: Path) -> list[Path]:
    """Two panels: time and bytes against block size, and time against sparsity."""
    found = [row for row in newest(rows) if row.status == OK]
    blocks = sorted((r for r in found if r.part == "block"), key=lambda r: r.block)
    sparse = sorted(
        (r for r in found if r.part == "sparsity" and r.block), key=lambda r: -(r.density or 0)
    )
    if not blocks and not sparse:
        return []
    with style():
        figure, (left, right) = plt.subplots(1, 2, figsize=(PAGE, 2.5))
        sizes = [row.block for row in blocks]
        curve(left, sizes, [row.ms for row in blocks], TIME, "ours, ms")
        moved = [row.counted_gb or row.model_gb for row in blocks]
        counted = all(row.counted_gb for row in blocks) and blocks
        second = left.twinx()
        curve(second, sizes, moved, BYTES, "HBM GB, counted" if counted else "HBM GB, model")
        left.set(xscale="log", xlabel="block of the mask (tokens)", ylabel="ms")
        _from_zero(left, blocks)
        left.set_xticks(sizes, [str(size) for size in sizes])
        left.minorticks_off()
        second.set(ylabel="GB", ylim=(0, 1.2 * max(moved, default=1)))
        second.grid(False)
        share = [100 * (1 - (row.density or 0)) for row in sparse]
        curve(right, share, [row.ms for row in sparse], TIME, "ours, ms")
        dense = next((r for r in found if r.part == "sparsity" and not r.block), None)
        if dense:
            reference(right, [0, 100], [dense.ms, 0], "no mask x density")
        right.set(xlabel="sparsity of the blocks, %", ylabel="ms")
        _from_zero(right, [*sparse, *([dense] if dense else [])])
        legend(figure, [left, second, right])
        return save(figure, out / file_name("io", found[0].device), option="plots")


def _from_zero(axes: Axes, rows: Sequence[IoRow]) -> None:
    """A time axis from 0 to above the markers, however near to each other the times are."""
    axes.set_ylim(0, 1.1 * max((row.ms for row in rows), default=1))


def describe(row: IoRow) -> str:
    """A row as one line."""
    text = f"{row.part:8} {row.method:9} block {row.block:<3} density {row.density or 1:<6.3g}"
    text += f" {row.gflop:8.2f} GFLOP  model {row.model_gb:7.3f} GB"
    if row.status != OK:
        return f"{text}  {row.status}"
    counted = "" if row.counted_gb is None else f"  counted {row.counted_gb:.3f} GB"
    return f"{text}{counted}  {row.ms:9.2f} ms  error {row.error:.1e}"
