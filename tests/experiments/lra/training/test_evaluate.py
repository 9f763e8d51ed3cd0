"""experiments.evaluate: the accuracy of a finished run, and folders that cannot be evaluated."""

import shutil
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
from experiments.training.run_file import read_settings
from tests.experiments.lra.training.cases import Trained

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


def shorten(folder: Path) -> None:
    state = torch.load(folder / "weights.pt", weights_only=True)
    state["model"]["embedding.weight"] = state["model"]["embedding.weight"][:5]
    torch.save(state, folder / "weights.pt")


DAMAGES = {
    r"no run\.json there": lambda folder: shutil.rmtree(folder),
    "has no step": lambda folder: checkpoint.save(folder / "weights.pt", {"model": {}}),
    r"no weights\.pt there": lambda folder: [p.unlink() for p in folder.glob("*.pt")],
    r"embedding\.weight is \(5, 16\) there, \(16, 16\) here": shorten,
}


def test_a_folder_that_cannot_be_evaluated(trained, tmp_path, capsys):
    for number, (words, damage) in enumerate(DAMAGES.items()):
        folder = tmp_path / f"run{number}"
        shutil.copytree(trained.folder, folder)
        damage(folder)
        with pytest.raises(ValueError, match=words) as error:
            run(capsys, run=str(folder))
        assert str(folder) in str(error.value)
    with pytest.raises(ValueError, match="run=FOLDER is missing"):
        run(capsys, run=None)
