"""What is timed and gated of a step, and in which unit."""

import weakref

import pytest
import torch

from experiments.bench import step as module
from experiments.bench.cases import Case
from experiments.bench.step import Step, draw, saved_bytes, time_call
from experiments.bench.timing import Times

CPU = torch.device("cpu")


def tensors():
    return tuple(torch.randn(1, 2, 8, 4).requires_grad_() for _ in range(3))


def test_a_backward_is_timed_without_its_forward():
    done = []

    def attend(q, k, v):
        done.append(torch.is_grad_enabled())
        return q * k + v

    step = Step(attend, tensors())
    forward, backward, both = (step.call(d) for d in ("forward", "backward", "both"))
    assert isinstance(forward(), torch.Tensor) and len(both()) == 3
    done.clear()
    assert len(backward()) == len(backward()) == 3 and done == []
    forward()
    both()
    assert done == [False, True]


def test_slow_calls_are_timed_twice_in_milliseconds(monkeypatch):
    clock = iter([0.0, 1.0, 10.0, 13.0])
    monkeypatch.setattr(module.time, "perf_counter", lambda: next(clock))
    assert time_call(lambda: None, CPU, 0.1) == Times(2000.0, 1000.0, 3000.0)


def test_memory_is_in_mib_with_the_inputs(monkeypatch):
    step = Step(lambda q, k, v: q * k + v, tensors())
    assert step.saved_mib() == 2 * 64 * 4 / 2**20
    monkeypatch.setattr(module, "peak_extra_mib", lambda call, device: 3.0)
    assert step.peak_mib(CPU) == 3 + 4 * 64 * 4 / 2**20


def test_nothing_stays_after_saved_bytes_are_counted():
    seen = []

    def forward():
        x = torch.randn(8, 8, requires_grad=True)
        seen.append(weakref.ref(x))
        return x.softmax(-1)  # which keeps its output

    assert saved_bytes(forward) == 256
    assert seen[0]() is None


def test_q_k_and_v_differ():
    case = Case("dense", 1, 1, 1, 16, 16, 16, "float32", 0, 0)
    q, k, v = draw(case, CPU)
    assert not torch.equal(q, k) and not torch.equal(k, v) and not torch.equal(q, v)


@pytest.mark.parametrize("errors", [(1e-6, 0.5), (0.5, 1e-6)])
def test_a_gate_has_the_larger_error_of_output_and_gradients(errors):
    class Gate:
        forward_error = staticmethod(lambda out: errors[0])
        backward_error = staticmethod(lambda *gradients: errors[1])
        passed = staticmethod(lambda error: error)

    step = Step(lambda q, k, v: q * k + v, tensors())
    Gate.dout = step.dout
    assert step.error(Gate()) == 0.5 and step.error(Gate(), ("forward",)) == errors[0]
