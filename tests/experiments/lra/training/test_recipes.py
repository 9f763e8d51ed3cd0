"""Every recipe with every kind of task: a few steps, the same bits after a kill, and pretraining
first.
"""

from itertools import cycle
from pathlib import Path

import pytest
import torch

import experiments.conf
from tests.experiments.lra.training.cases import KINDS, MORE, TASKS

RECIPES = sorted(p.stem for p in (Path(experiments.conf.__path__[0]) / "recipe").glob("*.yaml"))
LARGE = "pathfinder128", "pathfinder256"  # the tests of the loop train them
OTHERS = [task for task in (*TASKS, *MORE) if task not in (*KINDS, *LARGE)]  # only other data
PRETRAINED = "text", "imdb_same_movie", "pathfinder32", "files"  # tokens of every sort


def each_with_some(further, values):
    """Kinds with every value; further tasks with one value each."""
    return [
        *((task, value) for task in KINDS for value in values),
        *zip(further, cycle(values), strict=False),
    ]


@pytest.mark.parametrize(("task", "recipe"), each_with_some(OTHERS, RECIPES))
def test_every_task_and_recipe_trains_and_resumes(assert_resumes, task, recipe):
    assert_resumes(task, "linear", recipe=recipe)


@pytest.mark.parametrize(("task", "pretrain"), each_with_some(PRETRAINED, ["masked", "causal"]))
def test_tasks_of_every_kind_pretrain_and_resume(assert_resumes, ran, task, pretrain):
    changes = {"recipe": "rotary", "model__causal": pretrain == "causal"}
    assert_resumes(task, "local", name=pretrain, pretrain=pretrain, **changes)
    pre = ran(task, "local", name=pretrain, pretrain=pretrain, **changes)
    after = ran(task, "local", name=f"after-{pretrain}", init_from=pre.folder, lr=1e-12, **changes)
    begun = after.state["model"]
    for name, weights in pre.state["best"]["model"].items():
        if not name.startswith(("head.", "lm_head.", "hidden_token")):
            torch.testing.assert_close(begun[name], weights, rtol=0, atol=1e-9)
