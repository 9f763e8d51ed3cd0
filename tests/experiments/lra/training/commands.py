"""The command of experiments.train in processes of its own, alone or under torchrun."""

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from experiments.lra.training import checkpoint
from tests.experiments.lra.training.cases import overrides, settings, train

ROOT = Path(__file__).resolve().parents[4]
ENVIRONMENT = os.environ | {"OMP_NUM_THREADS": "1", "TRITON_INTERPRET": "0"}
MODULE = ["-m", "experiments.train"]


def start(given: Sequence[str], launcher: Sequence[str] = (sys.executable,)) -> subprocess.Popen:
    return subprocess.Popen(
        [*launcher, *MODULE, *given], cwd=ROOT, env=ENVIRONMENT, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip


def finish(process: subprocess.Popen, code: int = 0) -> str:
    out, err = process.communicate(timeout=240)
    assert process.returncode == code, err
    return out + err


def journal(folder: Path) -> list[dict]:
    path = folder / "journal.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    return [json.loads(line) for line in lines if line.endswith("}")]


def assert_processes_train_as_one(
    place: Path, count: int, task: str, attention: str, **changes: object
) -> None:
    """A few steps without dropout in this process, and in `count` of torchrun: the same weights,
    losses and accuracy."""
    still = {"model__dropout": 0, "model__attention_dropout": 0, "steps": 6, "lr": 1e-3}
    changes = still | changes
    train(place, task, attention, **changes)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(count)]
    torchrun += ["--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0"]
    told = finish(start([*overrides(place, task, attention, **changes), "name=many"], torchrun))
    assert told.count("test accuracy") == 1  # only the first process speaks
    folders = [settings(place, task, attention, **changes, name=n).folder for n in (None, "many")]
    one, many = (checkpoint.load(folder / "checkpoint.pt") for folder in folders)
    for name, weights in one["model"].items():
        torch.testing.assert_close(many["model"][name], weights, rtol=1e-3, atol=1e-5)
    assert len(many["random"]) == count
    results = [json.loads((folder / "result.json").read_text()) for folder in folders]
    assert results[1]["processes"] == count
    assert results[0]["accuracy"] == results[1]["accuracy"]
    assert results[0]["loss"] == pytest.approx(results[1]["loss"], rel=1e-4)
    ours, theirs = (
        [x["loss"] for x in journal(folder) if x["kind"] == "train"] for folder in folders
    )
    assert ours == pytest.approx(theirs, rel=1e-4)
