"""What the gate samples, and what it lets pass."""

from dataclasses import replace

import pytest
import torch

from experiments.bench.gate import Gate
from sparseflash.testing import make_qkv
from tests.experiments.bench.bench_cases import CASE, exact


@pytest.mark.parametrize(
    ("dtype", "limit"), [("float32", 1e-4), ("float16", 1e-2), ("bfloat16", 1e-2)]
)
def test_gate_samples_both_ends_and_refuses_its_limit(dtype, limit):
    qkv = make_qkv(2, 4, 200, 200, 16, kv_heads=2, dtype=getattr(torch, dtype), device="cpu")
    gate = Gate(replace(CASE, dtype=dtype), *qkv)
    assert {0, 199} <= set(gate.rows.tolist())
    assert len(gate.rows) >= 64 and gate.rows.diff().max() <= 7  # from all over
    assert [(batch, kv_head) for batch, _, kv_head in gate.samples] == [(0, 0), (1, 1)]
    assert gate.verdict(gate.forward_error(exact(CASE)(*qkv))) is None
    out = exact(CASE)(*(t.double() for t in qkv))
    assert gate.verdict(gate.forward_error(out * (1 + limit / 2))) is None
    assert "wrong result" in (gate.verdict(gate.forward_error(out * (1 + 2 * limit))) or "")
    assert gate.verdict(0.999 * limit) is None
    assert gate.verdict(limit) == f"wrong result: error {limit:.3g}, limit {limit:g}"
    assert "error nan" in (gate.verdict(float("nan")) or "")


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
    assert gate.verdict(gate.backward_error(**gradients)) is None
    scaled = gradients | {wrong: gradients[wrong] * (1 + 2e-4)}
    assert "wrong result" in (gate.verdict(gate.backward_error(**scaled)) or "")
    dq = gradients["dq"]
    other = gradients | {"dq": dq.masked_fill(dq == 0, 0.01)}  # queries outside the sample
    assert "wrong result" in (gate.verdict(gate.backward_error(**other)) or "")
