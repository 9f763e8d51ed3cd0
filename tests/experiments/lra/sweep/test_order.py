"""GPU minutes of runs, and the order in which a sweep runs them."""

from collections import Counter
from copy import copy
from dataclasses import replace
from typing import Any

import pytest
from omegaconf import OmegaConf

from experiments.common.provenance import ROOT
from experiments.common.records import read
from experiments.lra.run_files import read_runs
from experiments.lra.speed.rows import StepRow
from experiments.lra.sweep.order import BESIDES, in_order, run_minutes
from experiments.lra.sweep.runs import SweepRun, sweep_runs

STEPS = read(ROOT / "docs/results/lra/speed.csv", StepRow)


def runs_of(*overrides: str) -> list[SweepRun]:
    return sweep_runs({"runs": {"x": {"with": [*overrides, "device=cpu", "scale=full"]}}})


def known_runs(*wanted: tuple[str, str, int]) -> list:
    """Published runs of task, attention and seed."""
    found = read_runs(str(ROOT / "docs/results/lra/runs"))
    found = [run for run in found if not (run.label or run.held_out)]
    return [run for run in found if (run.task, run.attention, run.seed) in wanted]


@pytest.mark.parametrize(
    ("overrides", "task", "attention"),
    [
        (["task=listops"], "listops", "sparse"),
        (["task=imdb_same_movie", "attention=flash"], "retrieval", "flash"),
        (["task=image", "attention=linear", "steps=7"], "image", "linear"),
    ],
)
def test_minutes_follow_from_the_measured_step(overrides, task, attention):
    (run,) = runs_of(*overrides)
    (row,) = [row for row in STEPS if (row.task, row.attention) == (task, attention)]
    expected = BESIDES + run.settings.steps * row.ms / 1000 / 60
    assert run_minutes([run], STEPS) == {"x": pytest.approx(expected)}
    slower = replace(row, ms_median=2 * row.ms, source="newer")
    expected += run.settings.steps * row.ms / 1000 / 60
    assert run_minutes([run], [*STEPS, slower]) == {"x": pytest.approx(expected)}


@pytest.mark.parametrize(
    "change",
    ["batch=16", "mask=local:128", "model.layers=4", "model.dim=32", "model.heads=1",
     "task=text4k", "task=files"],
)  # fmt: skip
def test_another_step_says_nothing(change):
    assert run_minutes(runs_of("task=text"), STEPS)
    assert run_minutes(runs_of("task=text", change), STEPS) == {}


def test_runs_that_hold_out_a_validation_split_are_cells_of_their_own():
    runs = runs_of("task=text,text_held_out", "seed=0,1")
    assert [run.settings.seed for run in in_order(runs, [], {})] == [0, 0, 1, 1]


def test_missing_cells_first_then_short_runs_and_seeds_by_turns():
    runs = runs_of("task=listops,text", "attention=flash,standard,performer", "seed=0,1")
    minutes = run_minutes(runs, STEPS)
    known = known_runs(("listops", "flash", 0), ("text", "performer", 0), ("text", "flash", 0))
    assert len(known) == 3
    names = [run.name.removeprefix("x/") for run in in_order(runs, known, minutes)]
    assert names[:3] == ["listops/performer/0", "listops/standard/0", "text/standard/0"]
    second = ["listops/flash/1", "listops/performer/1", "text/performer/1", "text/flash/1"]
    assert names[3:9] == [*second, "listops/standard/1", "text/standard/1"]
    assert names[9:] == ["listops/flash/0", "text/performer/0", "text/flash/0"]  # known
    del minutes["x/listops/standard/0"]  # unknown: last of its round
    assert in_order(runs, known, minutes)[2].name == "x/listops/standard/0"
    for change in ({"complete": False}, {"traced": False}):
        run = copy(known[0])
        vars(run).update(change)
        names = [found.name for found in in_order(runs, [run, *known[1:]], minutes)]
        assert names.index("x/listops/flash/0") < 4


@pytest.mark.slow
def test_the_table_of_the_arena_has_minutes_for_all_runs():
    sweep: Any = OmegaConf.to_container(OmegaConf.load(ROOT / "experiments/conf/sweep/lra.yaml"))
    runs = sweep_runs(sweep, ["device=cpu", "scale=full"])
    minutes = run_minutes(runs, STEPS)
    assert len(minutes) == len(runs) == 114 and 360 < sum(minutes.values()) < 385
    order = in_order(runs, read_runs(str(ROOT / sweep["known"])), minutes)
    first, last = (
        [(run.settings.task["name"], run.settings.attention["name"]) for run in part]
        for part in (order[:3], order[3:])
    )
    assert first == [("imdb_same_movie", "standard")] * 3  # whose other runs are known
    found = Counter(a for task, a in last if task == "imdb_same_movie")
    thrice = dict.fromkeys(("flash", "linear", "local", "sparse"), 3)
    once = dict.fromkeys(("linformer", "performer", "reformer", "smyrf"), 1)
    assert found == thrice | once
