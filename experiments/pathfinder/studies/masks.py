"""Which masks learn Pathfinder: accuracy against density, and against the depth of full reach.

Every run starts from a model that has learned the task.

    python -m experiments.sweep sweep=path_masks at_once=4
    python -m experiments.pathfinder.studies.masks
    python -m experiments.pathfinder.studies.masks runs=docs/results/lra/path_masks.jsonl.gz
    python -m experiments.pathfinder.studies.masks label=path_x_masks runs=runs/train

A mask reaches all pairs at the depth at which every token has seen every other one, through as many
layers. In a model of fewer layers, tokens farther apart meet in the mean that the head sees only.
Runs are folders of experiments.train with a label, and those that they start from, or an archive of
them.
"""

import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pandas as pd
from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure

import masks
from experiments.common.config import check, option
from experiments.common.figures import PAGE, Style, curve, legend, save, style
from experiments.common.program import program
from experiments.common.tables import MISSING, markdown
from experiments.lra.cells import Cell, make_cells
from experiments.lra.figures import pattern_names
from experiments.lra.published import LABELS, STYLES
from experiments.lra.runs import QUANTITIES, Run, read_runs, unpacked, write_archive

SWEEPS = {"masks": "path_masks", "path_x_masks": "path_x_masks"}  # label of the runs: sweep
GLOBAL = " + global tokens"
LOOKS = [*STYLES.values()]
FAMILIES = {  # by order of the pixels and patterns of the mask
    ("row", ""): ("dense", LOOKS[0]),
    ("row", "local"): ("window", LOOKS[1]),
    ("hilbert", "local"): ("window along a Hilbert curve", LOOKS[2]),
    ("tiles", "sliding tiles"): ("tiles", LOOKS[3]),
    ("row", "neighborhood"): ("2-D neighbourhood", LOOKS[4]),
    ("row", "butterfly + local"): ("butterfly", LOOKS[5]),
    ("row", "butterfly"): ("butterfly", LOOKS[5]),
    ("row", "random blocks"): ("random blocks", LOOKS[6]),
}


@dataclass(frozen=True)
class Point:
    """A cell of the study. density: share of all pairs."""

    family: str
    look: Style
    has_global: bool
    density: float
    layers: int
    cell: Cell
    start: float | None  # accuracy of what its runs start from
    weights: str  # what that is: dense, block-sparse, or "" if unknown

    @property
    def depth(self) -> float:
        """Layers of full reach, or inf."""
        return next((i for i, seen in enumerate(self._seen, 1) if seen == 1), math.inf)

    @property
    def seen(self) -> float:
        """Share of all pairs that the model's layers connect."""
        return self._seen[min(self.layers, len(self._seen)) - 1]

    @property
    def _seen(self) -> tuple[float, ...]:
        run = self.cell.runs[0]
        return _seen(run.mask, run.length or 0) if run.mask else (1.0,)


@cache
def _seen(mask: str, n: int) -> tuple[float, ...]:
    """Return the share of all pairs that 1, 2, .. layers connect."""
    return masks.parse(mask).reach(n, exact=True).upper


def points(runs: Sequence[Run], label: str = "masks") -> list[Point]:
    """Return the cells of the runs with that label, by family and density.

    Raises ValueError if there is none, or one of a family that the study does not have.
    """
    chosen = [run for run in runs if run.settings.get("label") == label]
    if not chosen:
        raise ValueError(
            f"no run has label={label}; train first: "
            f"python -m experiments.sweep sweep={SWEEPS[label]}"
        )
    cells, _ = make_cells(chosen)
    found = [_point(cell, runs) for cell in cells.values()]
    middle = _middle(found)
    return sorted(found, key=lambda p: (_place(p), p.density < middle, p.has_global))


def _middle(found: Iterable[Point]) -> float:
    """Return a density between the two of the masks."""
    sparse = [p.density for p in found if p.density < 1]
    return (min(sparse) * max(sparse)) ** 0.5 if sparse else 1.0


def _place(point: Point) -> int:
    return [name for name, _ in FAMILIES.values()].index(point.family)


def _order(run: Run) -> str:
    return str(run.settings["task"].get("order") or "row").partition(":")[0]


def _starts(of: Iterable[Run], runs: Iterable[Run]) -> list[Run]:
    """Return the runs that the first ones start from."""
    folders = {str(run.settings["init_from"]) for run in of if run.settings.get("init_from")}
    return [run for run in runs if run.place.endswith(tuple(folders))]


def _point(cell: Cell, runs: Sequence[Run]) -> Point:
    run = cell.runs[0]
    text, n, layers = run.mask, run.length or 0, run.settings["model"]["layers"]
    order = _order(run) if text else "row"  # dense attention is the same in every order
    before = [x for x in _starts(cell.runs, runs) if x.accuracy is not None]
    start = statistics.fmean(x.accuracy or 0.0 for x in before) if before else None
    weights = " and ".join(sorted({"block-sparse" if x.mask else "dense" for x in before}))
    patterns = pattern_names(text) if text else ""
    base = patterns.removesuffix(" + global")
    if (order, base) not in FAMILIES:
        raise ValueError(
            f"{run.place} has task.order={order} and mask={text}, no family of the study: "
            "leave its folder out of runs="
        )
    name, look = FAMILIES[order, base]
    if not text:
        return Point(name, look, False, 1.0, layers, cell, start, weights)
    density = masks.parse(text).stats(n).element_density
    return Point(name, look, base != patterns, density, layers, cell, start, weights)


def tables(frame: pd.DataFrame) -> dict[str, str]:
    """Return the table of an archive of runs, `masks`, as Markdown."""
    runs = [unpacked(row) for row in frame.to_dict("records")]
    labels = {run.settings.get("label") for run in runs}
    return {"masks": table(points(runs, next(label for label in SWEEPS if label in labels)))}


def table(found: Sequence[Point]) -> str:
    """Return the cells as Markdown."""
    layers = found[0].layers
    head = ["pairs %", "layers of full reach", f"seen in {layers} layers %", "accuracy %"]
    rows = [["", *head, "over its start", "runs"]]
    for point in found:
        spread, accuracy, start = point.cell.spread, point.cell.accuracy, point.start
        value = MISSING if accuracy is None else f"{accuracy:.1f}"
        gain = None if accuracy is None or start is None else accuracy - start
        rows.append(
            [
                point.family + GLOBAL * point.has_global,
                f"{100 * point.density:.1f}",
                "never" if math.isinf(point.depth) else f"{point.depth:.0f}",
                f"{100 * point.seen:.1f}",
                value + ("" if spread is None else f" ± {spread:.1f}"),
                MISSING if gain is None else f"{round(gain, 1) + 0:+.1f}",  # never -0.0
                str(len(point.cell.runs)),
            ]
        )
    return markdown(rows)


def summary(found: Sequence[Point]) -> str:
    """Return the spread of the seeds, and what the accuracy of the masks goes with."""
    squares = [p.cell.spread**2 for p in found if p.cell.spread is not None]
    pooled = f"{statistics.fmean(squares) ** 0.5:.2f} points" if squares else "not known"
    sparse = [p for p in found if p.density < 1 and p.cell.accuracy is not None]
    ranks = pd.Series([p.cell.accuracy or 0.0 for p in sparse], dtype=float).rank()
    kinds = {
        "pairs": [p.density for p in sparse],
        "layers of full reach": [p.depth for p in sparse],
        f"seen in {found[0].layers} layers": [p.seen for p in sparse],
    }
    varied = {name: pd.Series(x).rank() for name, x in kinds.items() if len(set(x)) > 1}
    varied = varied if ranks.nunique() > 1 else {}
    shown = [f"{name} {x.corr(ranks):.2f}" for name, x in varied.items()]
    return (
        f"standard deviation of the seeds, pooled over {len(squares)} cells: {pooled}\n"
        f"rank correlation with accuracy over {len(sparse)} cells: {', '.join(shown) or MISSING}"
    )


def draw(found: Sequence[Point]) -> Figure:
    """Draw accuracy by density on the left, against the depth of full reach on the right.

    Markers of one place stand side by side. Dense attention is a band across both panels.
    """
    figure, (left, right) = plt.subplots(1, 2, figsize=(PAGE, 3.4), sharey=True)
    sparse = [p for p in found if p.density < 1 and p.cell.accuracy is not None]
    for axes in (left, right):
        for point in found:
            if point.density == 1 and point.cell.accuracy is not None:
                low, high = _ends(point)
                axes.axhspan(low, high, color=point.look.color, alpha=0.15, lw=0)
                axes.axhline(point.cell.accuracy, color=point.look.color, lw=1, label="dense")
    names = list(dict.fromkeys(point.family for point in sparse))
    middle = _middle(sparse)
    groups = [[p for p in sparse if (p.density < middle) == s] for s in (True, False)]
    groups = [group for group in groups if group]
    for x, group in enumerate(groups):
        for point in group:
            place = names.index(point.family) + 0.35 * point.has_global
            _marker(left, x + 0.8 * (place + 0.325) / len(names) - 0.4, point)
    left.set_xticks(range(len(groups)), [_pairs(group) for group in groups])
    left.set(xlim=(-0.5, len(groups) - 0.5), xlabel="pairs (%)", ylabel="test accuracy (%)")
    left.grid(False, axis="x")

    never = 2 * max((p.depth for p in sparse if not math.isinf(p.depth)), default=1)
    depths = sorted({p.depth for p in sparse})
    for depth in depths:
        group = [point for point in sparse if point.depth == depth]
        for number, point in enumerate(group):
            _marker(right, min(depth, never) * 2 ** (0.07 * (number - (len(group) - 1) / 2)), point)
    layers = found[0].layers
    right.axvline(layers + 0.5, color="0.45", lw=1, ls=":", label=f"the model's {layers} layers")
    right.set_xscale("log", base=2)
    ticks: list[list[float]] = []
    for depth in depths:  # those close to each other share a tick
        if ticks and depth < 1.15 * ticks[-1][-1]:
            ticks[-1].append(depth)
        else:
            ticks.append([depth])
    texts = [", ".join("never" if math.isinf(x) else f"{x:g}" for x in tick) for tick in ticks]
    middles = [min(math.sqrt(tick[0] * tick[-1]), never) for tick in ticks]
    right.set_xticks(middles, texts, fontsize="x-small")
    right.minorticks_off()
    right.set_xlabel("layers until every token has seen all others")
    legend(figure, [left, right], title="open: with global tokens")
    runs = [run for point in found for run in point.cell.runs]
    devices = ", ".join(dict.fromkeys(run.device for run in runs))
    several = any(point.cell.spread is not None for point in found)
    bars = "bars and band: lowest to highest seed" if several else "single runs"
    task = f"{LABELS[runs[0].task]}, contour {runs[0].settings['task'].get('difficulty') or 14}"
    start = f", from {found[0].weights} weights" * bool(found[0].weights)
    figure.suptitle(f"{task}{start}; {devices}; {bars}", fontsize=8)
    return figure


def _pairs(group: Sequence[Point]) -> str:
    low, high = (f"{100 * end(p.density for p in group):.0f}" for end in (min, max))
    return low if low == high else f"{low} to {high}"


def _ends(point: Point) -> tuple[float, float]:
    return min(point.cell.accuracies), max(point.cell.accuracies)


def _marker(axes: Axes, x: float, point: Point) -> None:
    labels = axes.get_legend_handles_labels()[1]
    label, filled = None if point.family in labels else point.family, not point.has_global
    low, high = ([end] for end in _ends(point))
    y = [point.cell.accuracy or 0.0]
    curve(axes, [x], y, point.look, label, low=low, high=high, line=False, filled=filled)


def archived(runs: Sequence[Run], label: str = "masks") -> list[Run]:
    """Return the runs of the study and their starts, without what its table and figure do not need.

    Training curves have the logged steps at which the run was validated, values four decimals, and
    times whole seconds. Which test examples were answered rightly is left out: it is most of the
    bytes.
    """
    chosen = [run for run in runs if run.settings.get("label") == label]
    return [_light(run) for run in (*chosen, *_starts(chosen, runs))]


def _light(run: Run) -> Run:
    val = run.of("val")
    steps = {line["step"] for line in val}
    lines = [
        line | {"seconds": round(line["seconds"])} | {x: round(line[x], 4) for x in QUANTITIES}
        for line in [*(line for line in run.of("train") if line["step"] in steps), *val]
    ]
    result = {k: v for k, v in (run.file["result"] or {}).items() if k != "correct"}
    return Run(run.place, {**run.file, "result": result or None}, lines + run.of("test"))


@dataclass
class Options:
    label: str = option("masks", "of the runs of sweep=path_masks, or path_x_masks", choices=SWEEPS)
    runs: Any = option("runs/train/${label}*", "folders, globs or archives of runs", several=str)
    out: str = option("runs/pathfinder", "folder of the figure")
    archive: str | None = option(None, "a file to write the runs into, one compact line each")

    def __post_init__(self) -> None:
        check(self)


@program("path_masks", Options, "experiments.pathfinder.studies.masks")
def main(options: Options, command: str) -> None:
    label, runs = options.label, read_runs(options.runs)
    found = points(runs, label)
    with style():
        paths = save(draw(found), Path(options.out) / SWEEPS[label].replace("_", "-"))
    if options.archive:
        paths.append(Path(options.archive))
        write_archive(archived(runs, label), paths[-1])
    print(table(found), summary(found), sep="\n")
    print("\n".join(f"written: {path}" for path in paths))


if __name__ == "__main__":
    main()
