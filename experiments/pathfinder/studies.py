"""Which masks learn Pathfinder: accuracy against density, and against the depth of full reach.

Every run starts from a model that has learned the task.

    python -m experiments.sweep sweep=path_masks at_once=4
    python -m experiments.pathfinder.studies
    python -m experiments.pathfinder.studies runs=docs/results/lra/path_masks.jsonl.gz
    python -m experiments.pathfinder.studies label=path_x_masks runs=runs/train

A mask reaches all pairs at the depth at which every token has seen every other one, through as many
layers. In a model of fewer layers, tokens farther apart meet in the mean that the head sees only.
Runs are folders of experiments.train with a label, and those that they start from, or an archive of
them. `tables` also has the table of published shortcuts, of probes that see only the marks.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

import pandas as pd
from matplotlib import pyplot as plt
from matplotlib.figure import Figure

import masks
from experiments.common.config import Checked, option
from experiments.common.figures import PAGE, curve, legend, save, style
from experiments.common.program import program
from experiments.common.tables import MISSING, markdown
from experiments.lra.cells import Cell, make_cells
from experiments.lra.curves import pattern_names
from experiments.lra.published import LABELS, STYLES
from experiments.lra.runs import Run, read_runs, unpacked
from experiments.pathfinder.generate import VERSION

SWEEPS = {"masks": "path_masks", "path_x_masks": "path_x_masks"}  # label of the runs: sweep
GLOBAL = " + global tokens"
FAMILIES = {  # by order of the pixels and patterns of the mask
    ("row", ""): "dense",
    ("row", "local"): "window",
    ("hilbert", "local"): "window along a Hilbert curve",
    ("tiles", "sliding tiles"): "tiles",
    ("row", "neighborhood"): "2-D neighbourhood",
    ("row", "butterfly + local"): "butterfly",
    ("row", "butterfly"): "butterfly",
    ("row", "random blocks"): "random blocks",
}
NAMES = list(dict.fromkeys(FAMILIES.values()))
LOOKS = dict(zip(NAMES, STYLES.values(), strict=False))


def points(runs: Sequence[Run], label: str = "masks") -> pd.DataFrame:
    """Return a line for each cell of the runs with that label, by family and density.

    Its columns are family, has_global, density (share of all pairs), depth (layers of full reach,
    or inf), seen (share of all pairs that the model's layers connect), accuracy, spread, low, high
    (of the seeds), start (accuracy of what the runs start from), weights (what that is) and runs.

    Raises ValueError if there is none, or one of a family that the study does not have.
    """
    chosen = [run for run in runs if run.settings.get("label") == label]
    if not chosen:
        raise ValueError(
            f"no run has label={label}; train first: "
            f"python -m experiments.sweep sweep={SWEEPS[label]}"
        )
    found = pd.DataFrame([_point(cell, runs) for cell in make_cells(chosen)[0].values()])
    numbers = ["accuracy", "spread", "low", "high", "start"]
    found[numbers] = found[numbers].astype(float)
    sparse = found.density[found.density < 1]
    # between the two densities of the masks
    found["low_density"] = found.density < (sparse.min() * sparse.max()) ** 0.5
    found["place"] = found.family.map(NAMES.index)
    return found.sort_values(["place", "low_density", "has_global"], kind="stable")


def _point(cell: Cell, runs: Sequence[Run]) -> dict[str, Any]:
    run = cell.runs[0]
    text, layers = run.mask, run.settings["model"]["layers"]
    order = str(run.settings["task"].get("order") or "row").partition(":")[0] if text else "row"
    patterns = pattern_names(text) if text else ""
    base = patterns.removesuffix(" + global")
    if (order, base) not in FAMILIES:
        raise ValueError(
            f"{run.place} has task.order={order} and mask={text}, no family of the study: "
            "leave its folder out of runs="
        )
    seen, density = (1.0,), 1.0
    if text:
        mask = masks.parse(text)
        seen = mask.reach(run.length, exact=True).upper
        density = mask.stats(run.length).element_density
    folders = tuple(str(x.settings["init_from"]) for x in cell.runs if x.settings.get("init_from"))
    before = [x for x in runs if x.place.endswith(folders) and x.accuracy is not None]
    weights = sorted({"block-sparse" if x.mask else "dense" for x in before})
    return {
        "family": FAMILIES[order, base],
        "has_global": base != patterns,
        "density": density,
        "depth": next((i for i, share in enumerate(seen, 1) if share == 1), math.inf),
        "seen": seen[min(layers, len(seen)) - 1],
        "layers": layers,
        "accuracy": cell.accuracy,
        "spread": cell.spread,
        "low": min(cell.accuracies, default=None),
        "high": max(cell.accuracies, default=None),
        "start": fmean(x.accuracy or 0.0 for x in before) if before else None,
        "weights": " and ".join(weights),
        "runs": cell.runs,
    }


def tables(frame: pd.DataFrame) -> dict[str, str]:
    """Return the table of an archive of runs, `masks`, or of rows of probes, `shortcuts`."""
    if "right" in frame:
        return {"shortcuts": _shortcuts(frame)}
    runs = [unpacked(row) for row in frame.to_dict("records")]
    labels = {run.settings.get("label") for run in runs}
    return {"masks": table(points(runs, next(label for label in SWEEPS if label in labels)))}


def _shortcuts(rows: Any) -> str:
    """Return accuracies of probes on the images of now, in percent with 95 % intervals (Wilson's).

    A row counts the right answers of a probe that sees so many paddles at each of the two marks.
    """
    found = {
        (r.size, r.contour, r.paddles): r for r in rows.itertuples() if r.images_version == VERSION
    }
    counts = sorted({key[2] for key in found})
    heads = ["the marks", *(f"and {k} paddle{'s' * (k > 1)} at each" for k in counts if k)]
    lines = [["size", "contour", *heads[-len(counts) :]]]
    for key in sorted({key[:2] for key in found}):
        line = [*map(str, key)]
        for k in counts:
            row, text = found.get((*key, k)), MISSING
            if row is not None:
                n, share, z2 = row.tested, row.right / row.tested, 1.96**2
                half = 1.96 * (share * (1 - share) / n + z2 / (4 * n * n)) ** 0.5 / (1 + z2 / n)
                text = f"{100 * share:.1f} ± {100 * half:.1f}"
            line.append(text)
        lines.append(line)
    return markdown(lines, left=())


def table(found: Any) -> str:
    """Return the cells as Markdown."""
    seen = f"seen in {found.layers.iloc[0]} layers %"
    lines = [["", "pairs %", "layers of full reach", seen, "accuracy %", "over its start", "runs"]]
    for point in found.itertuples():
        gain, spread = point.accuracy - point.start, f" ± {point.spread:.1f}"
        lines.append(
            [
                point.family + GLOBAL * point.has_global,
                f"{100 * point.density:.1f}",
                "never" if math.isinf(point.depth) else f"{point.depth:.0f}",
                f"{100 * point.seen:.1f}",
                f"{point.accuracy:.1f}" + spread * (point.spread == point.spread),
                MISSING if gain != gain else f"{round(gain, 1) + 0:+.1f}",  # never -0.0
                str(len(point.runs)),
            ]
        )  # fmt: skip
    return markdown(lines)


def summary(found: Any) -> str:
    """Return the spread of the seeds, and what the accuracy of the masks goes with."""
    pooled = (found.spread**2).mean() ** 0.5
    sparse = found[found.density < 1]
    names = {"density": "pairs", "depth": "layers of full reach", "seen": "seen in all layers"}
    ranks = sparse[[*names, "accuracy"]].rank().corr().accuracy.dropna()
    shown = ", ".join(f"{names[name]} {ranks[name]:.2f}" for name in names if name in ranks)
    return (
        f"standard deviation of the seeds, pooled over {found.spread.count()} cells: {pooled:.2f}"
        f"\nrank correlation with accuracy over {len(sparse)} cells: {shown or MISSING}"
    )


def draw(found: Any) -> Figure:
    """Draw accuracy by density on the left, against the depth of full reach on the right.

    Families are shifted a little, so that markers of one place stand side by side. Dense attention
    is a band across both panels.
    """
    figure, (left, right) = plt.subplots(1, 2, figsize=(PAGE, 3.4), sharey=True)
    sparse, layers = found[found.density < 1], found.layers.iloc[0]
    never = 2 * max((depth for depth in sparse.depth if not math.isinf(depth)), default=1)
    for axes in (left, right):
        axes.set_xscale("log", base=2)
        axes.minorticks_off()
        for point in found[found.density == 1].itertuples():
            color = LOOKS[point.family].color
            axes.axhspan(point.low, point.high, color=color, alpha=0.15, lw=0)
            axes.axhline(point.accuracy, color=color, lw=1, label="dense")
        labels = set()
        for point in sparse.itertuples():
            shift = 1.03 ** (point.place + 0.4 * point.has_global - len(NAMES) / 2)
            x = 100 * point.density if axes is left else min(point.depth, never)
            label = None if point.family in labels else point.family
            labels.add(point.family)
            look: dict[str, Any] = {"low": [point.low], "high": [point.high], "line": False}
            look["filled"] = not point.has_global
            curve(axes, [x * shift], [point.accuracy], LOOKS[point.family], label, **look)
    densities = [group.density.median() for _, group in sparse.groupby("low_density")]
    left.set_xticks([100 * x for x in densities], [f"{100 * x:.0f}" for x in densities])
    left.set(xlabel="pairs (%)", ylabel="test accuracy (%)")
    depths = sorted({min(depth, never) for depth in sparse.depth})
    right.set_xticks(depths, [f"{x:g}" if x < never else "never" for x in depths], rotation=90)
    right.axvline(layers + 0.5, color="0.45", lw=1, ls=":", label=f"the model's {layers} layers")
    right.set_xlabel("layers until every token has seen all others")
    legend(figure, [left, right], title="open: with global tokens")
    runs: list[Run] = [run for some in found.runs for run in some]
    devices = ", ".join(dict.fromkeys(run.device for run in runs))
    bars = "bars and band: lowest to highest seed" if found.spread.any() else "single runs"
    task = f"{LABELS[runs[0].task]}, contour {runs[0].settings['task'].get('difficulty') or 14}"
    start = f", from {found.weights.iloc[0]} weights" * bool(found.weights.iloc[0])
    figure.suptitle(f"{task}{start}; {devices}; {bars}", fontsize=8)
    return figure


@dataclass
class Options(Checked):
    label: str = option("masks", "of the runs of sweep=path_masks, or path_x_masks", choices=SWEEPS)
    runs: Any = option("runs/train/${label}*", "folders, globs or archives of runs", several=str)
    out: str = option("runs/pathfinder", "folder of the figure")


@program("path_masks", Options, "experiments.pathfinder.studies")
def main(options: Options, command: str) -> None:
    found = points(read_runs(options.runs), options.label)
    with style():
        paths = save(draw(found), Path(options.out) / SWEEPS[options.label].replace("_", "-"))
    print(table(found), summary(found), *(f"written: {path}" for path in paths), sep="\n")


if __name__ == "__main__":
    main()
