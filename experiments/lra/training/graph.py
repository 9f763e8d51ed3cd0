"""A function of no arguments as a CUDA graph: warmed up, then captured."""

import sys
from collections.abc import Callable
from typing import Any

import torch

WARM_UP = 3


def warm_up(body: Callable[[], None], device: torch.device) -> bool:
    """Runs the body, so that kernels are compiled and caches filled; returns whether a CUDA graph
    can hold it, which it can not where it waits for the GPU."""
    if device.type != "cuda":
        body()
        return False
    side = torch.cuda.Stream(device)
    side.wait_stream(torch.cuda.current_stream(device))
    try:
        with torch.cuda.stream(side):
            for _ in range(WARM_UP - 1):
                body()
            torch.cuda.set_sync_debug_mode("error")
            try:
                body()
            except RuntimeError as error:
                if isinstance(error, torch.OutOfMemoryError):
                    raise
                print(f"no CUDA graph: the step waits for the GPU ({error})", file=sys.stderr)
                return False
    finally:
        torch.cuda.set_sync_debug_mode("default")
        torch.cuda.current_stream(device).wait_stream(side)
        torch.cuda.synchronize(device)
    return True


def capture(body: Callable[[], None], device: torch.device, pool: Any = None) -> Any:
    """The CUDA graph of a body that has run before. Graphs of one pool share their memory, so none
    may leave in it what another reads."""
    graph = torch.cuda.CUDAGraph()
    # other threads (of NCCL) may call CUDA meanwhile
    with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
        body()
    return graph
