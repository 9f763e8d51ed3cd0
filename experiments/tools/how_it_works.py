"""Draws the figures of docs/guide/how_it_works.md.

    python -m experiments.tools.how_it_works           # into docs/figures/how_it_works
    python -m experiments.tools.how_it_works FOLDER

Nothing is measured: the pictures follow from a mask, from random scores and from sparseflash.cost.
"""

import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

import masks
from experiments.common import figures
from sparseflash.cost import (
    CEILINGS,
    Ceilings,
    Shape,
    attainable_tflops,
    cost,
    flops,
    intensity,
    ridge,
    standard_accesses,
)

OUT = Path("docs/figures/how_it_works")
STORED, CHIP, EMPTY, DONE = "#56B4E9", "#E69F00", "white", "#d9d9d9"
TILES = 6  # query tiles and key tiles of the pictures
NOW = (3, 2)  # the query tile and key tile in fast memory
DEVICE = "NVIDIA H200"


def main(out: Path) -> list[Path]:
    """Draws all figures into a folder; their paths."""
    paths = []
    for draw in (tiles, running, roofline):
        with figures.style():
            paths += figures.save(draw(), out / draw.__name__, ["png"])
    return paths


def tiles() -> Figure:
    """Which matrices are stored, and which tiles are in fast memory, for three attentions."""
    blocks = (masks.local(16) | masks.global_tokens(16)).build(16 * TILES, block_size=16)
    computed = blocks.layout()[0, 0] > 0
    figure, panels = plt.subplots(1, 3, figsize=(figures.PAGE, 2.75))
    full = np.ones((TILES, TILES), bool)
    _grid(panels[0], full, "standard: S and P are stored", stored=True)
    _grid(panels[1], full, "tiled: a tile of S at a time")
    _grid(panels[2], computed, "block-sparse: listed tiles only")
    for colour, label in (
        (STORED, "in main memory"),
        (CHIP, "in fast memory now"),
        (DONE, "computed and dropped"),
        (EMPTY, "not stored"),
    ):
        panels[0].add_patch(Rectangle((0, 0), 0, 0, fc=colour, ec="0.4", label=label))
    figures.legend(figure, list(panels), columns=4)
    return figure


def _grid(axes: Axes, computed: np.ndarray, title: str, *, stored: bool = False) -> None:
    """Draw the tiles of S with q and out beside them, k and v above; y runs down."""
    axes.set_title(title)
    axes.set(xlim=(-1.6, TILES + 1.6), ylim=(TILES + 0.9, -2.6), aspect="equal")
    axes.axis("off")
    lists = [np.flatnonzero(row) for row in computed]
    for i in range(TILES):
        for j in range(TILES):
            before = (i, j) < NOW and computed[i, j]
            colour = STORED if stored else DONE if before else EMPTY
            on_chip = not stored and (i, j) == NOW
            _tile(axes, j, i, CHIP if on_chip else colour, dashed=not stored)
            if not stored and computed[i, j]:
                number = sum(map(len, lists[:i])) + int(np.searchsorted(lists[i], j)) + 1
                axes.text(j + 0.5, i + 0.5, str(number), ha="center", va="center", fontsize=6)
        held = CHIP if i == NOW[0] and not stored else STORED
        _tile(axes, -1.2, i, held, width=0.7)
        finished = stored or i < NOW[0]
        _tile(axes, TILES + 0.5, i, held if finished or held == CHIP else EMPTY, width=0.7)
    for j in range(TILES):
        held = CHIP if j == NOW[1] and not stored else STORED
        for top in (-2.2, -1.2):
            _tile(axes, j, top, held, height=0.7)
    for x, y, text in (
        (-0.85, TILES + 0.5, "q"),
        (TILES + 0.85, TILES + 0.5, "out"),
        (-0.45, -1.85, "k"),
        (-0.45, -0.85, "v"),
        (TILES / 2, TILES + 0.5, "S, P" if stored else "order of the tiles"),
    ):
        axes.text(x, y, text, ha="center", va="center")


def _tile(
    axes: Axes, x: float, y: float, colour: str, *, width: float = 1, height: float = 1,
    dashed: bool = False,
) -> None:  # fmt: skip
    line = (0, (2, 2)) if dashed else "-"
    axes.add_patch(Rectangle((x, y), width, height, fc=colour, ec="0.4", lw=0.6, ls=line))


def running() -> Figure:
    """Return the running maximum and sum of one query over blocks of keys."""
    block, count = 8, 10
    rng = np.random.default_rng(9)
    scores = rng.standard_normal(block * count) * 1.6 + np.linspace(-1, 1, block * count)
    maxima, sums = statistics(scores, block)
    figure, (top, bottom) = plt.subplots(2, 1, figsize=(figures.PAGE * 0.75, 3.6), sharex=True)
    top.plot(scores, ".", color="0.55", ms=4, label="score of a key")
    edges = np.arange(count + 1) * block - 0.5
    top.stairs(maxima, edges, baseline=None, color=CHIP, lw=1.6, label="running maximum m")
    top.set_ylabel("score")
    rescaled = np.append(0, sums[:-1]) * np.exp(np.append(-np.inf, maxima[:-1]) - maxima)
    at = edges[:-1] + block / 2
    bottom.bar(at, rescaled, block * 0.7, color=STORED, label="sum so far, times exp(m - m')")
    bottom.bar(at, sums - rescaled, block * 0.7, bottom=rescaled, color=CHIP, label="new block")
    rises = np.flatnonzero(np.diff(maxima) > 0) + 1
    for axes in (top, bottom):
        axes.grid(axis="x", visible=False)
        axes.set_xticks(edges, [str(i) for i in range(0, block * count + 1, block)])
        for edge in edges[rises]:
            axes.axvline(edge, color="0.5", lw=0.8, ls=":")
    top.plot([], [], color="0.5", lw=0.8, ls=":", label="the maximum rises: rescale")
    bottom.set(xlabel="keys seen", ylabel="running sum l")
    figures.legend(figure, [top, bottom], columns=3)
    return figure


def statistics(scores: np.ndarray, block: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the running maximum and sum after each block of scores."""
    m, total, maxima, sums = -np.inf, 0.0, [], []
    for part in scores.reshape(-1, block):
        new = max(m, part.max())
        total = total * np.exp(m - new) + np.exp(part - new).sum()
        m = new
        maxima.append(m)
        sums.append(total)
    return np.array(maxima), np.array(sums)


def roofline() -> Figure:
    """Draw forwards of attention under the roofline of a GPU, by their least traffic."""
    n, d, rates, dtype = 4096, 128, CEILINGS[DEVICE], "bfloat16"
    standard = intensity(flops(n, d), 2 * standard_accesses(n, d))
    points = {f"standard, N {n}": standard}
    for length in (256, 1024, n):
        found = cost(Shape(1, 1, 1, length, length, d, d, 2))
        points[f"FlashAttention, N {length}"] = intensity(found.flops, found.hbm_bytes)
    blocks = masks.random_blocks(0.125, block=128).build(n)
    found = cost(Shape(1, 1, 1, n, n, d, d, 2), blocks)
    points[f"block-sparse, N {n}, density 1/8"] = intensity(found.flops, found.hbm_bytes)
    x = np.geomspace(8, 8192, 200)
    figure, axes = plt.subplots(figsize=(figures.PAGE * 0.75, 2.9))
    axes.loglog(x, [attainable_tflops(i, rates, dtype) for i in x], color="0.3")
    axes.axvline(ridge(rates, dtype), color="0.5", lw=0.8, ls=":")
    axes.text(ridge(rates, dtype) * 1.06, 45, "ridge", fontsize=7)
    _points(axes, points, rates, dtype)
    axes.set(xlabel="operations a byte", ylabel="TFLOP/s at most", ylim=(30, 1500))
    axes.set_title(f"{DEVICE}, {dtype}, forward, head dim {d}", loc="left")
    figures.legend(figure, [axes], columns=2)
    return figure


def _points(axes: Axes, points: dict[str, float], rates: Ceilings, dtype: str) -> None:
    colours: Sequence[str] = ("#D55E00", "#56B4E9", "#0072B2", "#000000", "#009E73")
    for (label, x), colour, marker in zip(points.items(), colours, "so^vD", strict=True):
        axes.plot(x, attainable_tflops(x, rates, dtype), marker, color=colour, ms=6, label=label)


if __name__ == "__main__":
    try:
        for path in main(Path(sys.argv[1]) if len(sys.argv) > 1 else OUT):
            print(path)
    except (ValueError, OSError) as error:
        sys.exit(f"error: {error}")
