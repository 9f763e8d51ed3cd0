"""Timing: what counts, and what does not."""

import time
from dataclasses import replace

from experiments.bench.timing import MIB, expected_mib, measure
from tests.experiments.bench.bench_cases import CASE, CPU


def test_the_first_call_does_not_count():
    """It compiles, builds masks and fills caches."""
    calls = []

    def call():
        calls.append(None)
        time.sleep(0.2 if len(calls) == 1 else 0.005)

    for seconds, least in ((0.001, 1), (0.02, 3)):  # slow calls are repeated three times at most
        calls.clear()
        times = measure(call, CPU, seconds)
        assert times.calls == len(calls) - 1 >= least
        assert 5 <= times.ms_p20 <= times.ms_median <= times.ms_p80 < 200


def test_a_step_takes_its_results_at_least():
    """out and a float32 a row, then dq, dk and dv, each with its own head dim."""
    case = replace(CASE, batch=2, heads=4, kv_heads=2, n_q=10, n_k=20, head_dim=16, v_dim=8)
    out = 2 * 4 * 10 * (8 * 4 + 4)
    assert expected_mib(case, "forward") * MIB == out
    gradients = (2 * 4 * 10 * 16 + 2 * 2 * 20 * 16 + 2 * 2 * 20 * 8) * 4
    assert expected_mib(case, "backward") * MIB == out + gradients
    half = replace(case, dtype="bfloat16")
    assert expected_mib(half, "forward") * MIB == 2 * 4 * 10 * (8 * 2 + 4)
