"""The comparisons of language models: which runs, and the rows that they leave.

| plan | question |
|---|---|
| same | do standard attention, SDPA and ours learn the same, and how fast is a step? |
| contexts | what does a longer context bring, at equal tokens a step? |
| masks | what does a sparser mask cost, at equal steps? |
| equal_time | and at equal time: each mask takes the time of the dense steps of plan=masks |
"""

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

from experiments.common.checks import as_list, whole_number
from experiments.common.devices import device_name, find_device
from experiments.common.provenance import check_published
from experiments.common.records import Records, read
from experiments.lm.model import ROTARY
from experiments.lm.report import CURVES, Case, report
from experiments.lm.rows import ModelRow, PointRow
from experiments.lm.run import train
from experiments.lm.settings import LAYERS, Settings, make_settings

T = TypeVar("T", ModelRow, PointRow)
RESULTS, POINTS = "results.csv", "points.csv"
CURVE, BUCKETS = 40, 12  # points of a training curve, and of the loss against position


@dataclass(frozen=True)
class Plan:
    """One comparison: the options of all its runs by device, and what each case changes.

    An option of the command line replaces one of `small` and `full`, never one of a case.
    """

    small: Mapping[str, Any]  # on a CPU
    full: Mapping[str, Any]  # on a GPU
    cases: Callable[[Mapping[str, Any]], dict[str, dict[str, Any]]]
    seeds: tuple[int, ...] = (0, 1)  # on a GPU; a small form has the first


def _same(options: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    providers = {"standard": "standard", "SDPA": "sdpa", "ours": "sparse"}
    return {name: {"provider": provider} for name, provider in providers.items()}


def _contexts(options: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    tokens, longest = options["context"] * options["batch"], options["context"]
    parts = (8, 4, 2, 1) if longest <= 1024 else (16, 8, 4, 1)
    if longest < 16 or longest % parts[0]:
        raise ValueError(
            f"context={longest} is the longest of plan=contexts: "
            f"give a multiple of {parts[0]}, 16 or more"
        )
    contexts = [longest // part for part in parts]
    return {str(n): {"context": n, "batch": tokens // n} for n in contexts}


def _masks(options: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Masks whose windows and blocks go with the context: 1/16 and 1/32 of it, at most 256."""
    n = options["context"]
    window, block = max(2, min(256, n // 16)), max(2, min(128, n // 32))
    texts = {
        "dense": "dense",
        "butterfly, window": f"butterfly({block}) | sliding({window})",
        "strided": f"strided({block})",
        "BigBird": f"bigbird({block}, 2)",
        "streaming": f"streaming({block}, {window})",
        "sliding": f"sliding({window})",
        "random": f"random_blocks(0.125, block={block})",
        "MoBA": f"moba({max(16, n // 256 * 16)}, 3)",
    }
    return {name: {"mask": text} for name, text in texts.items()}


TINY = {"model": "tiny", "steps": 200, "lr": 3e-3, "val_tokens": 32_768}
SHORT = {"model": "gpt2", "steps": 300, "warmup": 30, "compile": LAYERS}  # of 32,768 tokens
MASKS = Plan(
    small=TINY | {"context": 512, "batch": 2},
    full=SHORT | {"context": 4096, "batch": 8},
    cases=_masks,
)
PLANS = {
    "same": Plan(
        small=TINY | {"context": 256, "batch": 4, "steps": 300},
        full={"model": "gpt2", "context": 1024, "batch": 32, "steps": 1000},
        cases=_same,
        seeds=(0,),
    ),
    "contexts": Plan(
        small=TINY | {"context": 128, "batch": 8, "steps": 300, "positions": ROTARY},
        full=SHORT | {"context": 16_384, "batch": 2, "positions": ROTARY},
        cases=_contexts,
    ),
    "masks": MASKS,
    "equal_time": MASKS,
}


def run_plan(name: str, options: dict[str, Any], command: str) -> list[ModelRow]:
    """Runs what a plan lacks, one after the other, and reports; returns the rows of the plan.

    Every complete run is a row. A run that was stopped continues when the plan is run again.

    Raises:
        ValueError: an option is out of range, or a run cannot be made.
        Interrupted: a signal stopped a run.
    """
    begun, folder = time.monotonic(), Path(options["csv"])
    allow = bool(options["allow_changes"])
    if not (allow or options["report"]):
        check_published(folder / RESULTS)  # before the runs; files are made with the first row
    for case, settings in [] if options["report"] else planned(name, options):
        known = _of_equal_steps(case, settings, folder) if name == "equal_time" else None
        if known:
            add(folder, _of_time(known, options), [], allow)
            continue
        result = train(settings, command, begun)
        if not result["complete"]:
            break
        row = make_row(name, case, settings, result)
        row = _of_time(row, options) if name == "equal_time" else row
        add(folder, row, make_points(row, result) if name in CURVES else [], allow)
    found = [row for row in old_rows(folder) if row.plan == name]
    points_of = old_points(folder) if found else []
    figures = Path(options["figures"] or folder)
    print(report(name, found, points_of, figures, as_list(options["pages"])))
    return found


def add(folder: Path, row: ModelRow, found: Sequence[PointRow], allow: bool) -> None:
    """Adds a row and its points, unless the folder has it. Several processes may do so at once."""
    if row.key not in {old.key for old in old_rows(folder)}:
        rows = Records(folder / RESULTS, ModelRow, allow_changes=allow)
        points = Records(folder / POINTS, PointRow, allow_changes=allow)
        for point in found:
            points.append(point)
        rows.append(row)  # last, so that a row has its points


def _of_equal_steps(case: str, settings: Settings, folder: Path) -> ModelRow | None:
    """The row of plan=masks that is this very run, as one of plan=equal_time."""
    here = _run_of(settings, case, settings.steps)
    rows = [row for row in old_rows(folder) if row.plan == "masks" and _run_of(row, case) == here]
    rows = [row for row in rows if row.device == device_name(settings.device)]
    return replace(rows[-1], plan="equal_time") if rows else None


def _of_time(row: ModelRow, options: Mapping[str, Any]) -> ModelRow:
    """A row of plan=equal_time, whose recipe says how many dense steps take that time."""
    steps = planned("masks", options)[0][1].steps
    return replace(row, recipe=f"{row.recipe} dense_steps={steps}")


def _run_of(run: Settings | ModelRow, case: str, steps: int | None = None) -> tuple[object, ...]:
    name = run.case if isinstance(run, ModelRow) else case
    shared = run.model, run.context, run.batch, Path(run.data).name, run.tokenizer, run.positions
    own = steps or run.steps, run.seed, run.precision, run.provider, run.recipe
    return name == case, *shared, *own, run.objective, run.packed


def old_rows(folder: Path) -> list[ModelRow]:
    """The rows that a folder holds already, those of finished measurements compressed."""
    return _read_all(folder / RESULTS, ModelRow)


def old_points(folder: Path) -> list[PointRow]:
    """The points that a folder holds already, likewise."""
    return _read_all(folder / POINTS, PointRow)


def _read_all(path: Path, kind: type[T]) -> list[T]:
    paths = [path.with_name(f"{path.name}.gz"), path]
    return [row for path in paths if path.exists() for row in read(path, kind)]


def planned(name: str, options: Mapping[str, Any]) -> list[tuple[str, Settings]]:
    """The runs of a plan with their names in tables, seed by seed."""
    plan = PLANS[name]
    on_gpu = find_device(options["device"]).type == "cuda"
    seeds = plan.seeds if on_gpu else plan.seeds[:1]
    if options["seeds"] is not None:
        seeds = as_list(options["seeds"])
    for seed in seeds:
        whole_number("seeds", seed, least=0)
    own = {"full": {**options["full"], **plan.full}, "small": {**options["small"], **plan.small}}
    first = make_settings({**options, **own, "keep": False})
    cases = plan.cases(first.values())
    for key, usual in {"mask": None, "provider": "sparse"}.items():
        if options[key] != usual and any(key in changes for changes in cases.values()):
            raise ValueError(
                f"{key}={options[key]}: each case of plan={name} has its own {key}; leave it out, "
                f"choose with cases=, or give {key}= to another plan"
            )
    if options["cases"] is not None:
        wanted = [str(case) for case in as_list(options["cases"])]
        if unknown := set(wanted) - cases.keys():
            raise ValueError(
                f"cases={sorted(unknown)[0]!r}: plan={name} has {', '.join(map(repr, cases))}"
            )
        cases = {case: cases[case] for case in wanted}
    found = [
        (case, make_settings({**options, **own, "keep": False, "seed": seed, **changes}))
        for seed in seeds
        for case, changes in cases.items()
    ]
    if name == "equal_time":
        found = _timed(found, old_rows(Path(options["csv"])))
    if options["eval_every"] is None:  # no table has the losses on the way
        found = [(case, replace(run, eval_every=run.steps)) for case, run in found]
    return found


def _timed(
    runs: Sequence[tuple[str, Settings]], rows: Sequence[ModelRow]
) -> list[tuple[str, Settings]]:
    """The runs with as many steps as take the time of the dense ones, by the rows of plan=masks.

    Raises ValueError if there is no such row of a case, or of "dense".
    """
    settings = runs[0][1]
    names = "model context batch steps precision tokenizer positions provider".split()
    names += ["objective", "packed"]
    wanted = [Path(settings.data).name, *(getattr(settings, name) for name in names)]
    device = device_name(settings.device)
    found: dict[str, list[ModelRow]] = {}
    for row in rows:
        own = [Path(row.data).name, *(getattr(row, name) for name in names)]
        if row.plan == "masks" and own == wanted and row.device == device:
            found.setdefault(row.case, []).append(row)
    for case in ("dense", *(case for case, _ in runs)):
        if case not in found:
            raise ValueError(
                f"plan=equal_time needs the time of a step of {case!r}: run plan=masks first, "
                "with the same options"
            )
    ms = {case: Case(some).mean("ms_step") or 1.0 for case, some in found.items()}
    return [
        (case, replace(own, steps=max(1, round(own.steps * ms["dense"] / ms[case]))))
        for case, own in runs
    ]


def make_row(plan: str, case: str, settings: Settings, result: Mapping[str, Any]) -> ModelRow:
    """The row of a complete run, as it says in its result."""
    positions = result["positions"]
    late = positions[3 * len(positions) // 4 :]
    compiled = {True: ["compile"], LAYERS: [f"compile by {LAYERS}"]}.get(result["compiled"], [])
    mode = compiled + ["graph"] * result["captured"]
    taken = "params data data_digest tokenizer train_tokens val_tokens bytes_per_token pairs"
    taken += " train_loss val_loss saved_mib peak_mib mask density device date command"
    chosen = "model provider objective packed positions context batch steps seed precision recipe"
    return ModelRow(
        plan=plan,
        case=case,
        mode="+".join(mode) or "eager",
        late_loss=sum(late) / len(late) if late else None,
        ms_step=result["ms_per_step"],
        **{name: result[name] for name in taken.split()},
        **{name: getattr(settings, name) for name in chosen.split()},
        **result["versions"],
    )


def make_points(row: ModelRow, result: Mapping[str, Any]) -> list[PointRow]:
    """The training curve of a run, and its loss by position in buckets that double."""
    made = [("step", x, y) for x, y in thinned(result["curve"], CURVE)]
    made += [("position", x, y) for x, y in bucketed(result["positions"], BUCKETS)]
    shared = {f: getattr(row, f) for f in "plan case model context seed mask density".split()}
    shared |= {f: getattr(row, f) for f in "device torch triton source commit date command".split()}
    return [PointRow(curve=curve, x=x, loss=y, **shared) for curve, x, y in made]


def thinned(curve: Sequence[Sequence[float]], most: int) -> list[tuple[int, float]]:
    """At most `most` points of (step, mean loss since the one before): means of neighbours."""
    step = max(1, math.ceil(len(curve) / most))
    groups = [curve[i : i + step] for i in range(0, len(curve), step)]
    return [(int(some[-1][0]), sum(y for _, y in some) / len(some)) for some in groups]


def bucketed(losses: Sequence[float], most: int) -> list[tuple[int, float]]:
    """Means over positions (before, end], where `end` doubles up to the last, at most `most`."""
    ends = sorted({math.ceil(len(losses) / 2**i) for i in range(most)})
    starts = [0, *ends[:-1]]
    return [
        (end, sum(losses[start:end]) / (end - start))
        for start, end in zip(starts, ends, strict=True)
        if end > start
    ]
