"""Activation memory: the formula is what autograd keeps, and peaks follow the formula."""

import weakref
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from experiments.bench.timing import Times
from experiments.common.records import OK
from experiments.papers.attention import memory_run, stack
from experiments.papers.attention.live import LiveBytes, peak_bytes
from experiments.papers.attention.measure import saved_bytes
from experiments.papers.attention.memory_report import growth, tables
from experiments.papers.attention.memory_run import base_row, measured, too_big, wrong
from experiments.papers.attention.published import (
    LAYERS,
    SELECTIVE,
    SEVEN_B,
    attention_share,
    layer_units,
    readings,
)
from experiments.papers.attention.rows import MemoryRow
from experiments.papers.attention.stack import (
    ATTENTIONS,
    RMSNorm,
    Sizes,
    Stack,
    _Rotary,
    standard_attention,
)
from sparseflash.layers import Rotary
from sparseflash.testing import make_qkv, oracle, relative_error

CPU = torch.device("cpu")
pytestmark = pytest.mark.usefixtures("no_interpreter", "one_thread")
SMALL = Sizes(batch=2, n=96, dim=32, hidden=80, heads=4, dtype="float32")
ALL = [("standard", "none"), ("standard", "layers")]
ALL += [("ours", "none"), ("ours", "layers"), ("ours", "selective")]


def step_of(attention: str, checkpoint: str, layers: int, sizes: Sizes = SMALL):
    torch.manual_seed(0)
    stack = Stack(sizes, attention, layers, checkpoint)
    x = torch.randn(sizes.batch, sizes.n, sizes.dim, requires_grad=True)

    def step() -> torch.Tensor:
        return torch.autograd.grad(stack(x).square().mean(), [x, *stack.parameters()])[0]

    return stack, x, step


@pytest.mark.parametrize("attention", ATTENTIONS)
def test_the_formula_is_what_autograd_keeps(attention):
    stack, x, _ = step_of(attention, "none", 3)
    weights = sum(4 * p.numel() for p in stack.parameters())
    assert saved_bytes(lambda: stack(x)) - weights == 3 * SMALL.layer_bytes(attention)


@pytest.mark.parametrize(("attention", "checkpoint"), ALL)
def test_a_further_layer_adds_what_the_formula_says(attention, checkpoint):
    peaks = []
    for layers in (2, 4):
        _, _, step = step_of(attention, checkpoint, layers)
        weights = sum(4 * p.numel() for p in step_of(attention, checkpoint, 1)[0].parameters())
        step()
        peaks.append(peak_bytes(step, CPU))
    layer = (peaks[1] - peaks[0]) / 2
    # the gradients of weights, which this step returns, come on top
    assert layer == pytest.approx(SMALL.layer_bytes(attention, checkpoint), abs=weights)


@pytest.mark.parametrize(("attention", "checkpoint"), ALL)
def test_gradients_are_those_of_standard_attention(attention, checkpoint):
    expected = step_of("standard", "none", 2)[2]()
    assert relative_error(step_of(attention, checkpoint, 2)[2](), expected) < 1e-5


def test_selective_checkpointing_runs_attention_once(monkeypatch):
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


def test_standard_attention_is_causal_attention():
    q, k, v = make_qkv(2, 2, 40, 40, 16, requires_grad=True, dtype=torch.float64)
    out = standard_attention(q, k, v)
    expected, _ = oracle(q, k, v, torch.ones(40, 40, dtype=torch.bool).tril())
    assert relative_error(out, expected) < 1e-12
    dout = torch.randn_like(out)
    pairs = (torch.autograd.grad(o, (q, k, v), dout) for o in (out, expected))
    for found, wanted in zip(*pairs, strict=True):
        assert relative_error(found, wanted) < 1e-12


def test_norm_and_rotary_have_the_right_gradients():
    x, weight = torch.randn(3, 5, 8, dtype=torch.float64), torch.rand(8, dtype=torch.float64)
    x, weight = x.requires_grad_(), weight.requires_grad_()
    found = torch.autograd.grad(RMSNorm.apply(x, weight).sin().sum(), (x, weight))
    expected = torch.autograd.grad(F.rms_norm(x, (8,), weight, 1e-5).sin().sum(), (x, weight))
    for a, b in zip(found, expected, strict=True):
        assert relative_error(a, b) < 1e-6  # the statistic is float32
    y = torch.randn(2, 6, 2, 8, dtype=torch.float64, requires_grad=True)
    turned = [torch.autograd.grad(r(y).sin().sum(), y)[0] for r in (_Rotary(), Rotary())]
    assert relative_error(*turned) < 1e-12


def test_readings_of_the_published_numbers():
    for reading in readings():
        assert reading.formula_gb == pytest.approx(reading.published_gb, rel=0.05), reading
    assert LAYERS * 2 * SEVEN_B.score_bytes == pytest.approx(68.72e9, rel=1e-3)


def test_the_share_that_selective_recomputation_saves():
    units = {name: layer_units(*model[:3]) for name, model in SELECTIVE.items()}
    assert units == {"GPT-3, 175B": (80.0, 34.0), "MT-NLG, 530B": (64.0, 34.0)}
    for model in SELECTIVE.values():
        assert attention_share(*model[:3]) == pytest.approx(model.share, abs=0.005)


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


def test_a_storage_is_counted_where_another_was_released():
    before = [torch.ones(1000) for _ in range(20)]

    def step():
        return [before.pop() + 1 for _ in range(20)]

    assert peak_bytes(step, CPU) == 20 * 4000


def test_nothing_stays_after_saved_bytes_are_counted():
    seen = []

    def forward():
        x = torch.randn(8, 8, requires_grad=True)
        seen.append(weakref.ref(x))
        return x.softmax(-1)  # which keeps its output

    assert saved_bytes(forward) == 256
    assert seen[0]() is None


def test_the_gate_knows_rounding_from_a_fault(monkeypatch):
    wide = Sizes(batch=1, n=64, dim=512, hidden=64, heads=4, dtype="bfloat16")
    row = base_row(wide, "ours", "none", 2, CPU, "")
    assert wrong(row, CPU) is None
    right = stack.sparseflash.attention  # without its mask below
    monkeypatch.setattr(stack.sparseflash, "attention", lambda q, k, v, mask: right(q, k, v))
    assert (wrong(row, CPU) or "").startswith("wrong result: error")


def test_a_context_too_long_is_a_row(monkeypatch):
    sizes = Sizes(1, 2**20, 128, 344, 4, "float32")
    row = base_row(sizes, "standard", "layers", 4, CPU, "")
    assert "out of memory: needs about" in (too_big(row, CPU) or "")
    assert measured(row, CPU, 1e-3).status.startswith("out of memory")
    for attention, kept in (("ours", 0), ("standard", 2 * SMALL.score_bytes)):
        row = base_row(SMALL, attention, "none", 4, CPU, "")
        need = 4 * SMALL.layer_bytes(attention) + kept
        for free in (need, need - 1):
            monkeypatch.setattr(memory_run, "free_memory", lambda device, free=free: free)
            assert (too_big(row, CPU) is None) == (free == need)
    with pytest.raises(ValueError, match="take attention=ours"):
        Stack(SMALL, "standard", 2, "selective")


def test_the_step_that_is_timed_is_that_of_the_peak(monkeypatch):
    peaks = []

    def timed(step, device, seconds):
        peaks.append(peak_bytes(step, device))
        return Times(1.0, 1.0, 1.0)

    monkeypatch.setattr(memory_run, "time_call", timed)
    row = measured(base_row(SMALL, "ours", "layers", 4, CPU, ""), CPU, 1e-3)
    assert row.peak_mib == pytest.approx(peaks[0] / 2**20, rel=0.02)


def test_growth_and_tables_have_the_sizes_of_the_last_row():
    row = replace(base_row(SMALL, "ours", "none", 4, CPU, ""), status=OK, ms_median=1.0)
    rows = [replace(row, n=n, peak_mib=peak) for n, peak in ((32, 9.0), (64, 10.0), (128, 30.0))]
    assert growth(rows) == ["ours: 64 to 128 tokens take 3.00 times as much."]
    other = replace(rows[0], batch=7, peak_mib=777.0)
    assert "777" in tables([*rows, other]) and "777" not in tables([other, *rows[1:]])


def test_program(tmp_path, measured_once):
    words = ["lengths=[32,64]", "dim=32", "hidden=48", "heads=2", "layers=4", "device=cpu"]
    words += ["seconds=1e-4", f"plots={tmp_path}"]
    rows, printed, _ = measured_once("papers.memory", MemoryRow, *words)
    assert len(rows) == 10 and all(row.status == OK for row in rows)
    assert all(row.layer_mib == pytest.approx(row.formula_mib, rel=1e-4) for row in rows)
    for row in rows:  # the stack has 4 of 32 layers
        scaled = (row.peak_mib + 28 * row.layer_mib) * 2**20
        assert row.scaled_gb * 1e9 == pytest.approx(scaled, rel=1e-4)
    assert "| 68 | 68.72 | 1.01 |" in printed and "64 tokens take" in printed
