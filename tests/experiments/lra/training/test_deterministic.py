"""Runs with deterministic=true, whose sums have the same order in every run."""

import os
from pathlib import Path

import pytest
import torch
from omegaconf import OmegaConf

from experiments.lra.models.attention import NAMES as ATTENTIONS
from experiments.lra.training.config import read_settings
from experiments.lra.training.device import same_bits
from experiments.lra.training.step import Trainer
from tests.experiments.lra.training.cases import settings


def modes():
    fill = torch.utils.deterministic.fill_uninitialized_memory
    return torch.are_deterministic_algorithms_enabled(), fill


@pytest.mark.parametrize("error", [None, KeyError])
def test_torch_is_set_to_it_inside_alone(error, monkeypatch):
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    with same_bits(False):
        assert modes() == (False, True)
    with pytest.raises(error) if error else same_bits(False), same_bits(True):
        assert modes() == (True, False)
        assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"
        if error:
            raise error
    assert modes() == (False, True)


@pytest.mark.parametrize("attention", ATTENTIONS)
def test_every_attention_trains_so(attention, ran, monkeypatch):
    seen, body = [], Trainer._body

    def noted(trainer):
        seen.append(modes())
        body(trainer)

    monkeypatch.setattr(Trainer, "_body", noted)
    ran(attention=attention, name="deterministic", deterministic="true", steps=2, eval_every=2)
    assert set(seen) == {(True, False)}
    assert modes() == (False, True)


def test_a_run_from_before_the_option_is_read_and_goes_on(tmp_path):
    run = settings(tmp_path, deterministic="true")
    assert run.deterministic and run.identity() == settings(tmp_path).identity()
    values = run.values()
    del values["deterministic"]
    path = Path(tmp_path, "config.yaml")
    OmegaConf.save(values, path)
    assert read_settings(path) == settings(tmp_path)
