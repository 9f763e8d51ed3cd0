"""Activation memory: peaks follow the formula, and the gate knows rounding from a fault."""

from dataclasses import replace

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from experiments.bench.gate import WrongResult
from experiments.studies import memory
from experiments.studies.memory import NAMES, Case, peak_mib
from sparseflash.testing import make_qkv, oracle, relative_error

CPU = torch.device("cpu")
SMALL = Case("ours", "none", 2, 96, 32, 80, 4, 4, "float32")


@pytest.mark.parametrize("kind", NAMES)
def test_a_further_layer_adds_what_the_formula_says(kind):
    case = replace(SMALL, attention=kind[0], checkpoint=kind[1])
    low, high = (peak_mib(memory._step(case, layers, CPU), CPU) * 2**20 for layers in (2, 4))
    unit = 2 * 96 * 32 * 4  # torch's norm keeps two more on a CPU
    more = 0 if case.checkpoint != "none" else 3 * unit
    assert -1024 <= (high - low) / 2 - case.layer_bytes() <= more + 1024  # a few scalars


def test_selective_checkpointing_runs_attention_once():
    calls, run = [], torch.ops.sparseflash.forward.default

    class Count(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            calls.append(func is run)
            return func(*args, **(kwargs or {}))

    for checkpoint, count in (("layers", 4), ("selective", 2)):
        step = memory._step(replace(SMALL, checkpoint=checkpoint), 2, CPU)
        calls.clear()
        with Count():
            step()
        assert sum(calls) == count


def test_standard_attention_is_right():
    q, k, v = make_qkv(2, 2, 40, 40, 16, requires_grad=True, dtype=torch.float64)
    out = memory.standard_attention(q, k, v)
    expected, _ = oracle(q, k, v, torch.ones(40, 40, dtype=torch.bool).tril())
    grads = (torch.autograd.grad(o.sin().sum(), (q, k, v)) for o in (out, expected))
    for a, b in [(out, expected), *zip(*grads, strict=True)]:
        assert relative_error(a, b) < 1e-12


def test_the_peak_is_of_what_is_held_at_once():
    def step():
        a = torch.ones(100_000)
        b = a + 1
        del a
        return b.view(10, -1) * 2

    assert peak_mib(step, CPU) * 2**20 == pytest.approx(800_000, rel=1e-3)


def test_the_gate_knows_rounding_from_a_fault(monkeypatch):
    case = Case("ours", "none", 1, 64, 512, 64, 4, 2, "bfloat16")
    memory.check_result(case, CPU)
    right = memory.sparseflash.attention  # without its mask below
    monkeypatch.setattr(memory.sparseflash, "attention", lambda q, k, v, mask: right(q, k, v))
    with pytest.raises(WrongResult, match="wrong result: error"):
        memory.check_result(case, CPU)
