"""Activation memory: peaks follow the formula, and the gate knows rounding from a fault."""

from dataclasses import replace

import pytest
import torch

from experiments.bench.gate import WrongResult
from experiments.common.rows import frame
from experiments.studies import memory
from experiments.studies.memory import LAYERS, NAMES, Case, LiveBytes, peak_mib
from sparseflash.testing import make_qkv, oracle, relative_error

CPU = torch.device("cpu")
SMALL = Case("ours", "none", 2, 96, 32, 80, 4, 4, "float32")


@pytest.mark.parametrize("kind", NAMES)
def test_a_further_layer_adds_what_the_formula_says(kind):
    case = replace(SMALL, attention=kind[0], checkpoint=kind[1])
    low, high = (peak_mib(memory._step(case, layers, CPU), CPU) * 2**20 for layers in (2, 4))
    unit = 2 * 96 * 32 * 4  # torch's norm keeps two more on a CPU
    more = 0 if case.checkpoint != "none" else 3 * unit
    assert 0 <= (high - low) / 2 - case.layer_bytes() <= more


def test_selective_checkpointing_runs_attention_once():
    calls, run = [], torch.ops.sparseflash.forward.default

    class Count(LiveBytes):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            calls.append(func is run)
            return super().__torch_dispatch__(func, types, args, kwargs)

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


def test_live_bytes_follow_storages():
    def step():
        a = torch.ones(1000)
        b = a + 1
        del a
        return b.view(10, 100) * 2

    assert peak_mib(step, CPU) * 2**20 == 8000
    before = [torch.ones(1000) for _ in range(20)]
    # a storage is counted where another was released
    assert peak_mib(lambda: [before.pop() + 1 for _ in range(20)], CPU) * 2**20 == 20 * 4000


def test_the_gate_knows_rounding_from_a_fault(monkeypatch):
    case = Case("ours", "none", 1, 64, 512, 64, 4, 2, "bfloat16")
    memory.check_result(case, CPU)
    right = memory.sparseflash.attention  # without its mask below
    monkeypatch.setattr(memory.sparseflash, "attention", lambda q, k, v, mask: right(q, k, v))
    with pytest.raises(WrongResult, match="wrong result: error"):
        memory.check_result(case, CPU)


def test_rows_tables_and_figure(measured):
    rows = measured("memory", "lengths=[32,64]", "dim=32", "hidden=48", "heads=2")
    for row in rows:
        scaled = (row.peak_mib + (LAYERS - 4) * row.layer_mib) * 2**20 / 1e9
        assert row.scaled_gb == pytest.approx(scaled, rel=1e-4)
    other = rows[0] | {"batch": 7, "peak_mib": 777.0}
    assert "777" not in str(memory.tables(frame([other, *rows])))
