"""The cells of the LRA table: runs of one attention on one task, their means and differences."""

import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields
from statistics import fmean, geometric_mean, median, stdev
from typing import Any, NamedTuple

import numpy as np
from omegaconf import OmegaConf
from scipy.special import stdtrit

from experiments.common.figures import token_text
from experiments.common.rows import OK, read
from experiments.lra import published as lra
from experiments.lra.runs import PRETRAINED, Run
from experiments.lra.settings import Settings
from experiments.training.run_file import differences

WORK = ("batch", "precision", "layers", "dim", "heads")
DEFAULTS: Any = OmegaConf.to_container(OmegaConf.structured(Settings))
# Settings that runs of one cell may differ in.
FREE = {each.name for each in fields(Settings) if each.metadata.get("free")}
FREE |= {"seed", "data_seed", "name", "init_from"}
Steps = Sequence[Mapping[str, Any]]  # measured training steps, rows of the study lra_speed


class RowKey(NamedTuple):
    """A row of the table."""

    attention: str
    mask: str  # of block-sparse attention
    label: str  # how its runs differ from the reference recipe

    @property
    def name(self) -> str:
        """The name of the attention."""
        return lra.ATTENTIONS.get(self.attention, self.attention)

    @property
    def text(self) -> str:
        return ", ".join(filter(None, (self.name, self.mask, self.label)))


class Column(NamedTuple):
    """A task and its data. Official and generated data never share a column."""

    task: str
    source: str
    length: int = 0  # tokens as padded, if that is known
    held_out: float = 0.0  # the share of train that chooses the checkpoint, not the test split

    @property
    def text(self) -> str:
        """The task with the source of its data, without counts, and the length."""
        label = lra.LABELS.get(self.task, self.task)
        source = re.sub("[()]", "", self.source.partition(",")[0])
        words = [source] if source != label else []
        words += [f"{100 * self.held_out:g} % held out"] if self.held_out else []
        words += [token_text(self.length)] if self.length else []
        return f"{label} ({', '.join(filter(None, words))})" if any(words) else label


def heads(columns: Sequence[Column]) -> list[str]:
    """Return the text of each column, with its source in full where two would be the same."""
    texts = [column.text for column in columns]
    return [
        f"{text}, {column.source.partition(', ')[2]}" if texts.count(text) > 1 else text
        for text, column in zip(texts, columns, strict=True)
    ]


class Cell:
    """Runs that differ in their seed only, and their means.

    timed: measured training steps of the same task and attention. Their times and memory replace
        those of the runs, which may have shared a GPU. None keeps those of the runs.
    """

    def __init__(self, runs: Sequence[Run] = (), timed: Steps | None = None):
        self.runs = runs
        self.complete = all(run.complete for run in runs)
        self.traced = all(run.traced for run in runs)
        self.density = next((run.density for run in runs), None)
        # Accuracies are of the validation split if a run was not tested.
        self.tested = all(run.accuracy is not None for run in runs)
        found = [run.accuracy if self.tested else run.val_accuracy for run in runs]
        self.accuracies = [value for value in found if value is not None]
        self.accuracy = fmean(self.accuracies) if self.accuracies else None
        # the standard deviation of the seeds (n - 1), None for a single run
        self.spread = stdev(self.accuracies) if len(self.accuracies) > 1 else None
        # the mean of the last validations of runs that did not train, None if all did
        ends = [run.last for run in runs if run.untrained and run.last is not None]
        self.untrained = fmean(ends) if ends else None
        memory = [x.memory_mib for x in runs] if timed is None else [x["peak_mib"] for x in timed]
        self.memory_mib = max((mib for mib in memory if mib and mib == mib), default=None)
        # milliseconds of a training step, the median of the runs, by device and workload
        times: dict[tuple[str, str], list[float]] = {}
        for run in runs if timed is None else ():
            if run.ms_per_step:
                times.setdefault((run.device, run.workload), []).append(run.ms_per_step)
        for row in timed or ():
            times[row["device"], row.get("mode", "")] = [row["ms_median"]]
        self.ms_by_place = {place: median(ms) for place, ms in times.items()}


Cells = dict[tuple[RowKey, Column], Cell]


def make_cells(
    runs: Iterable[Run], steps: Steps | None = None, *, pretraining: bool = False
) -> tuple[Cells, list[str]]:
    """Return the cell of every attention and task, in order, and notes on runs that are left out.

    A cell takes the settings with the most complete runs, then the newest. Each seed counts once:
    the complete run, then the newest. Runs cut short count only if none is complete.

    steps: measured training steps, whose times replace those of the runs. A cell of another recipe,
        batch, size or precision, or without a measurement, has no times then.
    """
    groups: dict[tuple[RowKey, Column], list[Run]] = {}
    left_out: list[tuple[Run, str]] = []
    for run in runs:
        if run.pretraining == pretraining:
            row = RowKey(run.attention, run.mask, run.label)
            column = Column(run.task, run.source, run.length, run.held_out)
            groups.setdefault((row, column), []).append(run)
        elif run.pretraining:
            left_out.append((run, "pre-training"))
    cells: Cells = {}
    for (row, column), found in groups.items():
        kept, others = _chosen(found)
        timed = None if steps is None else _timed(row, column, kept, steps)
        cells[row, column] = Cell(kept, timed)
        left_out += others
    return cells, [f"left out: {run.place}, {why}" for run, why in left_out]


def read_steps(path: str) -> Steps:
    """Return the rows of the study lra_speed."""
    key = ("task", "attention", "option", "length", *WORK)
    return read(path, "python -m experiments.study name=lra_speed", key)


def unlike(cells: Cells) -> list[str]:
    """Return what rows of one column and label differ in, besides attention and mask, in words."""
    first: dict[tuple[Column, str], tuple[RowKey, Any]] = {}
    found = []
    for row in sorted_rows(row for row, _ in cells):
        for column in sorted_columns(at for key, at in cells if key == row):
            own = cells[row, column].runs[0].settings
            own = {n: own[n] for n in DEFAULTS.keys() - FREE - {"attention", "mask"} if n in own}
            filled = OmegaConf.to_container(OmegaConf.merge(DEFAULTS, _changed(own, DEFAULTS)))
            base, usual = first.setdefault((column, row.label), (row, filled))
            if words := differences(usual, filled):
                found.append(
                    f"{column.text}: {row.text} differs from {base.text} in {'; '.join(words)}"
                )
    return found


def sorted_rows(keys: Iterable[RowKey]) -> list[RowKey]:
    """Return each row once, in the order of the paper's table."""
    return sorted(set(keys), key=lambda key: (lra.order(lra.ATTENTIONS, key.attention), key))


def sorted_columns(columns: Iterable[Column]) -> list[Column]:
    """Return each column once, in the order of the paper's table."""
    return sorted(set(columns), key=lambda column: (lra.order(lra.LABELS, column.task), column))


def _timed(row: RowKey, column: Column, runs: Sequence[Run], steps: Steps) -> Steps:
    """Return the newest measured step of the same work on each device."""
    own = column.task, row.attention, row.mask, column.length
    known = [{**run.settings, **(run.settings.get("model") or {})} for run in runs]
    found = {}
    for step in steps:
        option = step["option"] if isinstance(step["option"], str) else ""
        same = own == (step["task"], step["attention"], option, step["length"])
        same &= all(each.get(name) in (None, step[name]) for each in known for name in WORK)
        if step["status"] == OK and not row.label and same:
            found[step["device"]] = step
    return [*found.values()]


def _chosen(runs: Sequence[Run]) -> tuple[list[Run], list[tuple[Run, str]]]:
    """Return the runs that count, and the others with why they do not."""
    by_settings: dict[str, list[Run]] = {}
    for run in sorted(runs, key=lambda r: (r.complete, r.date)):
        own = {name: value for name, value in run.settings.items() if name not in FREE}
        by_settings.setdefault(json.dumps(_changed(own, DEFAULTS), sort_keys=True), []).append(run)
    groups = by_settings.values()
    chosen = max(groups, key=lambda g: (sum(r.complete for r in g), max(r.date for r in g)))
    left_out = [(r, "other settings") for r in runs if r not in chosen]
    last = {run.seed: run for run in chosen}
    left_out += [(r, f"seed {r.seed} again") for r in chosen if r is not last[r.seed]]
    kept = [last[seed] for seed in sorted(last)]
    if any(r.complete for r in kept):
        left_out += [(r, "cut short") for r in kept if not r.complete]
        kept = [r for r in kept if r.complete]
    return kept, left_out


def _changed(settings: Mapping[str, Any], defaults: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings that differ from their defaults.

    Older runs lack the settings that came after them, and null means the default.
    """
    found = {}
    for name, value in settings.items():
        default = defaults.get(name)
        if isinstance(value, Mapping):
            value = _changed(value, default if isinstance(default, Mapping) else {})
        if value not in (None, default):
            found[name] = value
    return found


# ---- speed


def speedup(cells: Cells, row: RowKey, column: Column) -> float | None:
    """Return the Transformer's time of a training step / that of the row.

    It compares runs of the same device, batch and model, and prefers those of the same name.
    """
    ours = cells.get((row, column), Cell()).ms_by_place
    bases = [key for key, at in cells if key.attention == lra.BASE and at == column]
    for key in sorted(bases, key=lambda base: (base.label != row.label, base.label)):
        base = cells[key, column].ms_by_place
        if factors := [base[place] / ours[place] for place in ours if place in base]:
            return geometric_mean(factors)
    return None


def mean_speedup(cells: Cells, row: RowKey, columns: Iterable[Column]) -> tuple[float | None, int]:
    """Return the geometric mean of the speed-up over the tasks, and their number.

    The columns of one task count together as one.
    """
    factors: dict[str, list[float]] = {}
    for column in columns:
        factor = speedup(cells, row, column) if column.task in lra.TIMED else None
        if factor is not None:
            factors.setdefault(column.task, []).append(factor)
    means = [*map(geometric_mean, factors.values())]
    return geometric_mean(means) if means else None, len(means)


# ---- accuracy


def averaged(cells: Cells, row: RowKey, columns: Sequence[Column]) -> dict[str, Cell]:
    """Return the cells by task over which a row is averaged, those of the five tasks that it has.

    Of several columns of a task, the first one counts that the row has: for Text those of the
    official rule, which chooses the checkpoint on the test split, come first. Then come official
    data, and then the shortest sequences.
    """
    chosen: dict[str, Cell] = {}
    for column in sorted(columns, key=lambda c: (c.held_out, c.source != "official", c.length)):
        cell = cells.get((row, column))
        if column.task in lra.AVERAGED and cell is not None and cell.accuracy is not None:
            chosen.setdefault(column.task, cell)
    return chosen


def paper_value(row: RowKey, column: Column) -> float | None:
    """Return the paper's value. On Path-X and Path-256 its recipe starts from Pathfinder-64."""
    usual = ("", PRETRAINED) if column.task in lra.PATH else ("",)
    return lra.PAPER.get((row.attention, column.task)) if row.label in usual else None


# ---- differences

SEEDS, EXAMPLES = "s", "e"  # what an interval covers


class Difference(NamedTuple):
    """A mean difference in points over the seeds that two cells share."""

    value: float
    half: float | None  # half of the 95 % interval; None for single runs without their examples
    seeds: int
    covers: str  # SEEDS, EXAMPLES, both, or neither


def difference(ours: Sequence[Run], others: Sequence[Run]) -> Difference | None:
    """Return the accuracy of `ours` - that of `others`, None without a common tested seed.

    Runs are paired by seed, and by test example where both kept which of the same they answered
    rightly. The variance of the mean is that of the seeds + that of the test examples, which every
    seed shares. It counts their interaction twice (Owen, The pigeonhole bootstrap, 2007). Degrees
    of freedom are Welch and Satterthwaite's. Where the seeds vary more than the mean of the
    examples, the interval is at least that of the seeds alone.
    """
    by_seed = {run.seed: run for run in others}
    deltas, answers, data = [], [], set()
    for one in ours:
        two = by_seed.get(one.seed)
        if two is None or one.accuracy is None or two.accuracy is None:
            continue
        deltas.append(one.accuracy - two.accuracy)
        if one.correct is not None and two.correct is not None and one.data == two.data:
            answers.append(100.0 * one.correct - 100.0 * two.correct)
            data.add(one.data)
    if not deltas:
        return None
    parts, covers = [], ""  # (variance of the mean, degrees of freedom)
    n = len(deltas)
    if n > 1:
        parts.append((float(np.var(deltas, ddof=1)) / n, n - 1))
        covers += SEEDS
    # seeds with test examples of their own already vary with them
    if len(answers) == n and len(data) == 1 and len(answers[0]) > 1:
        each = np.mean(answers, axis=0)
        parts.append((float(np.var(each, ddof=1)) / len(each), len(each) - 1))
        covers += EXAMPLES
    total, half = sum(variance for variance, _ in parts), None
    if parts and total:
        freedom = total**2 / sum(variance**2 / count for variance, count in parts)
        half = _student(freedom) * math.sqrt(total)
        variance, count = max(parts)
        if count == n - 1:
            half = max(half, _student(count) * math.sqrt(variance))
    return Difference(float(np.mean(deltas)), half if total else 0.0 if parts else None, n, covers)


def _student(freedom: float) -> float:
    """Return the 97.5 % quantile of Student's t, for the degrees of freedom rounded down."""
    return float(stdtrit(max(1, math.floor(freedom + 1e-9)), 0.975))
