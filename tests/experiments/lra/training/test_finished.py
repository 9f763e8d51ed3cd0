"""experiments.evaluate: the accuracy of a finished run, and folders that cannot be evaluated."""

import shutil
from pathlib import Path

import pytest
import torch
from omegaconf import OmegaConf

from experiments import evaluate
from experiments.common.records import read
from experiments.lra.finished import AccuracyRow
from experiments.training import state as checkpoint
from tests.experiments.lra.training.cases import Trained

ROOT = Path(__file__).resolve().parents[4]
DEFAULTS = OmegaConf.to_container(OmegaConf.load(ROOT / "experiments/conf/evaluate.yaml"))


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A finished run."""
    changes = {"task__examples": "[24,20,30]", "steps": 2}
    return Trained(tmp_path_factory.mktemp("runs"), "listops", "sparse", **changes)


def run(capsys, **options) -> str:
    """What the program prints."""
    evaluate.main.__wrapped__(DEFAULTS | {"device": "cpu"} | options, "command")
    return capsys.readouterr().out


def files(folder: Path) -> dict[Path, int]:
    return {path: path.stat().st_mtime_ns for path in folder.rglob("*")}


def test_the_accuracy_of_a_run_is_that_of_its_result(trained, capsys, tmp_path):
    folder, result = trained.folder, trained.result
    before = files(folder.parents[2])
    told = run(capsys, run=str(folder), csv=str(tmp_path / "accuracy.csv"))
    assert f"test accuracy {100 * result['accuracy']:.2f} ± " in told and "(30 examples)" in told
    assert files(folder.parents[2]) == before  # nothing is written
    (row,) = read(tmp_path / "accuracy.csv", AccuracyRow)
    assert (row.split, row.examples, row.step) == ("test", 30, result["best_step"])
    assert row.accuracy == pytest.approx(result["accuracy"], abs=1e-5)
    assert row.loss == pytest.approx(result["loss"], abs=1e-4)
    p = result["accuracy"]
    assert row.standard_error == pytest.approx((p * (1 - p) / 30) ** 0.5, rel=1e-4)
    assert row.mask == result["mask"] and row.density == pytest.approx(result["density"], rel=1e-5)


def test_other_splits_and_fewer_examples(trained, capsys, tmp_path):
    folder = str(trained.folder)
    assert "val accuracy" in run(capsys, run=folder, split="val", batch=3)
    assert "(7 examples)" in run(capsys, run=folder, examples=7, csv=str(tmp_path / "few.csv"))
    (row,) = read(tmp_path / "few.csv", AccuracyRow)
    error = (row.accuracy * (1 - row.accuracy) / 7) ** 0.5
    assert row.standard_error == pytest.approx(error, rel=1e-4)


def test_the_committed_weights_of_path_x(capsys, tmp_path):
    """Of generated images only those that are tested are made."""
    options = {"cache_dir": str(tmp_path), "examples": 2}
    told = run(capsys, run=str(ROOT / "docs/results/lra/path_x"), **options)
    assert "pathfinder128 (generated v2)" in told and "test accuracy 100.00 ± 0.00 %" in told
    sizes = sorted(path.stat().st_size for path in tmp_path.glob("*[!s].npy"))
    assert sizes[-1] < 3 * 128 * 128


def shorten(path: Path) -> None:
    state = torch.load(path, weights_only=True)
    state["model"]["embedding.weight"] = state["model"]["embedding.weight"][:5]
    torch.save(state, path)


LACKS_A_STEP = {"model": {}, "step": 1, "best": {"model": {}}, "about": {}}


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda folder: shutil.rmtree(folder), r"no config\.yaml there; give the folder"),
        (lambda folder: (folder / "config.yaml").write_text("a: ["), r"config\.yaml cannot be"),
        (lambda folder: (folder / "config.yaml").write_text("a: 1"), "setting='a': choose from"),
        (
            lambda folder: (folder / "weights.pt").write_bytes(b"PK"),
            r"weights\.pt is not a checkpoint",
        ),
        (
            lambda folder: checkpoint.save(folder / "weights.pt", {"model": {}}),
            r"weights\.pt has no step, best, about: give the folder of a finished run",
        ),
        (
            lambda folder: checkpoint.save(folder / "weights.pt", LACKS_A_STEP),
            r"weights\.pt does not hold the weights of a run: give the folder of a finished run",
        ),
        (
            lambda folder: [(folder / name).unlink() for name in ("weights.pt", "checkpoint.pt")],
            r"no weights\.pt there; give the folder of a finished run",
        ),
        (
            lambda folder: shorten(folder / "weights.pt"),
            r"does not fit this model \(embedding\.weight is \(5, 16\) there, \(16, 16\) here\)",
        ),
    ],
)
def test_a_folder_that_cannot_be_evaluated(trained, tmp_path, capsys, damage, words):
    folder = tmp_path / "run"
    shutil.copytree(trained.folder, folder)
    damage(folder)
    with pytest.raises(ValueError, match=words) as error:
        run(capsys, run=str(folder))
    assert str(folder) in str(error.value) and "delete" not in str(error.value)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"run": None}, "run=FOLDER is missing"),
        ({"split": "tset"}, r"split='tset': .*did you mean test"),
        ({"examples": 0}, "examples=0: give a whole number"),
        ({"device": "cuda:99"}, "device='cuda:99': torch finds"),
    ],
)
def test_wrong_options(trained, capsys, options, words):
    with pytest.raises(ValueError, match=words):
        run(capsys, **{"run": str(trained.folder)} | options)
