"""The commands: a run killed and started again, stopped, refused, swept, and evaluated."""

import os
import signal
import time
from multiprocessing import get_context
from pathlib import Path

import numpy as np
import pytest
import torch

from experiments import evaluate
from experiments.common.rows import read
from experiments.lra.settings import Settings
from experiments.lra.tasks.task import SPLITS, Split, Task
from experiments.lra.weights import load_model
from experiments.training import state as checkpoint
from experiments.training.clock import Stop
from experiments.training.run_file import read_settings
from experiments.training.step import Trainer
from tests.experiments.lra.training.cases import (
    Trained,
    assert_same,
    journal,
    overrides,
    settings,
    train,
)
from tests.processes import METHOD, without_the_interpreter


def train_as_users_do(*given, **changes):
    without_the_interpreter()
    torch.set_num_threads(1)
    train(*given, **changes)


def killed_after(step, place, folder, **changes):
    """Train in a process that is killed once its journal tells of this step."""
    options = {"args": (place, "listops", "sparse"), "kwargs": changes}
    victim = get_context(METHOD).Process(target=train_as_users_do, **options)
    victim.start()
    while not any(line["step"] >= step for line in journal(folder)):
        assert victim.is_alive(), "no step"
        time.sleep(0.01)
    os.kill(victim.pid, signal.SIGKILL)
    victim.join()
    assert victim.exitcode == -signal.SIGKILL


@pytest.mark.usefixtures("no_interpreter", "one_thread")
def test_killed_in_the_middle_and_started_again_ends_with_the_same(tmp_path, run_program):
    changes = {"steps": 150, "eval_every": 30, "checkpoint_every": 20, "log_every": 5}
    given = overrides(tmp_path, "listops", "sparse", **changes)
    cut = settings(tmp_path, "listops", "sparse", name="cut", **changes).folder
    whole = Trained(tmp_path, "listops", "sparse", **changes).folder
    killed_after(50, tmp_path, cut, name="cut", **changes)
    assert not Trained.at(cut).file["complete"]
    left = checkpoint.load(cut / "checkpoint.pt")["step"]
    assert 40 <= left < 150
    status, *told = run_program("train", *given, "name=cut")
    assert status == 0 and f"from step {left}" in "".join(told), told
    runs = [Trained.at(folder) for folder in (whole, cut)]
    states = [run.state for run in runs]
    kept = ("model", "optimizer", "best", "sums", "step")
    assert_same(*({name: state[name] for name in kept} for state in states))
    for name in ("accuracy", "loss", "val_accuracy", "best_step", "steps", "complete"):
        assert runs[0].result[name] == runs[1].result[name]
    for run in runs:
        assert [x["step"] for x in run.journal if x["kind"] == "train"] == list(range(5, 151, 5))


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_stops_with_a_checkpoint(tmp_path, run_program, monkeypatch, number):
    given = ("listops", "linear")
    folder = settings(tmp_path, *given).folder
    advance, steps = Trainer.advance, []

    def signalled(trainer):
        steps.append(trainer)
        if len(steps) == 3:
            assert callable(signal.getsignal(number))  # or it would end the tests
            for _ in range(2 if number == signal.SIGHUP else 1):  # a lost terminal sends several
                signal.raise_signal(number)
        return advance(trainer)

    monkeypatch.setattr(Trainer, "advance", signalled)
    before = signal.signal(number, signal.SIG_DFL)  # nohup ignores one
    rare = {"steps": 100, "eval_every": 100, "checkpoint_every": 100}
    try:
        status, *told = run_program("train", *overrides(tmp_path, *given, **rare))
        signal.signal(number, signal.SIG_IGN)  # as nohup ignores SIGHUP
        with Stop(None, 0.0) as stop:
            signal.raise_signal(number)
            assert stop.reason is None
    finally:
        signal.signal(number, before)
    assert status == 128 + number, told
    assert checkpoint.load(folder / "checkpoint.pt")["step"] == len(steps) == 3
    assert journal(folder)[-1]["reason"] == number.name


# ---- experiments.evaluate

ROOT = Path(__file__).resolve().parents[4]


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A finished run."""
    changes = {"task__examples": "[24,20,30]", "steps": 2}
    return Trained(tmp_path_factory.mktemp("runs"), "listops", "sparse", **changes)


def run(capsys, **options) -> str:
    """What the program prints."""
    evaluate.main.__wrapped__(evaluate.Options(**{"device": "cpu"} | options), "command")
    return capsys.readouterr().out


def test_the_accuracy_of_a_run_is_that_of_its_result(trained, capsys, tmp_path):
    folder, result = trained.folder, trained.result
    before = {path: path.stat().st_mtime_ns for path in folder.rglob("*")}
    told = run(capsys, run=str(folder), rows=str(tmp_path / "accuracy.jsonl"))
    assert f"test accuracy {100 * result['accuracy']:.2f} ± " in told and "(30 examples)" in told
    assert {path: path.stat().st_mtime_ns for path in folder.rglob("*")} == before
    (row,) = read(tmp_path / "accuracy.jsonl")
    assert (row["split"], row["examples"], row["step"]) == ("test", 30, result["best_step"])
    p = result["accuracy"]
    assert row["accuracy"] == pytest.approx(p, abs=1e-5)
    assert row["loss"] == pytest.approx(result["loss"], abs=1e-4)
    assert row["standard_error"] == pytest.approx((p * (1 - p) / 30) ** 0.5, rel=1e-4)
    assert row["mask"] == result["mask"]
    assert "val accuracy" in run(capsys, run=str(folder), split="val", batch=3)
    assert "(7 examples)" in run(capsys, run=str(folder), examples=7)


def test_predicted_tokens_have_no_standard_error_of_classes(capsys, tmp_path):
    pre = Trained(tmp_path, "listops", "linear", pretrain="masked", steps=1)
    assert "accuracy of predicted tokens" in (told := run(capsys, run=str(pre.folder)))
    assert "±" not in told


def test_published_weights(capsys, tmp_path):
    """Of generated images only those that are tested are made."""
    options = {"cache_dir": str(tmp_path), "examples": 1}
    told = run(capsys, run=str(ROOT / "docs/results/lra/path_x"), **options)
    assert "(generated v2), sparse attention" in told and "± 0.00 % (1 examples)" in told
    sizes = sorted(path.stat().st_size for path in tmp_path.glob("*[!s].npy"))
    assert sizes[-1] < 3 * 256 * 256
    folder, blank = ROOT / "docs/results/lra/path_256", np.zeros((1, 256 * 256), np.uint8)
    splits = dict.fromkeys(SPLITS, Split(blank, np.zeros(1, np.int64)))
    task = Task("pathfinder256", "generated", 2, 256, splits, (256, 256))
    assert load_model(folder, read_settings(folder, Settings), task)[1] > 0


def test_a_folder_that_cannot_be_evaluated(capsys, tmp_path):
    for folder, words in ((str(tmp_path), r"no run\.json there"), (None, "run=FOLDER is missing")):
        with pytest.raises(ValueError, match=words):
            run(capsys, run=folder)
