"""What the gate samples."""

from dataclasses import replace

import pytest
import torch

from experiments.bench.gate import Gate
from sparseflash.testing import make_qkv
from tests.experiments.bench.bench_cases import CASE, exact


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gate_samples_first_and_last_rows_and_slices(dtype):
    name = str(dtype).removeprefix("torch.")
    q, k, v = make_qkv(2, 4, 200, 200, 16, kv_heads=2, dtype=dtype, device="cpu")
    gate = Gate(replace(CASE, dtype=name), q, k, v)
    assert {0, 199} <= set(gate.rows.tolist())
    assert gate.slices == [(0, 0), (1, 1)]
    assert gate.verdict(gate.forward_error(exact(CASE)(q, k, v))) is None


@pytest.mark.parametrize(("dtype", "limit"), [(torch.float32, 1e-4), (torch.bfloat16, 1e-2)])
def test_an_error_of_twice_the_limit_is_refused(dtype, limit):
    name = str(dtype).removeprefix("torch.")
    q, k, v = make_qkv(2, 4, 200, 200, 16, kv_heads=2, dtype=dtype, device="cpu")
    gate = Gate(replace(CASE, dtype=name), q, k, v)
    out = exact(CASE)(q.double(), k.double(), v.double())
    assert gate.verdict(gate.forward_error(out * (1 + limit / 2))) is None
    assert "wrong result" in (gate.verdict(gate.forward_error(out * (1 + 2 * limit))) or "")
