"""Settings: recipes, the small scale, folders, values that are refused, and --help."""

import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
from hydra.errors import HydraException

import experiments.conf
from experiments.common.config import help_rows, words
from experiments.lra.models.attention import KINDS
from experiments.lra.settings import Settings, compose_settings
from experiments.lra.tasks.task import TASKS
from tests.experiments.lra.training.cases import overrides
from tests.processes import ROOT

CONF = Path(experiments.conf.__path__[0])
CHOICES = {group: sorted(p.stem for p in (CONF / group).glob("*.yaml")) for group in
           ("task", "attention", "recipe")}  # fmt: skip


def settings(*given):
    return compose_settings(given)


def test_recipes_have_settings_for_tasks():
    """Each recipe for some tasks, and for those that it does not name; each task with one."""
    assert CHOICES["attention"] == sorted(KINDS)
    assert {*CHOICES["task"]} == {*TASKS, "text4k", "text_held_out"}
    for number, task in enumerate(CHOICES["task"]):
        recipe = CHOICES["recipe"][number % len(CHOICES["recipe"])]
        given = [f"task={task}", f"recipe={recipe}"]
        full, small = (settings(*given, f"scale={scale}") for scale in ("full", "small"))
        assert not full.scaled and full.eval_every <= full.steps, given
        assert small.steps < full.steps and small.batch <= full.batch, given
        assert small.folder != full.folder and small.identity() != full.identity(), given
    for recipe in CHOICES["recipe"]:
        other = settings("task=listops", "task.name=mine", f"recipe={recipe}", "scale=full")
        assert other.batch == 32 and other.steps > Settings.steps, recipe


def test_small_is_for_a_cpu_and_what_is_given_comes_before_it_and_the_recipe(monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    auto = settings("task=listops", "steps=77", "task.max_length=300")
    assert auto.scale == "small" and auto.precision == "fp32" and not auto.graph
    assert auto.steps == 77 and auto.task["max_length"] == 300 and auto.task["generate"]
    assert auto.scaled["task.generate"] == [False, True]
    given = settings("task=image", "recipe=google", "scale=full", "lr=3", "model.dim=16")
    assert (given.lr, given.model.dim) == (3, 16) and not given.scaled
    assert (given.batch, given.model.layers, given.model.setting) == (256, 1, "google")


def test_folders_tell_runs_apart():
    def folder(*given):
        return settings("task=image", "scale=full", *given).folder.as_posix()

    assert folder("attention=local", "seed=3", "name=try") == "runs/train/image/local-try/seed3"
    assert folder("attention=reformer", "attention.scale=1").endswith("/reformer-scale-1/seed0")
    assert "/linear-black-padding/" in folder("attention=linear", "task.pad_black=true")
    masked = folder("mask=local:256+butterfly")
    assert masked.startswith("runs/train/image/sparse-local-256-butterfly-")
    assert folder("mask=local:256*butterfly") != masked
    assert "image-masked/" in folder("pretrain=masked")


def test_the_identity_is_what_changes_the_result():
    def digest(*given):
        return repr(settings("task=image", *given).identity())

    free = ("minutes=3", "micro_batch=2", "log_every=7", "runs=x", "compile=false")
    default = digest()
    assert all(digest(one) == default for one in free)
    bound = ("steps=7", "lr=1", "seed=1", "task.order=hilbert", "model.dim=32", "attention=local")
    assert len({digest(one) for one in bound} | {default}) == 1 + len(bound)


REFUSED = {
    "steps=-1": "steps=-1: .*at least 0",
    "model.layers=x": "model.layers=x: .*Integer",
    "model.positions=waves": "positions=waves takes images",
    "model.layer=3": "model.layer.*did you mean model.layers",
    "task.limt=3": "did you mean task.limit",
    "betas=[0.9,2]": r"betas=\[0.9, 2.0\]: .*below 1",
    "compile=maybe": "compile='maybe': choose from True, False",
    "scale=smal": r"scale='smal': choose from .*\(did you mean small\?\)",
    "init_head=fresh": "init_head=fresh needs init_from=FOLDER",
    "micro_batch=7": "micro_batch=7 does not divide batch=",
    "mask=loca:256": "loca.*local",
    "task=chess": "task/chess",
    "attention=linear mask=local:9": "mask=local:9 is for attention=sparse; linear takes none",
}


def test_bad_values_are_refused_in_one_line_that_names_them():
    known = [text.partition("=")[0] for text, _ in help_rows(Settings)]
    for given, expected in REFUSED.items():
        with pytest.raises((ValueError, HydraException)) as caught:
            settings("task=listops", "device=cpu", *given.split())
        error = caught.value
        text = words(error, known) if isinstance(error, HydraException) else str(error)
        assert re.search(expected, text), (given, text)
        assert "\n" not in text or "mask" in given, text  # a mask shows the place


def test_help_describes_every_option_and_is_quick():
    command = [sys.executable, "-X", "importtime", "-m", "experiments.train", "--help"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0
    for option in ("steps=", "model.layers=", "mask=", "pretrain=", "task=listops"):
        line = next(x for x in done.stdout.splitlines() if x.strip().startswith(option))
        assert len(line.split()) > 2, line
    assert "torch._dynamo" not in done.stderr


MINE = {
    "task/mine.yaml": "# @package _global_\ntask: { name: mine, n: 8 }\neval_every: 2\nsmall: {}\n",
    "attention/mine.yaml": "name: mine\nshift: 1\n",
    "recipe/mine.yaml": (
        "# @package _global_\nrecipe: mine\nlr: 1e-2\n"
        "by_task: { default: { steps: 2, batch: 4 } }\n"
    ),
    "own.py": """
import numpy as np
from experiments.lra.models.attention.base import Attention
from experiments.lra.models.attention.base import register
from experiments.lra.tasks.task import task
from experiments.lra.tasks.task import Split, Task

@register("mine", label="mine", style=("#000000", "o", "-"))
class Mine(Attention):
    def __init__(self, *, shift: int | None = None, **sizes):
        super().__init__(**sizes)
        self.shift = shift
    def attend(self, q, k, v, lengths):
        return v.roll(self.shift, 2)

@task("mine")
def load(data_dir, *, cache_dir, seed, n):
    rng = np.random.default_rng(seed)
    tokens = rng.integers(1, 5, (n, 16)).astype(np.uint8)
    split = Split(tokens, (tokens[:, 0] > 2).astype(np.int64))
    return Task("mine", "made here", 2, 5, dict.fromkeys(("train", "val", "test"), split))
""",
}


def test_a_task_an_attention_and_a_recipe_of_ones_own(tmp_path, capsys, monkeypatch):
    for name, text in MINE.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    given = [x for x in overrides(tmp_path, "mine", "mine", recipe="mine") if "val_ex" not in x]
    monkeypatch.setattr(sys, "path", [*sys.path])

    def run(module, *words):
        monkeypatch.setattr(sys, "argv", [module, "--config-dir", str(tmp_path), *words])
        runpy.run_module(module, run_name="__main__")
        return capsys.readouterr().out

    try:
        run("experiments.train", *given, "device=cpu")
        (found,) = (tmp_path / "runs").rglob("run.json")
        told = run("experiments.evaluate", f"run={found.parent}", "device=cpu")
        assert "mine (made here), mine attention" in told
    finally:
        for registered in (TASKS, KINDS, sys.modules):
            for name in ("mine", "own"):
                registered.pop(name, None)
