"""Which mask keeps what dense attention can do: small models that answer questions.

    python -m experiments.study name=which_mask part=first          # train on a CPU, rows, tables
    python -m experiments.study name=which_mask part=density at_once=8       # five minutes of a GPU
    python -m experiments.study name=which_mask part=density full=true at_once=8 minutes=25

All masks are causal, consist of whole blocks, and have the share of the pairs of the causal mask
that is nearest to a density. The folders of the runs are the state: the same command continues.
"""

import math
from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, partial
from itertools import product
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
from matplotlib import pyplot as plt
from matplotlib.figure import Figure
from matplotlib.ticker import NullLocator

import masks
from experiments import sweep
from experiments.common import figures as f
from experiments.common.config import choose
from experiments.common.files import write_json_lines
from experiments.common.rows import OK, Row, found, read
from experiments.common.tables import MISSING, markdown, mean_std, pivot
from experiments.lm.model import picked_pairs, resolve
from experiments.lm.questions import NONE, synthetic
from experiments.lm.settings import MODELS
from experiments.studies import runner
from experiments.training import run_file
from masks import Mask
from masks.analysis.reach import reach
from sparseflash.select import Selector

NEAR = 0.15  # how far the density of a mask may be from the one that is wanted
SOLVED = 0.9  # the accuracy whose time is compared
SEQUENCES = 512  # that tell what questions see
DENSITIES = (0.5, 0.25, 0.125, 0.08)  # of 1,024 tokens: below, families have no mask
NEVER = 1 / 64  # the depth in units of the reach, in a figure, of a mask that never reaches all


# ---- masks of a density


def _band(block: int, blocks: int) -> Mask:
    """Return the own block and so many before it; causal with the rest of a mask."""
    return masks.local(blocks * block, 0) >> masks.snap(block)


# family -> masks from sparse to dense, of p = 0, 1, 2, .. blocks
STATIC: dict[str, Callable[[int, int, int], Mask]] = {
    "window": lambda n, b, p: _band(b, p),
    "dilated": lambda n, b, p: _band(b, 1) | masks.dilated(2 * b * (p + 1), 2 * b) >> masks.snap(b),
    "strided": lambda n, b, p: _band(b, p) | masks.dilated(n, b * (p + 1)) >> masks.snap(b),
    "butterfly": lambda n, b, p: masks.butterfly(b) | _band(b, p),
    "random": lambda n, b, p: masks.random_blocks(count=p + 1, block=b, causal=True) | _band(b, 0),
    "expander": lambda n, b, p: masks.expander(2 * p + 2, b),
    "BigBird": lambda n, b, p: masks.bigbird(b, p, per_head=False),
    "Longformer": lambda n, b, p: _band(b, p) | masks.global_tokens(b) | masks.last_rows(b),
    "streaming": lambda n, b, p: _band(b, p) | masks.sinks(b),
}
PICKING = {"MoBA": "moba({b}, {k})", "NSA": "nsa({k}, {b})", "top-k": "top_k({k}, {b})"}
FAMILIES = (*STATIC, *PICKING)
DIFFERENT = ("window", "butterfly", "random", "BigBird", "Longformer", "MoBA", "top-k")


@cache
def _choice(family: str, n: int, block: int, p: int) -> tuple[float, str]:
    """Return (density, text) of a mask of a family; infinity where there is none."""
    every = n * (n + 1) / 2
    if family in PICKING:
        return picked_pairs(n, block, p + 1) / every, PICKING[family].format(b=block, k=p + 1)
    try:
        mask = STATIC[family](n, block, p) & masks.causal()
        return mask.stats(n).element_density * n * n / every, str(mask)
    except ValueError:  # no such graph of so few blocks
        return math.inf, ""


def nearest(family: str, density: float, n: int, block: int) -> tuple[str, float]:
    """Return the mask of a family, as text, with the share of the causal pairs that is nearest to a
    density, and that share. Static masks of many blocks are tried in steps of 4 %.

    Raises ValueError if it differs by more than `NEAR` of the density.
    """
    sizes: Sequence[int] = range(n // block)
    if family in STATIC:
        steps = {*range(26)} | {round(25 * 1.04**i) for i in range(100)}
        sizes = [p for p in sorted(steps) if p < n // block]
    choice = partial(_choice, family, n, block)
    if family != "strided":  # all others have more pairs with every step
        at = bisect_left(sizes, density, key=lambda p: choice(p)[0])
        sizes = sizes[max(0, at - 1) : at + 2]  # the sparsest expander may be none
    own, text = min(map(choice, sizes), key=lambda c: abs(math.log(c[0] / density)))
    if abs(own / density - 1) > NEAR:
        raise ValueError(
            f"{family} at density {density:g}, {n} tokens, blocks of {block}: the nearest has"
            f" {own:.3f}"
        )
    return text, own


# ---- the runs


@dataclass(frozen=True)
class Part:
    """Runs that answer one question."""

    about: str
    data: tuple[str, ...]
    lengths: tuple[int, ...] = (1024,)
    densities: tuple[float, ...] = (0.125,)
    blocks: tuple[int, ...] = (16,)
    layers: tuple[int, ...] = (2,)
    families: tuple[str, ...] = FAMILIES
    recipe: tuple[str, ...] = ()
    seeds: str = "0,1,2"
    width: int | None = None  # blocks of static masks at any length, in place of densities
    few: Mapping[str, Any] = field(default_factory=dict)  # what is smaller unless full=true

    def cases(self) -> Iterator[Row]:
        """Yield what is trained, of one seed: fields of rows; a status where there is no mask."""
        for data, n, block, layers in product(self.data, self.lengths, self.blocks, self.layers):
            shared = {"data": data, "context": n, "block": block, "layers": layers}
            yield shared | {"family": "dense", "target": 1.0, "mask": "dense"}
            if self.width is not None:
                for family in self.families:
                    mask = str(STATIC[family](n, block, self.width) & masks.causal())
                    yield shared | {"family": family, "target": 0.0, "mask": mask}
                continue
            for target, family in product(self.densities, self.families):
                case = shared | {"family": family, "target": target}
                try:
                    yield case | {"mask": nearest(family, target, n, block)[0]}
                except ValueError as error:
                    yield case | {"mask": "", "status": str(error)}


GPU = (
    "warmup=200", "batch=32", "steps=5000", "eval_every=250", "log_every=250", "val_tokens=524288",
    "compile=false", "precision=bf16", "betas=[0.9,0.98]",
)  # fmt: skip
RECIPE = ("lr=2e-3", "conv=3")  # of all parts after part=recipe
CPU = (
    "provider=sdpa", "batch=8", "steps=800", "betas=[0.9,0.98]", *RECIPE, "warmup=50",
    "eval_every=50", "log_every=50", "val_tokens=32768",
)  # fmt: skip
PARTS = {
    "first": Part(
        "the smallest form, on a CPU", ("passkey:5",), (256,), (0.25,), (8,),
        families=tuple(STATIC), recipe=CPU,
    ),
    "recipe": Part(
        "how dense attention solves the tasks", ("passkey:5", "mqar:32", "variables:2"),
        families=(), recipe=(*GPU, "lr=1e-3,3e-3", "conv=null,3"), seeds="0",
    ),
    "density": Part(
        "accuracy against density", ("mqar:32", "passkey:5"), densities=DENSITIES,
        recipe=(*GPU, *RECIPE),
        few={"data": ("mqar:32",), "densities": (0.5, 0.25, 0.125), "families": DIFFERENT},
    ),
    "depth": Part(
        "accuracy against depth", ("passkey:5", "mqar:32", "variables:2"), layers=(2, 4, 8),
        recipe=(*GPU, *RECIPE),
        few={"data": ("passkey:5",), "families": ("window", "butterfly", "random")},
    ),
    "blocks": Part(
        "accuracy against the size of blocks", ("mqar:32",), (2048,), (0.27,),
        (16, 32, 64, 128), families=("window", "random", *PICKING),
        recipe=(*GPU, *RECIPE, "batch=16"), few={"families": ("window", "random", "MoBA", "top-k")},
    ),
    "lengths": Part(
        "accuracy against length", ("passkey:5", "variables:2"), (1024, 2048, 4096, 16384),
        (0.135,), blocks=(32,), recipe=(*GPU, *RECIPE, "batch=8", "val_tokens=2097152"),
        few={"data": ("passkey:5",), "lengths": (1024, 4096, 16384),
             "families": ("window", "random", "Longformer", "MoBA")},
    ),
    "documents": Part(
        "accuracy against the tokens read of a document", ("passkey:5@65536",),
        tuple(2**i for i in range(9, 17)), blocks=(64,), families=("Longformer", "window"),
        width=1, seeds="0,1",
        recipe=(*GPU, *RECIPE, "batch=8", "val_tokens=4194304", "eval_every=1000"),
        few={"data": ("passkey:5@16384",), "lengths": tuple(2**i for i in range(9, 15))},
    ),
    "documents_first": Part(
        "the same on a CPU", ("passkey:5@256",), (64, 128, 256), blocks=(8,),
        families=("Longformer", "window"), width=1, recipe=(*CPU, "eval_every=200"), seeds="0,1",
        few={"seeds": "0", "lengths": (128, 256)},
    ),
    "tasks": Part(
        "MAD's tasks", ("recall:0", "recall:20", "fuzzy:3", "copy:16", "memory"),
        recipe=(*GPU, *RECIPE),
        few={"data": ("recall:0", "fuzzy:3", "copy:16"), "families": DIFFERENT},
    ),
    "compress": Part(
        "MAD's compression", ("compress",), (256,), (0.375,), recipe=(*GPU, *RECIPE),
    ),
}  # fmt: skip


def sweep_of(name: str, full: bool = False) -> dict[str, Any]:
    """Return the runs of a part as a sweep, in the form of conf/sweep."""
    part, entries = PARTS[name], dict[tuple[Any, ...], list[str]]()
    part = part if full else replace(part, **part.few)
    for case in part.cases():
        if case["mask"]:
            key = case["data"], case["context"], case["layers"]
            entries.setdefault(key, []).append(case["mask"])
    runs = {}
    for (data, n, layers), texts in entries.items():
        chosen = ",".join(f"'{text}'" for text in dict.fromkeys(texts))
        own = [f"data={data}", f"context={n}", f"layers={layers}", f"mask={chosen}"]
        runs[f"{data.replace(':', '-')}-{n}-l{layers}"] = {"with": own}
    common = [
        f"seed={part.seeds}", "scale=full", "model=micro", "positions=rotary", "schedule=constant",
        "weight_decay=0.01", "init_std=0.1", "stop_at=0.99", "keep=false",
        f"name={name}", "runs=runs/which_mask", *part.recipe,
    ]  # fmt: skip
    return {"program": "lm", "common": common, "runs": runs}


@dataclass(kw_only=True)
class Options(runner.Options):
    part: str | None = None  # trains what is missing of it first
    full: bool = False  # every task, density and family of the part; takes hours
    minutes: float | None = None  # of training
    at_once: int = 1  # runs that share a GPU
    overrides: list[str] = field(default_factory=list)  # of all runs, such as seed=0
    runs: str = "runs/which_mask"  # folder of all runs
    rows: str = "runs/which_mask.jsonl.gz"  # written again: what it holds, and the complete runs

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.part is not None:
            choose("part", self.part, PARTS)


def collect(options: Options) -> None:
    """Train what a part lacks, and write the rows of all complete runs."""
    if options.part is not None:
        own = f"runs='{options.runs}'"
        runs = sweep.planned(sweep_of(options.part, options.full), [own, *options.overrides])
        places = sweep.places(sweep.Options(at_once=options.at_once))
        sweep.train(runs, places, minutes=options.minutes)
    path = Path(options.rows)
    kept = {_key(row): row for row in (read(path, key=KEY) if path.exists() else [])}
    kept |= {_key(row): row for row in _rows(Path(options.runs))}
    write_json_lines(path, kept.values(), "rows")


OWN = ("steps", "batch", "lr", "conv", "init_std", "precision")  # of a recipe, in its rows
KEY = "part data context block layers family target".split()
CASE = ("data", "context", "layers", "mask")
SHARED = ["data", "context", "layers", "block"]


def _key(row: Mapping[str, Any]) -> tuple[Any, ...]:
    return tuple(row.get(name) for name in (*KEY, "recipe", "seed"))  # the newest device counts


def _rows(folder: Path) -> Iterator[Row]:
    """Yield the rows of the parts of which there are complete runs."""
    done = dict[tuple[Any, ...], list[dict[str, Any]]]()
    for path in sorted(folder.rglob(run_file.RUN)):
        run = run_file.read(path.parent)
        if run and run["complete"]:
            key = tuple(run["settings"][name] for name in ("name", *CASE))
            done.setdefault(key, []).append(run)
    for name in dict.fromkeys(key[0] for key in done):
        part = PARTS[name]
        for case in (*part.cases(), *replace(part, **part.few).cases()):
            runs = done.get((name, *(case[key] for key in CASE)), ())
            for run in runs:
                yield {"part": name, **case, **facts(*(case[key] for key in CASE)), **_row(run)}
            if not case["mask"]:
                yield {"part": name, **case}


@cache
def facts(data: str, n: int, layers: int, text: str) -> Row:
    """Return what a mask shows of the questions of a task: `direct`, the share of the questions
    that see their answer; `seen`, the share of the causal pairs that so many layers connect;
    `reach`, the layers that connect all, None where none do. A selector may pick any block.
    """
    mask, task = resolve(text), synthetic(data, n)
    if isinstance(mask, Selector):
        return {"direct": None, "seen": None, "reach": 1}
    blocks = mask.build(n)
    asked = task.make("test", SEQUENCES)
    wanted = (asked.answers != NONE) & (asked.sources >= 0)
    dense, row = blocks.to_dense().reshape(n, n), np.arange(SEQUENCES)[:, None]
    # an answer may stand at several places: each is the answer to a question at the place before it
    before = np.full((SEQUENCES, n), NONE)
    at = np.where(wanted, asked.sources, NONE)
    np.put_along_axis(before, asked.places, at, 1)
    sees = np.zeros(at.shape, bool)
    while (at >= 0).any():
        sees |= dense[asked.places, at] & (at >= 0)
        at = np.where(at > 0, before[row, at - 1], NONE)
    found = reach(blocks, causal=True)
    return {
        "direct": float(sees[asked.answers != NONE].mean()) if wanted.any() else None,
        "seen": found.upper[min(layers, len(found.upper)) - 1],
        "reach": found.at_most,
    }


def _row(run: Mapping[str, Any]) -> Row:
    settings, result, session = run["settings"], run["result"], run["sessions"][-1]
    solved = (step for step, accuracy in result["curve"] if accuracy >= SOLVED)
    return {
        "status": OK,
        "density": run["pairs"],
        "seed": settings["seed"],
        "recipe": ", ".join(f"{name}={settings[name]}" for name in OWN),
        "dim": MODELS[settings["model"]].dim // MODELS[settings["model"]].heads,
        "accuracy": result["accuracy"],
        "chance": run["task"]["chance"],
        "steps": result["steps"],
        "solved": next(solved, None),
        "ms_step": result["ms_per_step"],
        "provider": settings["provider"],
        "device": session["device"],
        **session["versions"],
        "date": result["date"],
        "command": session["command"],
    }


# ---- tables and figures


def tables(frame: Any) -> dict[str, str]:
    """Return tables of each part: for each case; as "PART_lengths" with lengths across, and the
    share of the questions that see their answer; as "PART_without" which masks it lacks, and why.
    """
    made = {}
    for name in dict.fromkeys(frame.part):
        part = frame[frame.part == name]
        done, lacks = part[part.status == OK], part[part.status != OK]
        made[name] = "\n\n".join(
            f"`{data}`, {n:,} tokens, {layers} layers, blocks of {block}, {rows.recipe.iloc[0]}"
            f" (chance {100 * rows.chance.iloc[0]:.1f} %):\n\n{markdown(_table(rows))}"
            for (data, n, layers, block), rows in done.groupby(SHARED, sort=False)
        )
        if done.context.nunique() > 1:
            usual = done[done.recipe == done.recipe.iloc[0]]
            across = pivot(usual, ["data", "family"], "context", _accuracy)
            made[f"{name}_lengths"] = markdown(across, left=(0, 1))
        made[f"{name}_without"] = "\n".join(f"- {text}" for text in dict.fromkeys(lacks.status))
    return made


def _accuracy(seeds: Any) -> str:
    """Return accuracy and the share of the questions that see their answer, in percent."""
    direct = found(seeds)[0].direct
    return mean_std(100 * seeds.accuracy) + ("" if direct is None else f" [{100 * direct:.0f}]")


def _table(rows: Any) -> list[list[str]]:
    """Return a line for each mask, named with what its recipe has else than the first one: what it
    shows, accuracy, and the steps it takes.
    """
    head = ["mask", "density", "sees its answer", "reach, layers", "accuracy", "steps to 90 %"]
    lines, usual = [], rows.recipe.iloc[0].split(", ")
    for (family, _, recipe), seeds in rows.groupby(["family", "target", "recipe"], sort=False):
        first, own = found(seeds)[0], [each for each in recipe.split(", ") if each not in usual]
        lines.append(
            [
                ", ".join([family, *own]),
                f"{first.density:.3f}",
                MISSING if first.direct is None else f"{100 * first.direct:.0f} %",
                "never" if first.reach is None else f"{first.reach:.0f}",
                mean_std(100 * seeds.accuracy),
                f"{seeds.solved.mean():.0f}" if seeds.solved.notna().all() else MISSING,
            ]
        )
    return [head, *lines]


def figures(frame: Any) -> dict[str, Figure]:
    """Return a figure for each question of which there are rows."""
    rows, usual = [row for row in found(frame) if row.status == OK], dict[str, str]()
    for row in rows:
        usual.setdefault(row.part, row.recipe)  # runs of another are for the tables
        row["percent"] = 100 * row.accuracy
        row["depth"] = row.layers / row.reach if row.reach else NEVER
        row["signal"] = math.sqrt(row.dim / (2 * row.block))
        row["seconds"] = row.solved and row.ms_step and row.solved * row.ms_step / 1e3
    rows = [row for row in rows if row.recipe == usual[row.part]]
    return {
        f"which-mask-{part}-{name}": _draw(own, x, y, *labels)
        for part, name, x, y, *labels in QUESTIONS
        if (own := [row for row in rows if row.part == part and row[x] is not None])
        and any(row[y] is not None for row in own)
    }


def _draw(rows: Sequence[Any], x: str, y: str, label: str, other: str) -> Figure:
    """Return means over seeds of a field of rows against another, where all seeds have it: a panel
    for each task, a look for each family.
    """
    tasks = list(dict.fromkeys(row.data for row in rows))
    size = (f.PAGE if len(tasks) > 1 else f.COLUMN, 2.8)
    share: dict[str, Any] = {"squeeze": False, "sharex": True, "sharey": True}
    figure, grid = plt.subplots(1, len(tasks), figsize=size, **share)
    for axes, task in zip(grid[0], tasks, strict=True):
        own = [row for row in rows if row.data == task]
        for family, look in LOOKS.items():
            points = dict[float, list[float]]()
            for row in own:
                if row.family == family:
                    points.setdefault(row[x], []).append(row[y])
            if at := sorted(each for each, values in points.items() if None not in values):
                means = [fmean(points[each]) for each in at]
                if family == "dense" and x == "density":
                    axes.axhline(means[0], color=look.color, lw=1, label=family)
                else:
                    f.curve(axes, at, means, look, family, line=x != "direct")
        if y == "percent":
            axes.axhline(100 * own[0].chance, color="0.5", lw=1, ls=":", label="chance", zorder=0)
        if x in LOG:
            axes.set_xscale("log", base=LOG[x])
            axes.xaxis.set_major_formatter(_power)
            axes.xaxis.set_minor_locator(NullLocator())
        axes.set_title(task)
        axes.set_xlabel(label)
    grid[0][0].set_ylim(*((-3, 103) if y == "percent" else (0, None)))
    grid[0][0].set_ylabel(other)
    f.legend(figure, list(grid[0]), 5 if len(tasks) > 1 else 3, most=len(LOOKS) + 1)
    return figure


def _power(x: float, _: int) -> str:
    """Return a power of two as a tick has it."""
    return "never" if x == NEVER else f"{x:g}" if x >= 1 else f"1/{1 / x:g}"


ACCURACY = "accuracy (%)"
# part, name, fields of its rows on both axes, and their labels
QUESTIONS = (
    ("first", "direct", "direct", "percent", "share of questions that see their answer", ACCURACY),
    ("density", "density", "density", "percent", "pairs / causal pairs", ACCURACY),
    ("depth", "depth", "depth", "percent", "layers / reach of the mask", ACCURACY),
    ("blocks", "signal", "signal", "percent", "signal to noise, sqrt(d / 2b)", ACCURACY),
    ("lengths", "context", "context", "percent", "tokens", ACCURACY),
    ("documents", "context", "context", "percent", "tokens read", ACCURACY),
    ("documents_first", "context", "context", "percent", "tokens read", ACCURACY),
    ("density", "seconds", "density", "seconds", "pairs / causal pairs",
     f"seconds to {100 * SOLVED:.0f} %"),
)  # fmt: skip
LOG = {"density": 2, "depth": 4, "context": 2}  # bases of logarithmic axes
COLORS = "#0072B2 #D55E00 #009E73 #CC79A7 #E69F00 #56B4E9 #888888".split()
LOOKS = {
    family: f.Style(color, marker, line)
    for family, color, marker, line in zip(
        ("dense", *FAMILIES), ["#000000", *COLORS, *COLORS], "*osv^DPXdph<>",
        ["-"] * 8 + ["--"] * 5, strict=False,
    )
}  # fmt: skip
