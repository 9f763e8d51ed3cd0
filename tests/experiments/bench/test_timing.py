"""Timing: what counts, and what does not."""

import time

import pytest

from experiments.bench.timing import measure
from tests.experiments.bench.bench_cases import CPU


@pytest.mark.parametrize("seconds", [0.001, 0.02])
def test_the_first_call_does_not_count(seconds):
    """It compiles, builds masks and fills caches."""
    calls = []

    def call():
        calls.append(None)
        time.sleep(0.2 if len(calls) == 1 else 0.005)

    times = measure(call, CPU, seconds)
    assert len(calls) > 1 and 5 <= times.ms_p20 <= times.ms_median <= times.ms_p80 < 100
