"""Training where processes share every sequence: the numbers of one process."""

import os
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from experiments.lm import run as lm_run
from experiments.lra import run as lra_run
from experiments.training import run_file, state
from tests.experiments.lra.training import cases
from tests.experiments.lra.training.cases import journal, write_data
from tests.processes import on_ranks

RUNS = {"lm": lm_run.train, "lra": lra_run.train}


def run(rank: int, world: int, runs: list[tuple[str, Any]]) -> None:
    os.environ.update(WORLD_SIZE=str(world), RANK=str(rank))
    for kind, given in runs:
        RUNS[kind](given)


def compare(runs: list[tuple[str, Any]], world: int, alone: int = 0) -> None:
    """Train each run in this process, and in `world` of which two share a sequence, but for the
    last `alone` runs: there each process has sequences of its own."""
    many = [
        (kind, replace(each, name="many", context_parallel=1 + (i < len(runs) - alone)))
        for i, (kind, each) in enumerate(runs)
    ]
    for kind, each in runs:
        RUNS[kind](each)
    on_ranks(world, run, many)
    for (_, one), (_, shared) in zip(runs, many, strict=True):
        assert_equal(one.folder, shared.folder)


def assert_equal(one, many):
    first, second = (state.load(folder / "checkpoint.pt") for folder in (one, many))
    for name, weights in first["model"].items():
        torch.testing.assert_close(second["model"][name], weights, rtol=1e-3, atol=1e-5)
    results: Any = [run_file.read(folder) for folder in (one, many)]
    assert results[0]["density"] == results[1]["density"]
    own = {each["cpu"].numpy().tobytes() for each in second["random"]}  # dropout is not repeated
    assert len(own) == results[1]["sessions"][-1]["processes"] > 1
    for name in ("val_loss", "loss", "accuracy", "correct", "positions"):
        a, b = (found["result"].get(name) for found in results)
        assert a == b or np.allclose(a, b, rtol=1e-5, atol=1e-5), name
    for name in ("loss", "grad_norm"):
        a, b = ([x[name] for x in journal(f) if x["kind"] == "train"] for f in (one, many))
        assert len(a) == len(b) > 4 and np.allclose(a, b, rtol=1e-5, atol=0), (one, name)


@pytest.fixture
def language(settings):
    """Settings of a language model of a moment, with changes."""
    usual = {"context": 64, "steps": 6, "val_tokens": 128, "log_every": 1, "eval_every": 3}
    return lambda **changes: settings(**usual | {"name": "one"} | changes)


def test_language_models(language):
    mlp = {"mlp": "butterfly(16)", "mlp_block": 16, "mlp_rank": 2}
    runs = [language(mask="local:16", positions="rotary", **mlp), language(packed=True)]
    compare([("lm", each) for each in runs], 4)


@pytest.fixture
def classifier(tmp_path):
    """Settings of a classifier of a moment, with changes."""
    (tmp_path / "data").mkdir()
    write_data(tmp_path / "data")
    still: Any = {"model__dropout": 0, "model__attention_dropout": 0, "steps": 6, "name": "one"}
    return lambda *names, **changes: cases.settings(tmp_path, *names, **still | changes)


def test_classifiers_and_masked_tokens(classifier):
    lra = [
        classifier("listops", "sparse", model__layers=2),  # padded
        classifier("image", "sparse", recipe="rotary"),
        classifier("retrieval", "flash", model__pool="cls"),
        classifier("listops", "sparse", pretrain="masked"),
        classifier("text", "linear", lr=1e-3),
    ]
    compare([("lra", each) for each in lra], 2, alone=1)


@pytest.mark.parametrize("kind", RUNS)
def test_more_processes_continue_a_run(kind, language, classifier, interrupted):
    if kind == "lm":
        whole = language(checkpoint_every=3)
    else:  # they hide the same tokens
        saved: Any = {"checkpoint_every": 3, "eval_every": 3}
        whole = classifier("listops", "sparse", pretrain="masked", **saved)
    RUNS[kind](whole)
    part = replace(whole, name="part")
    interrupted(RUNS[kind], part)
    on_ranks(2, run, [(kind, replace(part, context_parallel=2))])
    assert_equal(whole.folder, part.folder)


def test_refusals(language):
    with pytest.raises(ValueError, match=r"context_parallel=2.*1 processes"):
        lm_run.train(language(context_parallel=2))
    for changes in ({"provider": "sdpa"}, {"mask": "moba(32, 1)"}, {"compile": True}):
        with pytest.raises(ValueError, match=r"context_parallel=2"):
            replace(language(), context_parallel=2, **changes)
