"""What the gate samples, and what it lets pass."""

from dataclasses import replace

import pytest
import torch

from experiments.bench.gate import Gate
from sparseflash.testing import make_qkv
from tests.experiments.bench.bench_cases import CASE, exact


@pytest.mark.parametrize(("dtype", "limit"), [("float32", 1e-4), ("bfloat16", 1e-2)])
def test_gate_samples_both_ends_and_refuses_twice_its_limit(dtype, limit):
    qkv = make_qkv(2, 4, 200, 200, 16, kv_heads=2, dtype=getattr(torch, dtype), device="cpu")
    gate = Gate(replace(CASE, dtype=dtype), *qkv)
    assert {0, 199} <= set(gate.rows.tolist())
    assert [(batch, kv_head) for batch, _, kv_head in gate.samples] == [(0, 0), (1, 1)]
    assert gate.verdict(gate.forward_error(exact(CASE)(*qkv))) is None
    out = exact(CASE)(*(t.double() for t in qkv))
    assert gate.verdict(gate.forward_error(out * (1 + limit / 2))) is None
    assert "wrong result" in (gate.verdict(gate.forward_error(out * (1 + 2 * limit))) or "")
