"""Draws what experiments.speed measured, from its CSV alone, as PNG and SVG.

    python -m experiments.plot csv=runs/speed/speed.csv out=runs/speed/plots

Three kinds of figure: speed-up against sparsity, time against length, and the masks themselves.
"""

import re
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import hydra
import matplotlib
import numpy as np
from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, NullFormatter, NullLocator
from omegaconf import DictConfig

from experiments.bench.cases import DENSE, LAYOUTS, Case
from experiments.bench.rows import OWN, SpeedRow
from experiments.bench.speed_table import best_dense, newest, shape_of
from experiments.common.figures import OTHER, PAGE, RC, Style, legend, save, token_text
from experiments.common.records import OK, read

# Okabe and Ito's colours, which the colour-blind can tell apart.
STYLES = {
    "triton": Style("#0072B2", "o", "-"),
    "cpu": Style("#0072B2", "o", "-"),
    "hopper": Style("#D55E00", "s", "-"),
    "hopper_deterministic": Style("#D55E00", "h", ":"),
    "fa4": Style("#56B4E9", "P", (0, (3, 1, 1, 1))),
    "reference": Style("#000000", "x", ":"),
    "flex": Style("#009E73", "^", "--"),
    "sdpa": Style("#CC79A7", "D", "-."),
    "sdpa_cudnn": Style("#CC79A7", "D", "-."),
    "sdpa_flash": Style("#E69F00", "v", (0, (5, 1, 1, 1, 1, 1))),
}

T = TypeVar("T", bound=Hashable)


def draw_all(csv: str | Path, out: str | Path) -> list[Path]:
    """Writes every figure that the rows of `csv` give into the folder `out`; the files' paths.

    Raises ValueError where the file is missing or holds no measured row.
    """
    rows = [row for row in newest(read(csv, SpeedRow)) if row.status == OK]
    if not rows:
        raise ValueError(f"{csv} holds no measured row; measure first: python -m experiments.speed")
    out = Path(out)
    out.mkdir(parents=True, exist_ok=True)
    figures: dict[str, Figure] = {}
    with matplotlib.rc_context(RC):
        for group in grouped(rows, lambda r: tuple(x for x in shape_of(r) if x != r.direction)):
            if len({r.density for r in group if _random(r)}) > 1:
                figures[f"speedup-{_slug(group[0])}"] = draw_speedup(group)
        for group in grouped(rows, lambda r: _caption(r, length=False)):
            if any(len(line) > 1 for line in _by_length(group)):
                figures[f"length-{_slug(group[0], length=False)}"] = draw_length(group)
        if any(row.mask != DENSE for row in rows):
            figures["masks"] = draw_masks(rows)
        return [path for name, figure in figures.items() for path in save(figure, out / name)]


def draw_speedup(rows: Sequence[SpeedRow]) -> Figure:
    """Speed-up over the fastest dense attention against sparsity, a panel for each direction."""
    figure, panels = _panels(rows)
    best, ours = best_dense(rows), best_dense(rows, own=True)
    deepest = max(np.log2(1 / row.density) for row in rows)
    for axes, group in panels:
        dense = best.get(shape_of(group[0]))
        if dense is None:
            axes.text(
                0.5, 0.5, "no dense row to compare with", transform=axes.transAxes, ha="center"
            )
            continue
        x = np.linspace(0, deepest)
        axes.plot(x, 2**x, color="0.55", lw=1, ls=(0, (1, 1.5)), label="ideal: 1 / density")
        axes.axhline(1, color="0.25", lw=1, label=f"fastest dense ({dense.provider})")
        own = ours.get(shape_of(group[0]))
        if own is not None and own is not dense:
            axes.axhline(
                dense.ms / own.ms,
                color=_style(own.provider).color,
                lw=1,
                ls=(0, (6, 2)),
                label=f"own dense ({own.provider})",
            )
        _device_line(axes, group, dense)
        for provider in _providers(group):
            _speedup_line(axes, [r for r in group if r.provider == provider], dense)
        _sparsity_axis(axes, deepest)
        axes.set_title(group[0].direction)
    panels[0][0].set_ylabel("speed-up over the fastest dense")
    others = sorted({r.mask for r in rows if not r.mask.startswith((DENSE, "random"))})
    note = "other masks: " + ", ".join(others) if 0 < len(others) <= 3 else None
    legend(figure, [axes for axes, _ in panels], title=note)
    figure.suptitle(_caption(rows[0]), fontsize=8)
    return figure


def _device_line(axes: Axes, rows: Sequence[SpeedRow], dense: SpeedRow) -> None:
    """What the rates of the device allow for random masks and dense."""
    ideal = {r.density: r.ideal_ms for r in rows if r.mask.startswith(("random", DENSE))}
    points = sorted((x, ms) for x, ms in ideal.items() if ms)
    if points:
        x, ms = np.array(points).T
        axes.plot(np.log2(1 / x), dense.ms / ms, color="0.35", lw=1, ls="-.", label="device limit")


def _speedup_line(axes: Axes, rows: Sequence[SpeedRow], dense: SpeedRow) -> None:
    """A provider's random masks joined by a line, and its other masks as open markers."""
    masked = sorted((r for r in rows if r.mask != DENSE), key=lambda r: r.density)
    random = grouped((r for r in masked if _random(r)), lambda r: (r.block_q, r.block_k))
    random.sort(key=lambda group: -group[0].block_q)
    size = "" if len(random) < 2 else " of {0.block_q} x {0.block_k}"
    lines = [(group, "random blocks" + size.format(group[0])) for group in random]
    lines.append(([r for r in masked if not _random(r)], "other masks"))
    style = _style(rows[0].provider)
    for i, (chosen, what) in enumerate(lines):
        if not chosen:
            continue
        y = np.array([[r.ms_median, r.ms_p80, r.ms_p20] for r in chosen]).T
        y = dense.ms / y
        joined = chosen is not lines[-1][0]
        axes.errorbar(
            [np.log2(1 / r.density) for r in chosen],
            y[0],
            yerr=np.maximum([y[0] - y[1], y[2] - y[0]], 0),
            color=style.color,
            alpha=max(0.25, 1 - 0.25 * i) if joined else 1,  # smaller blocks are paler
            marker=style.marker,
            ls=style.line if joined else "none",
            mfc=style.color if joined else "white",
            elinewidth=0.8,
            label=f"{rows[0].provider}, {what}",
        )


def _random(row: SpeedRow) -> bool:
    return row.mask.startswith("random")


def draw_length(rows: Sequence[SpeedRow]) -> Figure:
    """Time against length on logarithmic axes: dense filled, masked open, a panel a direction."""
    figure, panels = _panels(rows)
    for axes, group in panels:
        for line in _by_length(group):
            if len(line) < 2:
                continue
            style, dense = _style(line[0].provider), line[0].mask == DENSE
            axes.plot(
                [r.n_q for r in line],
                [r.ms for r in line],
                color=style.color,
                marker=style.marker,
                ls="-" if dense else "--",
                mfc=style.color if dense else "white",
                label=f"{line[0].provider}, {line[0].mask}",
            )
        axes.set(xscale="log", yscale="log", xlabel="length (tokens)", title=group[0].direction)
        lengths = sorted({r.n_q for r in group})
        axes.xaxis.set_major_locator(FixedLocator(lengths))
        axes.xaxis.set_major_formatter(lambda n, _: token_text(int(n)))
        axes.xaxis.set_minor_locator(NullLocator())
        axes.yaxis.set_major_formatter(lambda y, _: f"{y:g}")
        axes.yaxis.set_minor_formatter(NullFormatter())
    panels[0][0].set_ylabel("time (ms)")
    legend(figure, [axes for axes, _ in panels], columns=2)
    figure.suptitle(_caption(rows[0], length=False), fontsize=8)
    return figure


def draw_masks(rows: Sequence[SpeedRow], columns: int = 4, most: int = 12) -> Figure:
    """The masks of the rows, each at the length that it was measured at most often."""
    chosen: dict[str, SpeedRow] = {}
    for row in sorted(rows, key=lambda r: (-sum(r.n_q == s.n_q for s in rows), -r.density)):
        if row.mask != DENSE and len(chosen) < most:
            chosen.setdefault(row.mask, row)
    columns = min(columns, len(chosen))
    lines = -(-len(chosen) // columns)
    size = PAGE / max(columns, 3)
    # The resolution is given here already because a mask draws as many pixels as its axes have.
    figure, grid = plt.subplots(
        lines,
        columns,
        figsize=(size * columns, (size + 0.45) * lines + 0.3),
        dpi=RC["savefig.dpi"],
        squeeze=False,
    )
    for axes in grid.flat[len(chosen) :]:
        axes.set_visible(False)
    handles: list[Any] = []
    for axes, row in zip(grid.flat, chosen.values(), strict=False):
        fields = {name: getattr(row, name) for name in Case.__dataclass_fields__}
        blocks = Case(**fields).blocks
        assert blocks is not None
        blocks.draw(ax=axes)
        axes.set(xlabel="", ylabel="", xticks=[], yticks=[])
        axes.set_title(f"{_wrapped(row.mask)}\n{row.n_q} tokens, density {row.density:.3f}")
        for spine in axes.spines.values():
            spine.set(visible=True, color="0.7", lw=0.6)
        if found := axes.get_legend():
            handles = found.legend_handles
            found.remove()
    labels = [str(handle.get_label()) for handle in handles]
    figure.legend(handles, labels, loc="outside lower center", ncols=len(labels))
    return figure


# ---- what the figures share


def grouped(rows: Iterable[SpeedRow], key: Callable[[SpeedRow], T]) -> list[list[SpeedRow]]:
    """Rows with the same key together, in the order in which the keys come first."""
    groups: dict[T, list[SpeedRow]] = defaultdict(list)
    for row in rows:
        groups[key(row)].append(row)
    return list(groups.values())


def _by_length(rows: Iterable[SpeedRow]) -> list[list[SpeedRow]]:
    """The rows that differ in nothing but their length together, short to long."""
    rows = sorted(rows, key=lambda r: r.n_q)
    return grouped(rows, lambda r: (r.provider, r.direction, r.mask, r.block_q, r.block_k))


def _panels(rows: Sequence[SpeedRow]) -> tuple[Figure, list[tuple[Axes, list[SpeedRow]]]]:
    groups = sorted(grouped(rows, lambda r: r.direction), key=lambda g: g[0].direction != "forward")
    width = PAGE / 2 * max(len(groups), 1.3)
    figure, grid = plt.subplots(
        1, len(groups), figsize=(width, 3.3), sharex=True, sharey=True, squeeze=False
    )
    return figure, list(zip(grid.flat, groups, strict=True))


def _sparsity_axis(axes: Axes, deepest: float) -> None:
    """Sparsity at equal steps of halved density, speed-up at equal steps of doubled speed."""
    ticks = range(int(np.ceil(deepest - 1e-9)) + 1)
    axes.set_xticks(list(ticks), [f"{100 * (1 - 0.5**t):.3g}" for t in ticks])
    axes.set_xlabel("sparsity: blocks that are skipped (%)")
    axes.set_yscale("log", base=2)
    axes.yaxis.set_major_formatter(lambda y, _: f"{y:g}")


def _providers(rows: Sequence[SpeedRow]) -> list[str]:
    """Providers that have masked rows, ours first."""
    names = dict.fromkeys(r.provider for r in rows if r.mask != DENSE)
    return sorted(names, key=lambda name: name not in OWN)


def _style(provider: str) -> Style:
    return STYLES.get(provider, OTHER)


def _wrapped(mask: str, width: int = 30) -> str:
    """The text of a mask in lines of about `width`, broken after its operators."""
    lines = [""]
    for part in re.split(r"(?<=[|&\-+*])\s*", mask):
        if lines[-1] and len(lines[-1]) + len(part) > width:
            lines.append("")
        lines[-1] += part + " "
    return "\n".join(line.strip() for line in lines)


def _caption(row: SpeedRow, *, length: bool = True) -> str:
    heads = f"H {row.heads}" if row.heads == row.kv_heads else f"H {row.heads}/{row.kv_heads}"
    tokens = f", N {row.n_q}" if length else ""
    dims = f"D {row.head_dim}" if row.v_dim == row.head_dim else f"D {row.head_dim}/{row.v_dim}"
    layout = "" if row.layout == LAYOUTS[0] else f", {row.layout}"
    return f"{row.device}: B {row.batch}, {heads}{tokens}, {dims}, {row.dtype}{layout}"


def _slug(row: SpeedRow, *, length: bool = True) -> str:
    return re.sub(r"[^A-Za-z0-9]+", "-", _caption(row, length=length)).strip("-").lower()


@hydra.main(version_base="1.3", config_path="conf", config_name="plot")
def entry(config: DictConfig) -> None:
    matplotlib.use("Agg")  # no display is needed
    paths = draw_all(config.csv, config.out)
    print(f"rows:  {config.csv}\ntable: {Path(config.csv).with_suffix('.txt')}\nplots:")
    print("\n".join(f"  {path}" for path in paths))


if __name__ == "__main__":
    entry()
