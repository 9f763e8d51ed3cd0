"""The cells of the LRA table: runs of one attention on one task, and their means."""

import json
import re
import statistics
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from experiments.common.figures import token_text
from experiments.lra import published as lra
from experiments.lra.runs import Run
from experiments.lra.speed.rows import StepRow, measured, newest

ALONE = "alone"  # the workload of a measured step
# Settings that runs of one cell may differ in.
FREE = set(
    "seed data_seed name minutes device data_dir cache_dir runs init_from micro_batch eval_batch "
    "log_every checkpoint_every compile graph deterministic tensorboard scaled".split()
)


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
        words = [self.name, self.mask, self.label]
        return ", ".join(word for word in words if word)


class Column(NamedTuple):
    """A task and its data. Official and generated data never share a column."""

    task: str
    source: str  # empty if nothing was run
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

    @property
    def counts(self) -> str:
        """The numbers of examples, where the source has them."""
        return self.source.partition(", ")[2]


def heads(columns: Sequence[Column]) -> list[str]:
    """The text of each column, with its counts where columns differ in nothing else."""
    texts = [column.text for column in columns]
    return [
        f"{text}, {column.counts}" if column.counts and texts.count(text) > 1 else text
        for text, column in zip(texts, columns, strict=True)
    ]


class Cell:
    """Runs that differ in their seed only, and their means.

    timed: measured training steps of the same task and attention. Their times and memory replace
        those of the runs, which may have shared a GPU. None keeps those of the runs.
    """

    def __init__(self, runs: Sequence[Run] = (), timed: Sequence[StepRow] | None = None):
        self.runs = runs
        self.complete = all(run.complete for run in runs)
        self.traced = all(run.traced for run in runs)
        self.reconstructed = any(run.reconstructed for run in runs)
        self.resolved_mask = next((run.resolved_mask for run in runs), "")
        self.density = next((run.density for run in runs), None)
        # Accuracies are of the validation split if a run was not tested.
        self.tested = all(run.accuracy is not None for run in runs)
        found = [run.accuracy if self.tested else run.val_accuracy for run in runs]
        self.accuracies = [value for value in found if value is not None]
        self.accuracy = statistics.fmean(self.accuracies) if self.accuracies else None
        # the standard deviation of the seeds (n - 1), None for a single run
        self.spread = statistics.stdev(self.accuracies) if len(self.accuracies) > 1 else None
        memory = [x.memory_mib for x in runs] if timed is None else [x.peak_mib for x in timed]
        self.memory_mib = max((mib for mib in memory if mib), default=None)
        # milliseconds of a training step, the median of the runs, by device and workload
        times: dict[tuple[str, str], list[float]] = {}
        for run in runs if timed is None else ():
            if run.ms_per_step:
                times.setdefault((run.device, run.workload), []).append(run.ms_per_step)
        for row in timed or ():
            times[row.device, ALONE] = [row.ms]
        self.ms_by_place = {place: statistics.median(ms) for place, ms in times.items()}


Cells = dict[tuple[RowKey, Column], Cell]


def make_cells(runs: Iterable[Run], *, pretraining: bool = False) -> tuple[Cells, list[str]]:
    """Returns the cell of every attention and task, and notes on runs that are left out.

    A cell takes the settings with the most complete runs, then the newest. Each seed counts once:
    the complete run, then the newest. Runs cut short count only if none is complete.
    """
    groups: dict[tuple[RowKey, Column], list[Run]] = {}
    left_out: list[tuple[Run, str]] = []
    for run in runs:
        if run.pretraining == pretraining:
            row = RowKey(run.attention, run.mask, run.label)
            column = Column(run.task, run.source, run.length or 0, run.held_out)
            groups.setdefault((row, column), []).append(run)
        elif run.pretraining:
            left_out.append((run, "pre-training"))
    cells: Cells = {}
    for key, found in groups.items():
        cells[key], others = _cell(found)
        left_out += others
    return cells, [f"left out: {run.place}, {why}" for run, why in left_out]


def sorted_rows(keys: Iterable[RowKey]) -> list[RowKey]:
    """Returns each row once, in the order of the paper's table."""
    return sorted(set(keys), key=lambda key: (lra.order(lra.ATTENTIONS, key.attention), key))


def sorted_columns(columns: Iterable[Column]) -> list[Column]:
    """Returns each column once, in the order of the paper's table."""
    return sorted(set(columns), key=lambda column: (lra.order(lra.LABELS, column.task), column))


def with_times(cells: Cells, steps: Sequence[StepRow]) -> Cells:
    """Returns the cells with the times of measured steps.

    A cell of another recipe, batch, size or precision, or without a measurement, has no times.
    """
    times: dict[tuple[str, str, str, int], dict[str, StepRow]] = {}
    for step in newest(measured(steps)):
        name = step.task, step.attention, step.option, step.length
        times.setdefault(name, {})[step.device] = step
    found = {}
    for (row, column), cell in cells.items():
        name = column.task, row.attention, row.mask, column.length
        own = times.get(name, {}).values() if not row.label else ()
        own = [step for step in own if all(_same_work(run, step) for run in cell.runs)]
        found[row, column] = Cell(cell.runs, own)
    return found


def _same_work(run: Run, step: StepRow) -> bool:
    """Whether the step is of the batch, model and precision of the run, as far as it says them."""
    model = run.config.get("model") or {}
    said = {name: model.get(name) for name in ("layers", "dim", "heads")}
    said |= {name: run.config.get(name) for name in ("batch", "precision")}
    return all(value in (None, getattr(step, name)) for name, value in said.items())


def _cell(runs: Sequence[Run]) -> tuple[Cell, list[tuple[Run, str]]]:
    by_settings: dict[str, list[Run]] = {}
    for run in sorted(runs, key=lambda r: (r.complete, r.date)):
        by_settings.setdefault(_settings(run), []).append(run)

    def rank(group: list[Run]) -> tuple[int, str]:
        return sum(r.complete for r in group), max(r.date for r in group)

    chosen = max(by_settings.values(), key=rank)
    left_out = [(r, "other settings") for r in runs if r not in chosen]
    last = {run.seed: run for run in chosen}
    left_out += [(r, f"seed {r.seed} again") for r in chosen if r is not last[r.seed]]
    kept = [last[seed] for seed in sorted(last)]
    if any(r.complete for r in kept):
        left_out += [(r, "cut short") for r in kept if not r.complete]
        kept = [r for r in kept if r.complete]
    return Cell(kept), left_out


def _settings(run: Run) -> str:
    config = run.start.get("config", {})
    shared = {name: value for name, value in config.items() if name not in FREE}
    return json.dumps(_given(shared), sort_keys=True, default=str)


def _given(config: dict[str, Any]) -> dict[str, Any]:
    """The settings that are not null: a null means the same as a setting that came later."""
    pairs = ((k, _given(v) if isinstance(v, dict) else v) for k, v in config.items())
    return {name: value for name, value in pairs if value is not None}


def speedup(cells: Cells, row: RowKey, column: Column) -> float | None:
    """Returns the Transformer's time of a training step / that of the row.

    It compares runs of the same device, batch and model, and prefers those of the same name.
    """
    ours = cells.get((row, column))
    if ours is None:
        return None
    bases = [key for key, at in cells if key.attention == lra.BASE and at == column]
    ms = ours.ms_by_place
    for key in sorted(bases, key=lambda base: (base.label != row.label, base.label)):
        base_ms = cells[key, column].ms_by_place
        factor = lra.geometric_mean(base_ms[place] / ms[place] for place in ms if place in base_ms)
        if factor is not None:
            return factor
    return None


def mean_speedup(cells: Cells, row: RowKey, columns: Iterable[Column]) -> tuple[float | None, int]:
    """Returns the geometric mean of the speed-up over the tasks, and their number.

    The columns of one task count together as one.
    """
    factors: dict[str, list[float]] = {}
    for column in columns:
        factor = speedup(cells, row, column) if column.task in lra.TIMED else None
        if factor is not None:
            factors.setdefault(column.task, []).append(factor)
    means = [statistics.geometric_mean(each) for each in factors.values()]
    return lra.geometric_mean(means), len(means)
