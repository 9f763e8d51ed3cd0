"""Compares runs of language models: tables and figures of a plan, from rows and nothing else.

    python -m experiments.sweep sweep=lm_same
    python -m experiments.lm.report runs=runs/lm
    python -m experiments.lm.report runs=null rows=results.jsonl.gz figures=FOLDER

A row is a complete run that has plan= and case=, with its loss by step and by position.
"""

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

import pandas as pd
from matplotlib import pyplot as plt

from experiments.common import figures as f
from experiments.common.config import Checked, option
from experiments.common.program import program
from experiments.common.rows import Row, Rows, found, read
from experiments.common.tables import MISSING, aligned, markdown
from experiments.lm.model import LEARNED, ROTARY
from experiments.lm.settings import ADDED, MLP, PLANS, TIMED
from experiments.training import run_file

CURVES = ("same", "contexts")  # the plans whose figures have curves; the others have points
MLPS = ("mlp", "mlp_time")  # those without figures
CURVE, BUCKETS = 40, 12  # points of a training curve, and of the loss against position
COLORS = "#000000 #0072B2 #D55E00 #009E73 #CC79A7 #E69F00 #56B4E9 #888888".split()
LOOKS = [*zip(COLORS, "os^vDPX*", ("-", "--", "-.", ":") * 2, strict=True)]  # of the first cases
# What two runs of a table may differ in beside the columns of their rows.
RECIPE = "lr warmup schedule betas eps weight_decay clip dropout vocab val_tokens"


@dataclass
class Options(Checked):
    runs: str | None = option("runs/lm", "folder of runs; null: none")
    rows: str | None = option(None, "a .jsonl file with rows, to which those of the runs are added")
    figures: str | None = option(None, "folder of the figures; null: none")


@program("lm_report", Options, "experiments.lm.report")
def main(options: Options, command: str) -> None:
    files = sorted(Path(options.runs).rglob(run_file.RUN)) if options.runs else []
    runs = [run_file.read(path.parent) for path in files]
    rows = [row(run) for run in runs if run and run["complete"] and run["settings"].get("plan")]
    key = ("plan", "case", "model", "context", "batch", "seed", "steps", "recipe", "data")
    if options.rows is not None and options.runs is not None:
        file = Rows(options.rows, key)
        for each in rows:
            if file.find(each) is None:
                file.append(each)
        rows = file.rows
    elif options.rows is not None:
        rows = found(read(options.rows, key=key))
    if not rows:
        where = f"runs={options.runs}" if options.runs else f"rows={options.rows}"
        raise ValueError(
            f"{where}: none of {len(runs)} runs is complete and part of a comparison; train one by"
            f" experiments.lm plan={'|'.join(PLANS)} or a sweep such as sweep=lm_masks"
        )
    drawn: Counter[Path] = Counter()
    for plan in PLANS:
        for cases in grouped(rows, plan):
            print(f"{about(cases)}\n{aligned(table(plan, cases))}")
            if options.figures is not None and plan not in MLPS:
                print(*_draw(plan, cases, Path(options.figures), drawn), sep="\n")
            print()


def tables(frame: pd.DataFrame) -> dict[str, str]:
    """Return the tables of each plan in Markdown, with what their rows share."""
    rows, made = found(frame), {}
    for plan in PLANS:
        parts = [f"{markdown(table(plan, x))}\n\n{about(x)}." for x in grouped(rows, plan)]
        made[plan] = "\n\n".join(parts)
    return made


def row(run: Mapping[str, Any]) -> Row:
    """Return the row of a complete run."""
    settings, result, task, session = (
        run["settings"], run["result"], run["task"], run["sessions"][-1],
    )  # fmt: skip
    positions = result["positions"]
    late = positions[3 * len(positions) // 4 :]
    compiled = {True: ["compile"], "layers": ["compile by layers"]}.get(session["compiled"], [])
    names = "plan case model provider packed positions context batch seed precision"
    changed = [n for n in ADDED.keys() - MLP.keys() if settings.get(n) not in (None, ADDED[n])]
    count = f" x {session['processes']}" if session["processes"] > 1 else ""
    return {
        **{name: settings[name] for name in names.split()},
        **{name: settings.get(name) for name in MLP},
        "steps": result["steps"],
        "params": run["params"],
        "data": task["name"],
        "data_digest": run["data"],
        **{name: task[name] for name in ("tokenizer", "train_tokens", "bytes_per_token")},
        "val_tokens": result["val_tokens"],
        "recipe": " ".join(f"{n}={settings[n]}" for n in [*RECIPE.split(), *sorted(changed)]),
        "mode": "+".join(compiled + ["graph"] * session["captured"]) or "eager",
        **{name: run.get(name) for name in ("mask", "density", "pairs", "mlp_density")},
        **{name: result[name] for name in ("train_loss", "val_loss", "saved_mib")},
        "late_loss": fmean(late) if late else None,
        "ms_step": result["ms_per_step"],
        "peak_mib": result["memory_mib"],
        "curve": thinned(result["curve"], CURVE),
        "by_position": bucketed(positions, BUCKETS),
        "device": session["device"] + count,
        **session["versions"],
        "date": result["date"],
        "command": session["command"],
    }


def thinned(curve: Sequence[Sequence[float]], most: int) -> list[tuple[int, float]]:
    """Return at most `most` points of (step, mean loss since the one before): means of some."""
    step = max(1, math.ceil(len(curve) / most))
    groups = [curve[i : i + step] for i in range(0, len(curve), step)]
    return [(int(some[-1][0]), fmean(y for _, y in some)) for some in groups]


def bucketed(losses: Sequence[float], most: int) -> list[tuple[int, float]]:
    """Return means over positions (before, end], where `end` doubles, at most `most` of them."""
    ends = sorted({math.ceil(len(losses) / 2**i) for i in range(most)} - {0})
    return [(end, fmean(losses[start:end])) for start, end in zip([0, *ends], ends, strict=False)]


# ---- cases: the rows of one model, mask or provider on one device, the newest of each seed

Case = list[Row]


def grouped(rows: Sequence[Row], plan: str) -> list[list[Case]]:
    """Return the cases of each table, of one model, data, recipe, tokens a step and device."""
    made: dict[tuple[object, ...], dict[str, dict[int, Row]]] = {}
    names = "model data_digest tokenizer recipe device precision".split()
    for row in rows:
        if row["plan"] == plan:
            shared = [row[name] for name in names] + [row["context"] * row["batch"], *_unusual(row)]
            shared.append(0 if plan == "contexts" else row["context"])
            shared.append(0 if plan in TIMED else row["steps"])
            shared.append(row["mode"] if plan in (*CURVES, *MLPS) else "")  # MoBA is not compiled
            cases = made.setdefault(tuple(shared), {})
            cases.setdefault(row["case"], {})[row["seed"]] = row
    return [[list(case.values()) for case in cases.values()] for cases in made.values()]


def _unusual(row: Row) -> list[str]:
    """Return options that differ from those of the plan, and that no case of it changes."""
    plan = row["plan"]
    usual = {"positions": ROTARY if plan == "contexts" else LEARNED, "packed": False}
    usual |= {} if plan == "same" else {"provider": "sparse"}
    usual |= {"mask": "causal()"} if plan in CURVES else {}
    usual |= {} if plan in MLPS else {"mlp": None}
    return [f"{name}={row[name]}" for name, value in usual.items() if row.get(name) != value]


def _base(cases: Sequence[Case]) -> Case:
    """Return the case that the others are compared with."""
    usual = (c for c in cases if c[0]["provider"] == "standard" or c[0]["case"] == "dense")
    return next(usual, cases[0])


def about(cases: Sequence[Case]) -> str:
    """Return what the cases of a table share, in a line."""
    row, seeds = _base(cases)[0], max(map(len, cases))
    modes = "; ".join(sorted({case[0]["mode"] for case in cases}))
    steps = f"{row['steps']} steps"
    if row["plan"] in TIMED:
        steps = f"the time of {row['steps']} steps of {row['case']}"
    days = sorted({str(each["date"])[:10] for case in cases for each in case})
    when = " to ".join(dict.fromkeys((days[0], days[-1])))
    parts = [
        f"{row['model']} ({row['params'] / 1e6:.3g} M parameters), {row['data']} "
        f"({row['tokenizer']}), {row['context'] * row['batch']} tokens a step, {steps}, "
        f"{'a single run each' if seeds == 1 else f'{seeds} seeds'}",
        f"{row['device']}, {row['precision']}, {modes}, {when}",
        *(words for words in (row["recipe"], *_unusual(row)) if words),
    ]
    return "; ".join(parts)


def seeds(case: Case, name: str) -> list[float]:
    """Return what the seeds have, without those that have none."""
    return [row[name] for row in case if row.get(name) is not None]


def show(numbers: Sequence[float], digits: str = ".0f", spread: bool = False) -> str:
    """Return the mean over the seeds, with half their range where there are several and `spread`
    asks for it.
    """
    if not numbers:
        return MISSING
    half = (max(numbers) - min(numbers)) / 2
    more = f" ± {half:{digits}}" if spread and len(numbers) > 1 else ""
    return f"{fmean(numbers):{digits}}".replace("%", " %") + more


def difference(case: Case, base: Case) -> float:
    """Return the largest difference of the training loss of a seed, in percent."""
    by_seed = {row["seed"]: row["train_loss"] for row in base}
    both = [(row["train_loss"], by_seed[row["seed"]]) for row in case if row["seed"] in by_seed]
    return max((100 * abs(ours / theirs - 1) for ours, theirs in both), default=math.nan)


# ---- tables

HEADS = {  # of each plan
    "same": ("attention", "train loss", "difference", "validation loss", "ms a step", "speed-up",
             "saved MiB", "peak MiB"),
    "contexts": ("context", "windows a step", "perplexity", "validation loss", "last quarter",
                 "ms a step", "saved MiB"),
    "masks": ("name", "mask", "block density", "pairs", "steps", "perplexity", "validation loss",
              "ms a step"),
}  # fmt: skip
HEADS["mlp"] = ("name", "mask", "MLP weights", "parameters", *HEADS["masks"][4:], "speed-up")
HEADS |= {timed: HEADS[plan] for timed, plan in TIMED.items()}


def table(plan: str, cases: Sequence[Case]) -> list[list[str]]:
    """Return the table of a plan: losses or perplexities, time, memory or density."""
    base = _base(cases)
    if plan == "contexts":
        cases = sorted(cases, key=lambda case: case[0]["context"])
    elif plan != "same":
        cases = sorted(cases, key=lambda c: (-pairs(c), -c[0]["params"], c is not base))
    ms = lambda c: fmean(seeds(c, "ms_step") or [math.nan])  # noqa: E731
    digits = ".4f" if plan == "same" else ".3f"
    texts: dict[str, Callable[[Case], str]] = {
        **dict.fromkeys(("attention", "name"), lambda c: c[0]["case"]),
        "context": lambda c: str(c[0]["context"]),
        "windows a step": lambda c: str(c[0]["batch"]),
        "mask": lambda c: f"`{c[0]['mask']}`",
        "train loss": lambda c: show(seeds(c, "train_loss"), digits, True),
        "validation loss": lambda c: show(seeds(c, "val_loss"), digits, True),
        "last quarter": lambda c: show(seeds(c, "late_loss"), digits, True),
        "perplexity": lambda c: show([math.exp(x) for x in seeds(c, "val_loss")], ".2f", True),
        "difference": lambda c: f"{difference(c, base):.3f} %",
        "ms a step": lambda c: show(seeds(c, "ms_step"), ".4g"),
        "speed-up": lambda c: f"{ms(base) / ms(c):.2f}x",
        "block density": lambda c: show(seeds(c, "density"), ".1%"),
        "pairs": lambda c: show(seeds(c, "pairs"), ".1%"),
        "steps": lambda c: show(seeds(c, "steps")),
        "MLP weights": lambda c: show(seeds(c, "mlp_density"), ".1%"),
        "parameters": lambda c: f"{c[0]['params'] / 1e6:.4g} M",
        "saved MiB": lambda c: show(seeds(c, "saved_mib")),
        "peak MiB": lambda c: show(seeds(c, "peak_mib")),
    }
    heads = HEADS[plan]
    return [[*heads], *([texts[head](case) for head in heads] for case in cases)]


def pairs(case: Case) -> float:
    """Return the share of the causal pairs, 1 where all of them attend."""
    return fmean(seeds(case, "pairs") or [1.0])


# ---- figures


def _draw(plan: str, cases: Sequence[Case], folder: Path, drawn: Counter[Path]) -> list[Path]:
    """Draw the figure of a table: curves of training, loss against position, or against density.

    drawn: how many tables had the same name before. The first has it alone, the others a number.
    """
    row = cases[0][0]
    context = "" if plan == "contexts" else row["context"]
    stem = folder / f.file_name("lm", plan, row["model"], context, row["device"])
    drawn[stem] += 1
    if drawn[stem] > 1:
        stem = stem.with_name(f"{stem.name}-{drawn[stem]}")
    if plan not in CURVES:  # one look for a mask in all figures
        cases = sorted(cases, key=lambda case: case[0]["case"])
    with f.style():
        figure, axes = plt.subplots(figsize=(f.COLUMN, 2.5))
        for case, look in zip(cases, LOOKS * 2, strict=False):
            first, style = case[0], f.Style(*look)
            if plan not in CURVES:
                x, y = [100 * pairs(case)], [fmean(seeds(case, "val_loss"))]
            else:
                x, y = zip(*first["curve" if plan == "same" else "by_position"], strict=True)
            f.curve(axes, x, y, style, first["case"], line=plan in CURVES)
        labels = {"same": "step", "contexts": "position in the window"}
        if plan == "contexts":
            longest = max(case[0]["context"] for case in cases)
            f.length_axis(axes, [n for i in range(0, 20, 2) if (n := longest >> i)])
        elif plan != "same":
            axes.set_xlim(0, 105)
        axes.set_xlabel(labels.get(plan, "pairs (% of the causal ones)"))
        axes.set_ylabel("training loss" if plan == "same" else "validation loss")
        f.legend(figure, [axes])
        return f.save(figure, stem, ("png",))


if __name__ == "__main__":
    main()
