"""How long the runs of a sweep take, and in which order they run."""

import math
from collections import Counter
from collections.abc import Hashable, Mapping, Sequence

from experiments.lra.runs import Run
from experiments.lra.settings import Settings
from experiments.lra.speed.rows import StepRow, measured, newest
from experiments.lra.sweep.runs import SweepRun
from experiments.lra.tasks.task import padded_length

BESIDES = 0.5  # minutes of a run besides its steps, as those of docs/results/lra/runs took
SAME_SIZE = {"imdb_same_movie": "retrieval"}


def run_minutes(runs: Sequence[SweepRun], steps: Sequence[StepRow]) -> dict[str, float]:
    """GPU minutes of runs by name, from measured training steps; absent where none is like it."""
    rows = newest(measured(steps))
    found = {}
    for run in runs:
        if ms := [row.ms for row in rows if _fits(row, run.settings)]:
            found[run.name] = BESIDES + run.settings.steps * ms[-1] / 60_000
    return found


def _fits(row: StepRow, settings: Settings) -> bool:
    """Whether a measured step is that of a run, on whatever device."""
    name, longest = settings.task["name"], settings.task.get("max_length")
    model = settings.sizes
    ours = (settings.attention["name"], settings.mask or "", settings.batch)
    ours += (model.layers, model.dim, model.heads)
    theirs = (row.attention, row.option, row.batch, row.layers, row.dim, row.heads)
    same_length = longest is None or padded_length(longest) == row.length
    return row.task == SAME_SIZE.get(name, name) and ours == theirs and same_length


def in_order(
    runs: Sequence[SweepRun], known: Sequence[Run], minutes: Mapping[str, float]
) -> list[SweepRun]:
    """The runs in rounds: the first gives every cell of the table one run, short runs first.

    `known` runs that are complete, from a commit of the history, count as earlier rounds of their
    cells, and come last themselves. So the seeds of a cell are far apart, and the later ones find
    the compiled code of the first.
    """
    done = {(_cell(run), run.seed) for run in known if run.complete and run.traced}
    rounds = Counter[Hashable](cell for cell, _ in done)
    places = {}
    for run in runs:
        line = {"kind": "start", "step": 0, "config": run.settings.values()}
        cell = _cell(Run("", [line | {"task": run.settings.task}], {}))
        again = (cell, run.settings.seed) in done
        places[run.name] = again, rounds[cell], minutes.get(run.name, math.inf)
        rounds[cell] += not again
    return sorted(runs, key=lambda run: places[run.name])


def _cell(run: Run) -> Hashable:
    return run.task, run.attention, run.mask, run.label, run.held_out
