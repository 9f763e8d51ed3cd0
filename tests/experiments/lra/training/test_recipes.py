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
    names = task, "sparse" if pretrain == "causal" else "local"
    assert_resumes(*names, name=pretrain, pretrain=pretrain, **changes)
    pre = ran(*names, name=pretrain, pretrain=pretrain, **changes)
    assert pre.result["pretrain"] == pretrain
    if pretrain == "causal":
        assert pre.result["mask"].endswith("causal()")
        with pytest.raises(ValueError, match=r"init_from=.*: give model\.causal=true, as there"):
            ran(*names, name="new", recipe="rotary", init_from=pre.folder)
    changes |= {"init_from": pre.folder, "lr": 1e-12, "seed": 1}
    after = ran(*names, name=f"after-{pretrain}", **changes)
    assert after.result["init_from"] == str(pre.folder)
    before, begun = pre.state["best"]["model"], after.state["model"]
    for name, weights in before.items():
        if not name.startswith(("head.", "lm_head.", "hidden_token")):
            torch.testing.assert_close(begun[name], weights, rtol=0, atol=1e-9)
    assert not torch.equal(begun["head.0.weight"], before["head.0.weight"])
