"""Training steps of the Long Range Arena: cases, random data, rows, tables and figures."""

import inspect

import numpy as np
import pytest

from experiments.common.rows import OK, Found, frame
from experiments.lra import published as lra
from experiments.lra.tasks.task import loader
from experiments.studies.lra_speed import IMDB, SHAPES, SWEEP, newest, random_lengths, tables
from experiments.training.step import Trainer

SMALL = ["tasks=[listops]", "lengths=[]", "options=['batch=2','task.max_length=64']"]
ROW = Found(
    task="listops", attention="standard", option="", mask="", density=None, length=2048, pair=1,
    batch=32, mean_length=1050.0, layers=2, dim=64, heads=2, precision="bf16", status=OK,
    mode="compile+graph", ran="compile+graph", ms_median=8.0, peak_mib=1000.0,
    device="GPU A", torch="2.11.0", triton="3.6.0", source="abc", commit="", date="2026-01-01",
)  # fmt: skip


def row(**changes) -> Found:
    return Found(ROW | changes)


def test_cases_of_the_options(study):
    run = study("lra_speed", "attentions=[standard,sparse]", "masks=[null,'local:64']")
    cases = run.study.cases(run)
    kinds = [("standard", None), ("sparse", None), ("sparse", "local:64")]
    assert [(c.attention, c.mask) for c in cases[:3]] == kinds
    assert {c.task for c in cases} == {*lra.AVERAGED, SWEEP}
    assert "batch=2" in next(c for c in cases if c.length == 1024).overrides


def test_lengths_are_those_of_the_tasks():
    for name, shape in SHAPES.items():
        known = inspect.signature(loader(name)).parameters
        assert "max_length" not in known or known["max_length"].default == shape.max_length
    draw = np.random.default_rng(1)
    found = random_lengths(SHAPES["text"], (20000,), 4096, draw)
    assert abs(np.median(found) - IMDB[8]) < 20
    assert abs((found == 4096).mean() - 0.029) < 0.01  # longer ones are cut
    pairs = random_lengths(SHAPES["imdb_same_movie"], (2000, 2), 4000, draw)
    assert pairs.shape == (2000, 2) and pairs.min() >= 3 * IMDB[0] and pairs.mean() > 2500


def test_the_step_that_is_timed_is_the_one_of_training(measured, monkeypatch):
    calls, advance = [], Trainer.advance
    monkeypatch.setattr(Trainer, "advance", lambda self: (calls.append(self), advance(self))[1])
    linear, default, given = measured(
        "lra_speed", *SMALL, "attentions=[linear,sparse]", "masks=[null,causal]"
    )
    assert linear.status == OK and calls
    assert (linear.length, linear.batch, linear.mode, linear.ran) == (64, 2, "eager", "eager")
    assert linear.tokens_per_s == pytest.approx(1000 * 2 * 64 / linear.ms_median, rel=1e-4)
    assert (linear["mask"], linear.density) == ("", None)
    assert (default.option, given.option, given["mask"]) == ("", "causal", "causal")
    assert "butterfly" in default["mask"] and 0 < default.density <= 1


def test_the_mean_speed_up_is_geometric_over_the_five_tasks_alone():
    base = [row(task=task) for task in (*lra.AVERAGED, "pathfinder128")]
    times = (4.0, 4.0, 1.0, 1.0, 8.0, 0.01)  # 2x 2x 8x 8x 1x, and one that does not count
    flash = [r | {"attention": "flash", "ms_median": t} for r, t in zip(base, times, strict=True)]
    line = tables(frame([*base, *flash]))["steps"].splitlines()[3]
    assert line.startswith("| FlashAttention | 4 (2.00x) 1000 |") and line.endswith("| 3.03x |")
    some = tables(frame([ROW, row(task="text"), row(attention="flash", ms_median=4.0)]))["steps"]
    wanted = "| FlashAttention | 4 (2.00x) 1000 | – | 2.00x (1 of 5) |"
    assert some.splitlines()[3] == wanted


def test_speed_ups_are_of_the_same_work_on_one_gpu():
    flash = row(attention="flash", ms_median=2.0, gpu="a")
    for change in ({"batch": 16}, {"device": "GPU B"}, {"gpu": "b"}):
        assert newest(frame([flash, row(**{"gpu": "a"} | change)]))[0].gain is None
    assert newest(frame([flash, row(gpu="a")]))[0].gain == pytest.approx(4.0)
    rows = [ROW, row(source="def", ms_median=4.0)]
    assert [r.ms_median for r in newest(frame(rows))] == [4.0]
