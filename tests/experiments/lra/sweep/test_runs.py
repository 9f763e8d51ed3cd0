"""The runs of a sweep."""

from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf

from experiments.lra.sweep.runs import sweep_runs

SWEEPS = Path(__file__).resolve().parents[4] / "experiments/conf/sweep"


def test_a_chain_for_every_seed(tmp_path):
    runs = sweep_runs(
        {
            "common": ["attention=linear", f"runs={tmp_path}", "device=cpu"],
            "runs": {
                "easy": {"with": ["task=pathfinder32"]},
                "hard": {"with": ["task=pathfinder64"], "after": "easy"},
            },
        },
        ["seed=3,4"],
    )
    assert [run.name for run in runs] == ["easy/3", "easy/4", "hard/3", "hard/4"]
    assert [run.after for run in runs] == [None, None, *runs[:2]]
    assert runs[3].settings.init_from == str(runs[1].settings.folder)
    assert runs[3].settings.seed == 4 and "seed4" in str(runs[3].settings.folder)
    assert runs[0].data == runs[1].data != runs[2].data


def test_all_begin_from_the_only_one_and_the_last_value_counts(tmp_path):
    mask = "mask='(local:8|butterfly)&causal',local:128+butterfly"
    runs = sweep_runs(
        {
            "common": ["task=image", "batch=2", f"runs={tmp_path}", "device=cpu"],
            "runs": {
                "first": {"with": ["batch=4"]},
                "then": {"with": ["attention=sparse", mask, "seed=1,2"], "after": "first"},
            },
        },
        ["batch=8"],
    )
    assert [run.settings.batch for run in runs] == [8] * 5
    assert [run.settings.seed for run in runs[1:]] == [1, 2] * 2
    assert [run.name for run in runs[1::2]] == [
        "then/(local:8|butterfly)&causal/1",
        "then/local:128+butterfly/1",
    ]
    found = [run.settings.mask for run in runs[1:]]
    assert found == ["(local:8|butterfly)&causal"] * 2 + ["local:128+butterfly"] * 2
    assert all(run.after is runs[0] for run in runs[1:])


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        ({}, "but this one has no runs"),
        (["a"], "but this one has no runs"),
        ({"a": "seed=1"}, "sweep, a: 'seed=1' is not {with: "),
        ({"a": {"with": "seed=1"}}, "sweep, a, with: 'seed=1' is not a list of texts"),
        ({"a": {"with": [{"seed": 1}]}}, "sweep, a, with: .* is not a list of texts"),
        ({"a": {"wiht": ["seed=1"]}}, "sweep, a: .*wiht.* is not {with: "),
        ({"a": {"after": "b"}}, "sweep, a: after: b is not an entry above it"),
        ({"a": {"with": ["task=chess"]}}, "sweep, a: task='chess': choose from files, "),
        ({"a": {"with": ["bacth=3"]}}, "sweep, a: option='bacth': .*mean batch"),
        ({"a": {"with": ["batch=0"]}}, "sweep, a: batch=0: give a whole number"),
        ({"a": {"with": ["batch=[3"]}}, "sweep, a: "),
        (
            {"a": {"with": ["hydra.callbacks.a._target_=os.getcwd"]}},
            "a: hydra.callbacks.a.*settings",
        ),
        ({"a": {"with": ["hydra/launcher=basic"]}}, "a: hydra/launcher=basic: give settings"),
        ({"a": {"with": ["task@hydra.x=listops"]}}, "a: task@hydra.x=listops: give settings"),
        ({"a": {"with": ["++seed=1"]}}, r"a: \+\+seed=1: give settings"),
        ({"a": {"with": ["+recipe/x=../../evil"]}}, r"a: \+recipe/x=../../evil: give settings"),
        ({"a": {"with": ["task=../../evil"]}}, "a: task='../../evil': choose from files, "),
        ({"a": {"with": ["name=../../evil task=${name}"]}}, "sweep, a: "),
        ({"a": {"with": ["task=${name}"]}}, "a: task=.*{name}': choose from files, "),
        ({"a": {"with": ["seed=range(1000000000)"]}}, "sweep, a: .* more than 10,000 runs"),
        ({"a": {"with": [f"betas={'[' * 5000}"]}}, "sweep, a: "),
        ({"a": {}, "b": {}}, "a and b would share the folder .*name="),
        (
            {
                "a": {"with": ["seed=1,2", "batch=4,8"]},
                "b": {"with": ["batch=4,8", "seed=1,2", "name=b"], "after": "a"},
            },
            "b: .* would start from .* of a: give the lists in the order of a",
        ),
        (
            {"a": {"with": ["seed=1,2"]}, "b": {"with": ["seed=3,4,5"], "after": "a"}},
            "sweep, b: 3 runs cannot start from the 2 of a",
        ),
    ],
)
def test_a_wrong_sweep(entries, message):
    with pytest.raises(ValueError, match=message):
        sweep_runs({"common": ["device=cpu"], "runs": entries})
    with pytest.raises(ValueError, match="but this one has run"):
        sweep_runs({"run": {}})


@pytest.mark.slow
def test_the_sweeps_that_come_with_it():
    """The sweep of the arena has a test with its order, those of masks one with their study."""
    found = {}
    for path in SWEEPS.glob("*.yaml"):
        if path.stem in ("lra", "path_masks", "path_x_masks"):
            continue
        sweep: Any = OmegaConf.to_container(OmegaConf.load(path))
        found[path.stem] = sweep_runs(sweep, ["device=cpu"])
    counts = {name: len(runs) for name, runs in found.items()}
    paths = {"path_x": 5, "path_x_gaps": 7, "path_256": 11}
    others = {
        "files": 24,
        "files_small": 6,
        "imdb_whole": 12,
        "spt": 2,
        "spt_causal": 2,
        "spt_short": 24,
        "spt_text": 6,
        "spt_listops": 6,
        "listops_long": 9,
        "spt_text_short": 6,
        "spt_image": 6,
        "spt_pathfinder": 14,
        "spt_pathfinder_2d": 4,
        "spt_path_x": 6,
    }
    assert counts == paths | others
    for name, causal in (("spt", False), ("spt_causal", True)):
        first, second = (run.settings for run in found[name])
        assert first.pretrain and second.pretrain is None and second.init_from == str(first.folder)
        assert first.model["causal"] == second.model["causal"] == (causal or None)
    short = {run.name: run.settings for run in found["spt_short"]}
    for task, attention in product(("listops", "text", "image", "pathfinder"), ("flash", "sparse")):
        tokens, classes, scratch = (
            short[f"{task}{what}/{attention}"] for what in ("-tokens", "", "-scratch")
        )
        assert tokens.pretrain and classes.init_from == str(tokens.folder)
        assert replace(classes, init_from=None, name="scratch") == scratch
    tokens, *longer = (run.settings for run in found["spt_pathfinder"] if "flash" in run.name)
    assert tokens == short["pathfinder-tokens/flash"]
    assert longer[0].init_from == str(tokens.folder) and longer[3].init_from is None
    for trained, scratch in zip(longer[:3], longer[3:], strict=True):
        same = {"init_from": None, "name": None}
        assert replace(trained, **same) == replace(scratch, **same)
    assert {run.settings.model["pool"] for run in found["path_x"]} == {"max"}
