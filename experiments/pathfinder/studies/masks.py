"""Which masks learn Pathfinder: accuracy against density, and against the depth of full reach.

Every run starts from dense attention that has learned the task in the same order of the pixels.

    python -m experiments.sweep sweep=path_masks at_once=4
    python -m experiments.pathfinder.studies.masks
    python -m experiments.pathfinder.studies.masks runs=docs/results/lra/path_masks

A mask reaches all pairs at the depth at which every token has seen every other one, through as many
layers. A model of fewer layers cannot compare the two marks wherever they lie. Runs are folders of
experiments.train with label=masks, or an archive of them.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure

import masks
from experiments.common.checks import as_list
from experiments.common.figures import PAGE, Style, curve, legend, save, style
from experiments.common.program import program
from experiments.common.text_table import MISSING, markdown
from experiments.lra.cells import Cell, make_cells
from experiments.lra.figures import pattern_names
from experiments.lra.published import STYLES
from experiments.lra.run_files import read_runs, write_archive
from experiments.lra.runs import Run

LABEL = "masks"
GLOBAL = " + global tokens"
SPARSER = 0.18  # between the two densities of the study
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
    """A cell of the study. density: share of all pairs; depth: layers of full reach, or inf."""

    family: str
    look: Style
    has_global: bool
    density: float
    depth: float
    seen: float  # share of all pairs that the model's layers connect
    layers: int
    cell: Cell


def points(runs: Sequence[Run]) -> list[Point]:
    """The cells of the runs with label=masks, by family and density.

    Raises ValueError if there is none, or one of a family that the study does not have.
    """
    chosen = [run for run in runs if run.config.get("label") == LABEL]
    if not chosen:
        raise ValueError(
            f"no run has label={LABEL}; train first: python -m experiments.sweep sweep=path_masks"
        )
    cells, _ = make_cells(chosen)
    found = [_point(cell) for cell in cells.values()]
    return sorted(found, key=lambda p: (_place(p), p.density < SPARSER, p.has_global))


def _place(point: Point) -> int:
    return [name for name, _ in FAMILIES.values()].index(point.family)


def _point(cell: Cell) -> Point:
    run = cell.runs[0]
    text, n, layers = run.mask, run.length or 0, run.config["model"]["layers"]
    order = str(run.config["task"].get("order") or "row").partition(":")[0]
    patterns = pattern_names(text) if text else ""
    base = patterns.removesuffix(" + global")
    if (order, base) not in FAMILIES:
        raise ValueError(
            f"{run.place} has task.order={order} and mask={text}, no family of the study: "
            "leave its folder out of runs="
        )
    name, look = FAMILIES[order, base]
    if not text:
        return Point(name, look, False, 1.0, 1, 1.0, layers, cell)
    mask = masks.parse(text)
    reach = mask.reach(n, exact=True)
    depth = math.inf if reach.at_least is None else reach.at_least
    seen = reach.upper[min(layers, len(reach.upper)) - 1]
    density = mask.stats(n).element_density
    return Point(name, look, base != patterns, density, depth, seen, layers, cell)


def table(found: Sequence[Point]) -> str:
    """The cells as Markdown."""
    layers = found[0].layers
    head = ["pairs %", "layers of full reach", f"seen in {layers} layers %", "accuracy %", "runs"]
    rows = [["", *head]]
    for point in found:
        spread = point.cell.spread
        value = MISSING if point.cell.accuracy is None else f"{point.cell.accuracy:.1f}"
        rows.append(
            [
                point.family + GLOBAL * point.has_global,
                f"{100 * point.density:.1f}",
                "never" if math.isinf(point.depth) else f"{point.depth:.0f}",
                f"{100 * point.seen:.1f}",
                value + ("" if spread is None else f" ± {spread:.1f}"),
                str(len(point.cell.runs)),
            ]
        )
    return markdown(rows)


def draw(found: Sequence[Point]) -> Figure:
    """Accuracy against density on the left, and against the depth of full reach on the right."""
    figure, (left, right) = plt.subplots(1, 2, figsize=(PAGE, 3.0), sharey=True)
    deepest = max((p.depth for p in found if not math.isinf(p.depth)), default=1)
    never = deepest + 1
    for point in found:
        if point.cell.accuracy is not None:
            _marker(left, 100 * point.density, point)
            _marker(right, min(point.depth, never), point)
    layers = found[0].layers
    right.axvline(layers + 0.5, color="0.45", lw=1, ls=":", label=f"the model's {layers} layers")
    left.set_xscale("log")
    shown = [d for d in (3, 6, 12.5, 25, 50, 100) if d >= 90 * min(p.density for p in found)]
    left.set_xticks(shown, [f"{d:g}" for d in shown])
    left.minorticks_off()
    left.set_xlabel("pairs (%)")
    left.set_ylabel("test accuracy (%)")
    depths = list(range(1, int(deepest) + 1))
    ends = [never] if any(math.isinf(p.depth) for p in found) else []
    right.set_xticks([*depths, *ends], [*map(str, depths), *["never"] * len(ends)])
    right.set_xlabel("layers until every token has seen all others")
    legend(figure, [left, right], title="open: with global tokens")
    runs = [run for point in found for run in point.cell.runs]
    devices = ", ".join(dict.fromkeys(run.device for run in runs))
    several = any(point.cell.spread is not None for point in found)
    bars = "bars: standard deviation of the seeds" if several else "single runs"
    figure.suptitle(f"Pathfinder, contour 6, from dense weights; {devices}; {bars}", fontsize=8)
    return figure


def _marker(axes: Axes, x: float, point: Point) -> None:
    y, spread = point.cell.accuracy or 0.0, point.cell.spread
    low, high = (None, None) if spread is None else ([y - spread], [y + spread])
    labels = axes.get_legend_handles_labels()[1]
    label, filled = None if point.family in labels else point.family, not point.has_global
    curve(axes, [x], [y], point.look, label, low=low, high=high, line=False, filled=filled)


@program("path_masks", "experiments.pathfinder.studies.masks")
def main(options: dict[str, Any], command: str) -> None:
    runs = read_runs(as_list(options["runs"]))
    found = points(runs)
    out = Path(options["out"])
    out.mkdir(parents=True, exist_ok=True)
    with style():
        paths = save(draw(found), out / "path-masks")
    if options["archive"]:
        paths.append(Path(options["archive"]))
        write_archive([run for run in runs if run.config.get("label") == LABEL], paths[-1])
    print(table(found))
    print("\n".join(f"written: {path}" for path in paths))


if __name__ == "__main__":
    main()
