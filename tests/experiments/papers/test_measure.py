"""What is timed and gated, in which unit, and which measurements are told apart."""

import inspect
from dataclasses import MISSING, fields
from types import SimpleNamespace

import pytest
import torch

from experiments.bench.timing import Times
from experiments.papers.attention import measure
from experiments.papers.attention.measure import Step, draw, gate_error, time_call
from experiments.papers.attention.methods import METHODS, Setting
from experiments.papers.attention.rows import AccuracyRow, IoRow, LengthRow, MemoryRow
from experiments.papers.rows import DecodeRow, PackedRow, PickRow, TermRow
from experiments.papers.softmax.rows import SoftmaxRow

CPU = torch.device("cpu")
KINDS = [AccuracyRow, IoRow, LengthRow, MemoryRow, DecodeRow, PackedRow, PickRow, TermRow]
COUNTS = {"gflop", "model_gb"}  # which follow from the rest


@pytest.mark.parametrize("kind", [*KINDS, SoftmaxRow])
def test_rows_of_other_sizes_are_other_measurements(kind):
    own = [field for field in fields(kind) if field.name in inspect.get_annotations(kind)]
    given = {f.name for f in own if f.default is MISSING or f.name == "round"}
    assert given - COUNTS == {*kind.WHAT}


def tensors() -> tuple[torch.Tensor, ...]:
    return tuple(torch.randn(1, 2, 8, 4).requires_grad_() for _ in range(3))


def test_a_backward_is_timed_without_its_forward():
    done = []

    def attend(q, k, v):
        done.append(torch.is_grad_enabled())
        return q * k + v

    step = Step(attend, tensors())
    calls = step.calls(("forward", "backward", "both"))
    done.clear()
    out = calls["forward"]()
    assert isinstance(out, torch.Tensor) and done == [False]
    assert len(calls["backward"]()) == len(calls["backward"]()) == 3 and done == [False]
    assert len(calls["both"]()) == 3 and done == [False, True]


def test_slow_calls_are_timed_twice_in_milliseconds(monkeypatch):
    clock = iter([0.0, 1.0, 10.0, 13.0])
    monkeypatch.setattr(measure.time, "perf_counter", lambda: next(clock))
    assert time_call(lambda: None, CPU, 0.1) == Times(2000.0, 1000.0, 3000.0)


@pytest.mark.parametrize("errors", [(1e-6, 0.5), (0.5, 1e-6)])
def test_a_gate_has_the_larger_error_of_output_and_gradients(errors):
    step = Step(lambda q, k, v: q * k + v, tensors())
    gate = SimpleNamespace(
        dout=step.dout, forward_error=lambda out: errors[0], backward_error=lambda *g: errors[1]
    )
    assert gate_error(gate, step) == 0.5  # type: ignore[arg-type]


def test_memory_is_in_mib_with_the_inputs(monkeypatch):
    step = Step(lambda q, k, v: q * k + v, tensors())
    assert step.saved_mib() == 2 * 64 * 4 / 2**20
    monkeypatch.setattr(measure, "peak_extra_mib", lambda call, device: 3.0)
    assert step.peak_mib(CPU) == 3 + 4 * 64 * 4 / 2**20


def test_q_k_and_v_differ():
    setting = Setting("flash", 1, 1, 16, 16, "float32")
    q, k, v = draw(setting.case(setting.make(CPU)), CPU)
    assert not torch.equal(q, k) and not torch.equal(k, v) and not torch.equal(q, v)


def test_what_the_methods_are():
    inexact = "linformer local reformer smyrf linear performer".split()
    assert [name for name, method in METHODS.items() if not method.exact] == inexact
    assert [name for name, method in METHODS.items() if method.compiled] == ["compiled"]
    kernels = {name: m.kernel.name for name, m in METHODS.items() if m.kernel is not None}
    assert kernels == {"sdpa_flash": "FLASH_ATTENTION", "sdpa_cudnn": "CUDNN_ATTENTION"}


def test_bytes_of_matrices():
    one = 4 * 2 * 3 * 64**2  # a float32 matrix of each head
    plain, dropped = (Setting("standard", 2, 3, 64, 16, "float32", dropout=p) for p in (0.0, 0.1))
    assert (plain.matrix_bytes(), dropped.matrix_bytes()) == (3 * one, 5 * one)
    assert Setting("flash", 2, 3, 64, 16, "float32").matrix_bytes() == 0
