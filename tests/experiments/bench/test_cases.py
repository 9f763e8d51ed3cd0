"""Cases, the gate that they pass, and the times of calls."""

import time
import weakref
from dataclasses import fields, replace

import numpy as np
import pytest
import torch

from experiments.bench.cases import DENSE, Case
from experiments.bench.gate import Gate, WrongResult
from experiments.bench.run import KEY
from experiments.bench.step import Step, measure, saved_bytes
from sparseflash.testing import make_qkv
from tests.experiments.bench.bench_cases import CASE, CPU, exact

OBLONG = Case(DENSE, 1, 2, 2, 100, 200, 16, "float32", 32, 16)
MASKS = ["local:20+global:10", "random:0.3:seed=1", "causal", "butterfly:16"]


@pytest.mark.parametrize("mask", MASKS)
def test_elements_and_rows_agree_with_the_dense_mask(mask):
    case = replace(OBLONG, mask=mask)
    dense = case.blocks.to_dense()
    rows = np.array([0, 17, 31, 32, 99])
    assert case.elements == pytest.approx(dense.mean())
    np.testing.assert_array_equal(case.allowed(0, 1, rows), dense[0, -1][rows])


def test_a_mask_of_every_batch_entry_is_for_that_batch():
    case = replace(OBLONG, mask="documents(((60, 40), (25, 75)))", batch=2, n_k=100)
    rows, dense = np.array([0, 31, 99]), case.blocks.to_dense()
    assert case.elements == pytest.approx((60**2 + 40**2 + 25**2 + 75**2) / (2 * 100**2))
    for batch in (0, 1):
        np.testing.assert_array_equal(case.allowed(batch, 1, rows), dense[batch, 0][rows])
    with pytest.raises(ValueError, match=r"batch is 1, but .* is made for batch=2"):
        _ = replace(case, batch=1).blocks


def test_dense_has_no_blocks_and_everything_allowed():
    assert (OBLONG.blocks, OBLONG.density, OBLONG.elements) == (None, 1.0, 1.0)
    assert OBLONG.allowed(0, 0, np.array([3, 5])).all()


def test_peers_have_a_causal_kernel_for_squares_alone():
    """They differ in where the diagonal of a rectangle ends."""
    assert replace(OBLONG, mask="causal()", n_q=200).causal
    assert not replace(OBLONG, mask="causal()").causal and not replace(OBLONG, n_q=200).causal


def test_cases_that_differ_are_rows_of_their_own():
    assert {field.name for field in fields(Case)} <= {"mask", *KEY}


def test_only_computed_blocks_count_as_work():
    case = replace(OBLONG, mask="random:0.25", n_q=256, n_k=256)
    assert case.flops("forward") == 4 * 2 * 256 * 256 * 16 * case.density
    assert case.flops("backward") == 2.5 * case.flops("forward")
    narrow = replace(case, v_dim=8)
    pairs = 2 * 256 * 256 * case.density
    assert narrow.flops("forward") == 2 * pairs * (16 + 8)
    assert narrow.flops("backward") == 2 * pairs * (3 * 16 + 2 * 8)  # scores, dq, dk; dp, dv
    ragged = replace(case, mask="causal()", n_q=200, n_k=200, block_q=128, block_k=128)
    assert ragged.flops("forward") == 4 * 2 * (128 * 128 + 72 * 200) * 16  # tokens that exist


@pytest.mark.parametrize(("dtype", "limit"), [("float32", 1e-4), ("bfloat16", 1e-2)])
def test_gate_samples_both_ends_and_refuses_its_limit(dtype, limit):
    qkv = make_qkv(2, 4, 200, 200, 16, kv_heads=2, dtype=getattr(torch, dtype), device="cpu")
    gate = Gate(replace(CASE, dtype=dtype), *qkv)
    assert {0, 199} <= set(gate.rows.tolist())
    assert len(gate.rows) >= 64 and gate.rows.diff().max() <= 7  # from all over
    assert [(batch, kv_head) for batch, _, kv_head in gate.samples] == [(0, 0), (1, 1)]
    out = exact(CASE)(*(t.double() for t in qkv))
    for error in (0, limit / 2):
        assert gate.passed(gate.forward_error(out * (1 + error))) < limit
    for error in (2 * limit, float("nan")):
        with pytest.raises(WrongResult, match="wrong result"):
            gate.passed(gate.forward_error(out * (1 + error)))


@pytest.mark.parametrize("wrong", ["dq", "dk", "dv"])
def test_the_gate_looks_at_every_gradient(wrong):
    qkv = tuple(
        t.double().requires_grad_()
        for t in make_qkv(2, 4, 200, 200, 16, kv_heads=2, dtype=torch.float32, device="cpu")
    )
    gate = Gate(CASE, *(t.detach().float() for t in qkv))
    out = exact(CASE)(*qkv)
    gradients = dict(
        zip(("dq", "dk", "dv"), torch.autograd.grad(out, qkv, gate.dout.double()), strict=True)
    )
    assert gate.backward_error(**gradients) < 1e-4
    dq = gradients["dq"]
    for changed in (
        {wrong: gradients[wrong] * (1 + 2e-4)},
        {"dq": dq.masked_fill(dq == 0, 0.01)},  # queries outside the sample
    ):
        assert gate.backward_error(**gradients | changed) > 1e-4


def test_the_first_call_does_not_count():
    """It compiles, builds masks and fills caches."""
    calls = []
    times = measure(lambda: calls.append(time.sleep(0.005)), CPU, 0.02)
    assert times.calls == len(calls) - 1 >= 3
    assert 5 <= times.ms_p20 <= times.ms_median <= times.ms_p80


def test_a_backward_is_timed_without_its_forward():
    done = []

    def attend(q, k, v):
        done.append(torch.is_grad_enabled())
        return q * k + v

    step = Step(attend, tuple(torch.randn(1, 2, 8, 4).requires_grad_() for _ in range(3)))
    forward, backward, both = (step.call(d) for d in ("forward", "backward", "both"))
    assert isinstance(forward(), torch.Tensor) and len(both()) == 3
    done.clear()
    assert len(backward()) == len(backward()) == 3 and done == []
    forward()
    both()
    assert done == [False, True]


def test_nothing_stays_after_saved_bytes_are_counted():
    seen = []

    def forward():
        x = torch.randn(8, 8, requires_grad=True)
        seen.append(weakref.ref(x))
        return x.softmax(-1)  # which keeps its output

    assert saved_bytes(forward) == 256
    assert seen[0]() is None
