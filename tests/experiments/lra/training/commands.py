"""The command of experiments.train in processes of its own, alone or under torchrun."""

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from tests.experiments.lra.training.cases import Trained, overrides, settings

ROOT = Path(__file__).resolve().parents[4]
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "TRITON_INTERPRET": "0"}
MODULE = ["-m", "experiments.train"]


def start(given: Sequence[str], launcher: Sequence[str] = (sys.executable,)) -> subprocess.Popen:
    return subprocess.Popen(
        [*launcher, *MODULE, *given], cwd=ROOT, env=os.environ | ENVIRONMENT, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip


def finish(process: subprocess.Popen, code: int = 0) -> str:
    out, err = process.communicate(timeout=1800)
    assert process.returncode == code, err
    return out + err


def assert_processes_train_as_one(
    place: Path, count: int, task: str, attention: str, **changes: object
) -> None:
    """A few steps without dropout in this process, and in `count` of torchrun: the same weights,
    losses, norms of the gradient and accuracy."""
    still = {"model__dropout": 0, "model__attention_dropout": 0, "steps": 6, "lr": 1e-3}
    changes = still | changes
    one = Trained(place, task, attention, **changes)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(count)]
    torchrun += ["--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0"]
    told = finish(start([*overrides(place, task, attention, **changes), "name=many"], torchrun))
    assert told.count("test accuracy") == 1  # only the first process speaks
    many = Trained.at(settings(place, task, attention, **changes, name="many").folder)
    state = many.state
    for name, weights in one.state["model"].items():
        torch.testing.assert_close(state["model"][name], weights, rtol=1e-3, atol=1e-5)
    assert len(state["random"]) == many.file["sessions"][0]["processes"] == count
    # a result's file has six digits
    assert many.result["accuracy"] == pytest.approx(one.result["accuracy"], abs=1e-6)
    assert many.result["correct"] == one.result["correct"]
    assert many.result["loss"] == pytest.approx(one.result["loss"], rel=1e-4)
    for name in ("loss", "grad_norm"):  # AdamW hides the scale of a gradient, clipping does not
        ours, theirs = (
            [x[name] for x in run.journal if x["kind"] == "train"] for run in (one, many)
        )
        assert ours == pytest.approx(theirs, rel=1e-4), name
