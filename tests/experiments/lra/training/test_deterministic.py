"""Runs with deterministic=true, whose sums have the same order in every run."""

import os

import pytest
import torch

from experiments.lra.models.attention import NAMES as ATTENTIONS
from experiments.training.device import same_bits
from experiments.training.step import Trainer


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


def test_what_was_set_before_is_set_again():
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        with same_bits(True):
            assert torch.get_deterministic_debug_mode() == 2
        assert torch.is_deterministic_algorithms_warn_only_enabled()
    finally:
        torch.use_deterministic_algorithms(False)


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
