"""Measuring training steps: the plan, random data as the tasks have them, the program resumed."""

import inspect
import os
import signal
from dataclasses import replace

import numpy as np
import pytest
import torch

from experiments.common.records import OK, Records, read
from experiments.lra import published as lra
from experiments.lra.speed import case as speed_case
from experiments.lra.speed import together
from experiments.lra.speed.case import StepCase, measure_case, step_times
from experiments.lra.speed.rows import SWEEP, StepRow
from experiments.lra.speed.shapes import IMDB, SHAPES, random_lengths
from experiments.lra.speed.together import run_together
from experiments.lra.tasks.load import loader
from experiments.lra_speed import plan, run_cases, unmeasured
from experiments.training.step import Trainer

OPTIONS = {
    "tasks": None,
    "attentions": ["standard", "sparse"],
    "masks": [None, "local:64"],
    "lengths": None,
    "tokens": None,
    "options": [],
}
SMALL = ("device=cpu", "batch=2", "task.max_length=64")


def case(attention="linear", *more, mask=None):
    return StepCase("listops", attention, mask, None, (*SMALL, *more))


def test_every_mask_is_a_case_of_block_sparse_attention_alone():
    cases = plan(OPTIONS, "cpu")
    kinds = [("standard", None), ("sparse", None), ("sparse", "local:64")]
    assert [(c.attention, c.mask) for c in cases[:3]] == kinds
    assert {c.task for c in cases} == {*lra.AVERAGED, SWEEP}
    assert {c.length for c in cases} == {None, 256, 512, 1024}


def test_on_a_gpu_the_sweep_keeps_its_tokens_and_the_images_grow():
    cases = plan(OPTIONS, "cuda")
    assert "pathfinder256" in {c.task for c in cases}
    sweep = [c for c in cases if c.task == SWEEP]
    assert {c.length for c in sweep} == {1024 * 2**i for i in range(7)}
    assert "batch=2" in next(c for c in sweep if c.length == 65536).overrides


def test_an_empty_list_is_none_of_them():
    assert {c.task for c in plan(OPTIONS | {"tasks": []}, "cuda")} == {SWEEP}
    assert SWEEP not in {c.task for c in plan(OPTIONS | {"lengths": []}, "cuda")}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"tasks": ["lists"]}, "tasks='lists': choose from.*listops"),
        ({"attentions": ["fast"]}, "attentions='fast': choose from standard"),
        ({"lengths": [300], "tokens": 1024}, "300 does not divide tokens=1024"),
        ({"lengths": [0]}, "lengths=0: give a whole number"),
    ],
)
def test_unknown_values_are_refused(change, message):
    with pytest.raises(ValueError, match=message):
        plan(OPTIONS | change, "cpu")


@pytest.mark.parametrize("name", SHAPES)
def test_the_default_lengths_are_the_tasks_own(name):
    known = inspect.signature(loader(name)).parameters
    if "max_length" in known:
        assert known["max_length"].default == SHAPES[name].max_length


def test_lengths_follow_the_quantiles_of_the_task():
    draw = np.random.default_rng(1)
    found = random_lengths(SHAPES["text"], (20000,), 4096, draw)
    assert abs(np.median(found) - IMDB[8]) < 20
    assert abs((found == 4096).mean() - 0.029) < 0.01  # longer ones are cut
    pairs = random_lengths(SHAPES["imdb_same_movie"], (2000, 2), 4000, draw)
    assert pairs.shape == (2000, 2) and pairs.min() >= 3 * IMDB[0]
    assert pairs.mean() > 2500


def test_random_examples_are_padded_behind_their_length():
    settings = case().settings()
    task = case().data(settings)
    split = task.splits["train"]
    assert split.lengths is not None and (task.length, settings.batch) == (64, 2)
    assert (split.tokens[np.arange(64) >= split.lengths[:, None]] == 0).all()
    assert (split.tokens[np.arange(64) < split.lengths[:, None]] > 0).all()


def test_the_step_that_is_timed_is_the_one_of_training(tmp_path, monkeypatch):
    calls = []
    advance = Trainer.advance
    monkeypatch.setattr(Trainer, "advance", lambda self: (calls.append(self), advance(self))[1])
    records = Records(tmp_path / "s.csv", StepRow)
    run_cases([case()], records, 0.01, "command")
    (row,) = records.rows
    assert row.status == OK and calls
    assert (row.length, row.batch, row.mode, row.ran) == (64, 2, "eager", "eager")
    assert row.tokens_per_s == pytest.approx(1000 * 2 * 64 / row.ms, rel=1e-4)
    assert row.attention_ms and row.attention_ms > 0
    assert (row.mask, row.density) == ("", None)


def test_a_row_says_which_mask_it_had(no_interpreter):
    default = measure_case(0.01, "command", case("sparse"))
    given = measure_case(0.01, "command", case("sparse", mask="causal"))
    assert (default.option, given.option, given.mask) == ("", "causal", "causal")
    assert "butterfly" in default.mask and 0 < default.density < 1


def test_what_was_measured_is_not_measured_again_but_failures_are(tmp_path, capsys):
    records = Records(tmp_path / "s.csv", StepRow)
    wrong = case("linformer", "attention.rank=-3")
    run_cases([case(), wrong], records, 0.01, "command")
    assert [row.status == OK for row in records.rows] == [True, False]
    assert unmeasured([case(), wrong, case("local")], records) == [wrong, case("local")]
    first = records.path.read_bytes()
    records = Records(tmp_path / "s.csv", StepRow)
    run_cases([case(), wrong], records, 0.01, "command")
    assert records.path.read_bytes() == first
    assert "measured 20" in capsys.readouterr().out.splitlines()[-2]
    run_cases([replace(case(), overrides=(*SMALL, "batch=3"))], records, 0.01, "command")
    assert [row.batch for row in read(records.path, StepRow)] == [2, 2, 3]


def test_a_lack_of_memory_is_a_row_that_says_so(monkeypatch):
    def fails(*_, **__):
        raise torch.OutOfMemoryError(
            "CUDA out of memory. Tried to allocate 64.00 GiB. GPU 0 has a total capacity of "
            "139.80 GiB of which 20 GiB is free. Including"
        )

    monkeypatch.setattr(speed_case, "_measure", fails)
    row = measure_case(0.01, "", case())
    assert row.status.startswith("out of memory: Tried to allocate 64.00 GiB. GPU 0 has a total")
    assert row.ms_median is None


@pytest.mark.slow
def test_cases_together_have_the_rows_that_they_have_one_by_one(tmp_path, capsys):
    records = Records(tmp_path / "s.csv", StepRow)
    wrong = case("linformer", "attention.rank=-3")
    cases = [case(), wrong]
    run_cases(cases, records, 0.01, "command", workers=2, limit_s=120)
    assert [(row.attention, row.status == OK) for row in records.rows] == [
        ("linear", True),
        ("linformer", False),
    ]
    assert "1 of 2 steps are ready" in capsys.readouterr().out
    before = records.path.read_bytes()
    run_cases([case()], Records(records.path, StepRow), 0.01, "command", workers=2, limit_s=120)
    assert records.path.read_bytes() == before


def lacks(case, wait):
    """A row of a case that needs more memory than is there beside another one."""
    wait()
    return replace(case.row(""), status="out of memory: all of it is taken")


def dies(case, wait):
    os.kill(os.getpid(), signal.SIGINT)  # Ctrl-C, of which the program alone should tell
    os._exit(3)


def test_a_process_may_die_or_be_late():
    ((_, why),) = run_together([case()], dies, workers=1, limit_s=120)
    assert why == "the process that measures ended with 3"
    ((_, why),) = run_together([case()], lacks, workers=1, limit_s=0.01)
    assert why == "the process that measures did not answer in time"


def test_what_found_no_memory_is_tried_beside_fewer(monkeypatch):
    at_once = []
    row = case().row("")

    def wave(cases, measure, limit_s):
        at_once.append(len(cases))
        for each in cases:
            needs = int(each.length) * len(cases)
            yield each, replace(row, status=OK if needs <= 4 else "out of memory: all is taken")

    monkeypatch.setattr(together, "_wave", wave)
    cases = [replace(case(), length=n) for n in (1, 2, 4, 8)]
    found = [(c.length, row.status == OK) for c, row in run_together(cases, lacks, 8, 120)]
    assert found == [(1, True), (2, True), (4, True), (8, False)]
    assert at_once == [4, 2, 1, 1, 1]


def test_slow_steps_are_not_repeated_five_times():
    clock = iter(np.arange(0, 1000.0))
    taken = []

    def slow():
        taken.append(next(clock))
        torch.zeros(1)

    times = step_times(slow, torch.device("cpu"), 0.0)
    assert len(taken) == 2 and times.ms_median > 0


def test_the_program_writes_rows_table_and_plots(tmp_path, run_program):
    words = ["tasks=[listops]", "lengths=[]", "attentions=[standard,linear]", "seconds=0.01"]
    words += [f"csv={tmp_path / 's.csv'}", f"plots={tmp_path / 'plots'}", "device=cpu"]
    status, told, _ = run_program("lra_speed", *words, "options=['batch=2','task.max_length=64']")
    assert status == 0 and "linear attention" in told
    assert len(read(tmp_path / "s.csv", StepRow)) == 2
    assert (tmp_path / "s.md").exists() and len(list((tmp_path / "plots").iterdir())) == 2
