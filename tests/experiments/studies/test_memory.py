"""Activation memory: the formula is what autograd keeps, and peaks follow the formula."""

from contextlib import nullcontext

import pytest
import torch
import torch.nn.functional as F

from experiments.bench.gate import WrongResult
from experiments.bench.step import saved_bytes
from experiments.common.rows import frame
from experiments.studies import llama, memory
from experiments.studies.llama import LiveBytes, RMSNorm, Sizes, Stack, _Rotary, peak_bytes
from experiments.studies.memory import (
    LAYERS,
    NAMES,
    Case,
)
from sparseflash.layers import Rotary
from sparseflash.testing import make_qkv, oracle, relative_error
from tests.experiments.studies.conftest import ok

CPU = torch.device("cpu")
SMALL = Sizes(batch=2, n=96, dim=32, hidden=80, heads=4, dtype="float32")


def step_of(attention: str, checkpoint: str, layers: int, sizes: Sizes = SMALL):
    torch.manual_seed(0)
    stack = Stack(sizes, attention, layers, checkpoint)
    x = torch.randn(sizes.batch, sizes.n, sizes.dim, requires_grad=True)

    def step() -> torch.Tensor:
        return torch.autograd.grad(stack(x).square().mean(), [x, *stack.parameters()])[0]

    return stack, x, step


def test_the_formula_is_what_autograd_keeps():
    for attention in ("standard", "ours"):
        stack, x, _ = step_of(attention, "none", 3)
        weights = sum(4 * p.numel() for p in stack.parameters())
        assert saved_bytes(lambda: stack(x)) - weights == 3 * SMALL.layer_bytes(attention)  # noqa: B023


@pytest.mark.parametrize("kind", NAMES)
def test_a_further_layer_adds_what_the_formula_says(kind):
    weights = sum(4 * p.numel() for p in step_of(*kind, 1)[0].parameters())
    peaks = []
    for layers in (2, 4):
        _, _, step = step_of(*kind, layers)
        gradient = step()
        peaks.append(peak_bytes(step, CPU))
        if layers == 2:
            assert relative_error(gradient, step_of("standard", "none", 2)[2]()) < 1e-5
    # the gradients of weights, which this step returns, come on top
    assert (peaks[1] - peaks[0]) / 2 == pytest.approx(SMALL.layer_bytes(*kind), abs=weights)


def test_selective_checkpointing_runs_attention_once():
    calls = []
    run = torch.ops.sparseflash.forward.default

    class Count(LiveBytes):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            calls.append(func is run)
            return super().__torch_dispatch__(func, types, args, kwargs)

    for checkpoint, count in (("layers", 4), ("selective", 2)):
        _, _, step = step_of("ours", checkpoint, 2)
        calls.clear()
        with Count():
            step()
        assert sum(calls) == count
    with pytest.raises(ValueError, match="take attention=ours"):
        Stack(SMALL, "standard", 2, "selective")


def test_attention_norm_and_rotary_have_the_right_gradients():
    q, k, v = make_qkv(2, 2, 40, 40, 16, requires_grad=True, dtype=torch.float64)
    out = llama.standard_attention(q, k, v)
    expected, _ = oracle(q, k, v, torch.ones(40, 40, dtype=torch.bool).tril())
    assert relative_error(out, expected) < 1e-12
    dout = torch.randn_like(out)
    x, weight = torch.randn(3, 5, 8, dtype=torch.float64), torch.rand(8, dtype=torch.float64)
    x, weight = x.requires_grad_(), weight.requires_grad_()
    found = torch.autograd.grad(RMSNorm.apply(x, weight).sin().sum(), (x, weight))
    right = torch.autograd.grad(F.rms_norm(x, (8,), weight, 1e-5).sin().sum(), (x, weight))
    found += torch.autograd.grad(out, (q, k, v), dout)
    right += torch.autograd.grad(expected, (q, k, v), dout)
    y = torch.randn(2, 6, 2, 8, dtype=torch.float64, requires_grad=True)
    turned = [torch.autograd.grad(r(y).sin().sum(), y) for r in (_Rotary(), Rotary())]
    for a, b in zip(found + turned[0], right + turned[1], strict=True):
        assert relative_error(a, b) < 1e-6  # the statistic of the norm is float32


def test_live_bytes_follow_storages():
    def step():
        a = torch.ones(1000)
        b = a + 1
        del a
        return b.view(10, 100) * 2

    assert peak_bytes(step, CPU) == 8000
    with LiveBytes() as live:
        kept = torch.ones(500)
        held = kept[:10] + 1
        del kept
    assert live.now == held.nbytes and live.peak == 2000 + held.nbytes
    before = [torch.ones(1000) for _ in range(20)]
    # a storage is counted where another was released
    assert peak_bytes(lambda: [before.pop() + 1 for _ in range(20)], CPU) == 20 * 4000


def test_the_gate_knows_rounding_from_a_fault(monkeypatch):
    sizes = Sizes(batch=1, n=64, dim=512, hidden=64, heads=4, dtype="bfloat16")
    case = Case(sizes, "ours", "none", 2)
    memory.check_result(case, CPU)
    right = llama.sparseflash.attention  # without its mask below
    monkeypatch.setattr(llama.sparseflash, "attention", lambda q, k, v, mask: right(q, k, v))
    with pytest.raises(WrongResult, match="wrong result: error"):
        memory.check_result(case, CPU)


def test_a_context_too_long_is_a_row(study, one, monkeypatch):
    run = study("memory", "lengths=[1048576]")
    (row,) = one(run, run.study.cases(run)[0])
    assert row.status.startswith("out of memory: needs about") and row.formula_mib > 0
    for attention, more in (("ours", 0), ("standard", 2 * SMALL.score_bytes)):
        need = 4 * SMALL.layer_bytes(attention) + more
        for free in (need, need - 1):
            monkeypatch.setattr(memory, "free_memory", lambda device, free=free: free)
            case = Case(SMALL, attention, "none", 4)
            with nullcontext() if free == need else pytest.raises(MemoryError):
                memory.check_memory(case, CPU)


def test_rows_tables_and_figure(measured):
    words = ["lengths=[32,64]", "dim=32", "hidden=48", "heads=2"]
    rows = measured("memory", *words)
    assert len(rows) == 10 and ok(rows) and all(r.counted == "storages" for r in rows)
    for row in rows:
        assert row.scaled_gb == pytest.approx(
            (row.peak_mib + (LAYERS - 4) * row.layer_mib) * 2**20 / 1e9, rel=1e-4
        )
    made = memory.tables(frame(rows))
    assert made["stacks"].count("\n") == 11
    other = rows[0] | {"batch": 7, "peak_mib": 777.0}
    assert "777" not in str(memory.tables(frame([other, *rows])))
    assert len(memory.figures(frame(rows))) == 1
