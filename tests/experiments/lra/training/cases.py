"""Runs of experiments.train that take a moment: small official-format data, tiny settings."""

import json
from dataclasses import replace
from functools import cache
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import torch

from experiments.lra import run as loop
from experiments.lra.settings import Settings, compose_settings
from experiments.training import run_file
from experiments.training import state as checkpoint
from experiments.training.step import Trainer
from tests.processes import on_ranks

TINY = {
    "scale": "full", "batch": 4, "steps": 4, "warmup": 1, "lr": 1e-2, "log_every": 1,
    "model.layers": 1, "model.dim": 16, "model.heads": 2, "model.head_dim": 8, "model.mlp_dim": 16,
    "eval_every": 2, "val_examples": 6, "checkpoint_every": 2,
}  # fmt: skip
GENERATED = {"task.generate": "true", "task.examples": "[24,6,6]"}
TASKS = {  # what makes each task tiny
    "listops": GENERATED | {"task.max_length": 64},
    "text": {"task.max_length": 60},
    "retrieval": {"task.max_length": 60},
    "imdb_same_movie": {"task.max_length": 60, "task.examples": "[24,8,8]"},
    "image": {"batch": 2, "val_examples": 3},
    "pathfinder32": GENERATED | {"task.difficulty": 6, "batch": 2, "val_examples": 3},
}

SHORT = {"task.max_length": 60}
FEW = GENERATED | {"task.examples": "[2,1,1]", "batch": 1, "val_examples": 1}
MORE = {  # the other files of conf/task
    "text4k": SHORT,
    "text_held_out": SHORT,
    "files": {"task.length": 60, "task.per_label": 24},
    **dict.fromkeys(("pathfinder64", "pathfinder128", "pathfinder256"), FEW),
}


def overrides(place: Path, task: str, attention: str, **changes: object) -> list[str]:
    """The command line of a tiny run whose files are all below `place`."""
    places = {"runs": place / "runs", "data_dir": place / "data", "cache_dir": place / "cache"}
    values = {"task": task, "attention": attention} | TINY | (TASKS | MORE).get(task, {}) | places
    if task == "files":
        values["task.folder"] = place / "data" / "documents"
    values |= {name.replace("__", "."): value for name, value in changes.items()}
    return [f"{name}={'null' if value is None else value}" for name, value in values.items()]


def settings(place: Path, task: str = "listops", attention: str = "linear", **changes) -> Settings:
    name = changes.pop("name", None)
    given = tuple(overrides(place, task, attention, **changes))
    return replace(composed(given), name=name)


composed = cache(compose_settings)  # Hydra takes longer over a command line than a tiny run


def train(place: Path, *names: str, **changes) -> dict:
    return loop.train(settings(place, *names, **changes))


class Killed(BaseException):
    """What a kill looks like from inside."""


def killed_at(step: int, place: Path, *names: str, **changes) -> None:
    """Train a run that ends after so many steps, with nothing written any more."""
    advance = Trainer.advance

    def fails(trainer):
        if trainer.step == step:
            raise Killed
        advance(trainer)

    with mock.patch.object(Trainer, "advance", fails), pytest.raises(Killed):
        train(place, *names, **changes)


class Trained:
    """A run of `train`: what is in its folder. `result` has its keys and those of its result."""

    def __init__(self, place: Path, *names: str, **changes: object):
        train(place, *names, **changes)
        self.folder = settings(place, *names, **changes).folder
        self._read()

    @classmethod
    def at(cls, folder: Path) -> "Trained":
        """A run that another process made."""
        run = cls.__new__(cls)
        run.folder = folder
        run._read()
        return run

    def _read(self) -> None:
        self.file = run_file.read(self.folder) or {}
        self.result = self.file | (self.file["result"] or {})

    @property
    def state(self) -> dict:
        return checkpoint.load(self.folder / "checkpoint.pt")

    @property
    def journal(self) -> list[dict]:
        return journal(self.folder)


def journal(folder: Path) -> list[dict]:
    path = folder / "journal.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    return [json.loads(line) for line in lines if line.endswith("}")]


def assert_same(a: object, b: object) -> None:
    """Two states hold the same bits."""
    torch.testing.assert_close(a, b, rtol=0, atol=0)


# ---- data in the official formats


def write_data(folder: Path) -> None:
    """aclImdb, tsv_data, cifar10_gray.npz and documents of a few examples each."""
    rng = np.random.default_rng(0)
    words = "the a film plot good bad great dull actor scene never again".split()

    def text(n: int) -> str:
        return " ".join(rng.choice(words, n))

    for first, half in enumerate(("train", "test")):
        for mood, ratings in (("neg", (1, 4)), ("pos", (7, 10))):
            place = folder / "aclImdb" / half / mood
            place.mkdir(parents=True)
            for i in range(24):
                (place / f"{i}_{rng.choice(ratings)}.txt").write_text(text(8))
            movies = [1000 * first + i // 4 for i in range(24)]
            urls = [f"http://www.imdb.com/title/tt{movie:07}/usercomments" for movie in movies]
            (place.parent / f"urls_{mood}.txt").write_text("\n".join(urls) + "\n")
    for label in ("apple", "pear"):
        place = folder / "documents" / label
        place.mkdir(parents=True)
        for i in range(24):
            (place / f"{i}.txt").write_text(" ".join(f"{label}{n}" for n in rng.choice(1000, 80)))
    pairs = folder / "tsv_data"
    pairs.mkdir()
    for split in ("train", "eval", "test"):
        rows = [f"{i % 2}.0\t{i}\t{i + 1}\t{text(9)}\t{text(7)}" for i in range(16)]
        (pairs / f"new_aan_pairs.{split}.tsv").write_text("\n".join(rows) + "\n")
    arrays = {}
    for split, n in (("train", 40), ("test", 5)):
        arrays[f"x_{split}"] = rng.integers(0, 256, (n, 32, 32), dtype=np.uint8)
        arrays[f"y_{split}"] = (np.arange(n) % 10).astype(np.uint8)
    np.savez(folder / "cifar10_gray.npz", **arrays)


def train_on(rank: int, world: int, place: Path, names: tuple, changes: dict) -> None:
    train(place, *names, **changes)


def assert_processes_train_as_one(
    place: Path, count: int, task: str, attention: str, **changes: object
) -> None:
    """A few steps without dropout in this process, and in `count`: the same weights, losses, norms
    of the gradient and accuracy."""
    still = {"model__dropout": 0, "model__attention_dropout": 0, "steps": 6, "lr": 1e-3}
    changes = still | changes
    one = Trained(place, task, attention, **changes)
    changes["name"] = "many"
    on_ranks(count, train_on, place, (task, attention), changes, group=False)
    many = Trained.at(settings(place, task, attention, **changes).folder)
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
