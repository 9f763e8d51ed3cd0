"""Warming up gives back what to measure."""

from dataclasses import replace

from experiments.bench import warm
from experiments.bench.provider import DIRECTIONS
from experiments.bench.run import breaks_context, measurements
from experiments.common.rows import OK
from tests.experiments.bench.bench_cases import CASE, CPU


def test_warming_up_gives_back_the_tasks(capfd):
    tasks = measurements([CASE, replace(CASE, mask="local(50)")], ["cpu", "sdpa"], DIRECTIONS)
    assert len({warm.kind(t) for t in tasks}) == 2  # one a direction: both masks are partial
    assert warm.warm(tasks, CPU, 1, 60) == tasks
    assert "2 kinds of call" in capfd.readouterr().out
    assert warm.warm(tasks, CPU, 1, 0) == []


def test_only_a_lost_device_stops_a_run():
    assert breaks_context("failed: AcceleratorError: CUDA error: an illegal memory access")
    assert not breaks_context("failed: OutOfMemoryError: CUDA error: out of memory")
    assert not breaks_context(OK)
