"""Padding that is skipped in the encoder: lists made once a step, under torch.compile too."""

import shutil

import numpy as np
import pytest
import torch
from torch._dynamo.utils import counters

import masks
from experiments.lra.models.classifier import Classifier, ModelConfig
from experiments.lra.run import classify
from experiments.lra.tasks.task import Split
from experiments.training.distributed import Group
from experiments.training.evaluate import DeviceSplit
from experiments.training.step import Trainer
from tests.experiments.lra.training.cases import settings

MIXED = masks.layers(masks.local(100), masks.dense(), masks.local(100))


# ---- the encoder


def classifier(
    mask="local:100+global:5", length=256, pool="mean", layers=3, **options
) -> Classifier:
    torch.manual_seed(0)
    sizes = {"layers": layers, "dim": 16, "heads": 2, "head_dim": 8, "mlp_dim": 16}
    config = ModelConfig(**sizes, dropout=0.0, attention_dropout=0.0, pool=pool)
    options = {"name": "sparse", "mask": mask, "padding": "skip", "backend": "cpu"} | options
    return Classifier(20, length, 3, model=config, attention=options)


def batch(seed=0):
    torch.manual_seed(seed)
    lengths = torch.randint(1, 257, (5,), dtype=torch.int32)
    return torch.randint(1, 20, (5, 256), dtype=torch.int16), lengths


def gradients(model, *inputs):
    parameters = [p for p in model.parameters() if p.requires_grad]
    out = model(*inputs)
    return out, *torch.autograd.grad(out.square().sum(), parameters)


def test_the_encoder_does_not_see_the_difference():
    found = [gradients(classifier(padding=how).double(), *batch()) for how in ("skip", "hide")]
    torch.testing.assert_close(*found, rtol=1e-9, atol=1e-11)


def test_the_cls_state_counts():
    """It is one more state, which makes the sequence of 127 tokens a whole block."""
    lengths = torch.tensor([127, 1, 60], dtype=torch.int32)
    skipping, hiding = (
        classifier(None, 127, "cls", name="flash", padding=how) for how in ("skip", "hide")
    )
    tokens = torch.randint(1, 20, (3, 127))
    torch.testing.assert_close(skipping(tokens, lengths), hiding(tokens, lengths))


# ---- torch.compile


def test_all_that_follows_is_one_graph(fresh_dynamo):
    """What prepares the lists is left out; no layer and no step compiles again."""
    model = classifier(MIXED)
    counters.clear()
    compiled = torch.compile(model, dynamic=False, backend="aot_eager")
    for seed in range(3):
        torch.testing.assert_close(*(gradients(m, *batch(seed)) for m in (compiled, model)))
        assert sum(counters["graph_break"].values()) == 1
        assert counters["stats"]["unique_graphs"] <= 2  # one of them before the lists


@pytest.mark.skipif(not (shutil.which("g++") or shutil.which("clang++")), reason="no C++ compiler")
def test_a_compiled_run_has_the_losses_of_the_eager_one(tmp_path, fresh_dynamo):
    lengths = np.random.default_rng(0).integers(1, 257, 16).astype(np.int32)
    tokens = np.random.default_rng(1).integers(1, 20, (16, 256)).astype(np.int16)
    split = Split(tokens, np.arange(16) % 3, lengths)
    found = []
    for compile in (True, False):
        chosen = settings(tmp_path, "listops", "sparse", batch=8, lr=1e-2, steps=6)
        model = classifier(layers=1)
        device = torch.device("cpu")
        data, group = DeviceSplit(split.arrays, device), Group(0, 1, device)
        trainer = Trainer(model, data, classify, chosen, group)
        trainer.prepare(compile=compile, graph=False)
        assert trainer.compiled == compile
        for _ in range(6):
            trainer.advance()
        found.append((trainer.read_sums(6), trainer.weights()))
    (ours, weights), (theirs, expected) = found
    assert ours == pytest.approx(theirs, rel=1e-4)
    torch.testing.assert_close(weights, expected, rtol=1e-3, atol=1e-4)
