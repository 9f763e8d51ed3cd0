"""Time and memory of a call."""

import gc
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch

from experiments.bench.cases import DTYPES, Case

MIB = 2**20


class Times(NamedTuple):
    """Milliseconds of one call, by the columns of a `TimedRow`."""

    ms_median: float
    ms_p20: float
    ms_p80: float
    calls: int | None = None


def measure(call: Callable[[], object], device: torch.device, seconds: float) -> Times:
    """Return times of `call` over about `seconds` of repeats, after a warm-up.

    On a GPU the cache is cleared before every repeat (triton.testing.do_bench); on a CPU it is
    whatever the repeat before left in it.
    """
    if device.type == "cuda":
        from triton.testing import do_bench

        rep = round(1000 * seconds)
        return _times(do_bench(call, warmup=rep // 4, rep=rep, return_mode="all"))
    call()
    times: list[float] = []
    # At least three repeats, but not for calls so slow that they would take three times as long.
    while sum(times) < (seconds if len(times) >= 3 else 3 * seconds):
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return _times([1000 * t for t in times])


def _times(ms: Any) -> Times:
    median, p20, p80 = map(float, np.quantile(ms, [0.5, 0.2, 0.8]))
    return Times(median, p20, p80, len(ms))


def in_graph(call: Callable[[], object], device: torch.device) -> Callable[[], object] | None:
    """Return what replays a CUDA graph of the call; None for a call that waits for the GPU."""
    side = torch.cuda.Stream(device)
    side.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(side):
        call()
    torch.cuda.current_stream(device).wait_stream(side)
    try:
        torch.cuda.set_sync_debug_mode("error")
        call()
    except RuntimeError:
        return None
    finally:
        torch.cuda.set_sync_debug_mode("default")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return graph.replay


def graph_ms(call: Callable[[], object], device: torch.device, seconds: float) -> float | None:
    """Median time of the call as a CUDA graph; None on a CPU, or for one that waits for the GPU."""
    replay = in_graph(call, device) if device.type == "cuda" else None
    return None if replay is None else measure(replay, device, seconds).ms_median


def peak_extra_mib(call: Callable[[], object], device: torch.device) -> float | None:
    """Peak of the memory that `call` takes beyond what is held before it; None on a CPU."""
    if device.type != "cuda":
        return None
    gc.collect()
    torch.cuda.synchronize(device)
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    call()
    torch.cuda.synchronize(device)
    return (torch.cuda.max_memory_allocated(device) - before) / MIB


def expected_mib(case: Case, direction: str) -> float:
    """Return what a step must take at least: out and the float32 lse, and backward dq, dk, dv as
    well.
    """
    rows = case.batch * case.heads * case.n_q
    keys = case.batch * case.kv_heads * case.n_k
    size = DTYPES[case.dtype].itemsize
    results = rows * (case.value_dim * size + 4)
    if direction == "backward":
        results += (rows * case.head_dim + keys * (case.head_dim + case.value_dim)) * size
    return results / MIB
