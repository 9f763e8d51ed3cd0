"""The device of a run: autocast, the order of sums, memory, and CUDA graphs."""

import gc
import os
import resource
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import torch

MIB = 2**20
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}  # by the name of the precision
WARM_UP = 3  # calls of a body before it is captured


def autocast(device: torch.device, dtype: torch.dtype) -> torch.autocast:
    """Return a context that computes in bfloat16 if that is `dtype`, else as before."""
    return torch.autocast(device.type, torch.bfloat16, enabled=dtype == torch.bfloat16)


@contextmanager
def same_bits(wanted: bool) -> Iterator[None]:
    """Give sums a fixed order in torch, in compiled code and in sparseflash, if `wanted`.

    Then an operator that has no such order raises RuntimeError, which names it.
    """
    if not wanted:
        yield
        return
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # torch asks for it
    memory: Any = torch.utils.deterministic
    before = torch.get_deterministic_debug_mode(), memory.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True)
    memory.fill_uninitialized_memory = False  # which takes time
    try:
        yield
    finally:
        torch.set_deterministic_debug_mode(before[0])
        memory.fill_uninitialized_memory = before[1]


# ---- memory


def peak_mib(device: torch.device) -> float:
    """Return the peak memory of the device, data included; on a CPU, that of the whole process
    since `reset_memory`, where Linux keeps it.
    """
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / MIB
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def reset_memory(device: torch.device) -> None:
    """Free what an earlier run of this process left, and reset the peak."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
    else:
        with suppress(OSError), open("/proc/self/clear_refs", "w") as file:
            file.write("5")


def lacks_memory(error: BaseException) -> bool:
    """Return whether an error says that there is too little memory."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    # GPU libraries use their own words, such as CUBLAS_STATUS_ALLOC_FAILED.
    words = "out of memory", "can't allocate memory", "ALLOC_FAILED"
    return any(word in str(error) for word in words)


# ---- CUDA graphs


def warm_up(body: Callable[[], object], device: torch.device) -> bool:
    """Run the body so that kernels are compiled and caches filled.

    Returns whether a CUDA graph can hold it: not on a CPU, nor if it waits for the GPU.
    """
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
                print(f"no CUDA graph: it waits for the GPU ({error})", file=sys.stderr)
                return False
    finally:
        torch.cuda.set_sync_debug_mode("default")
        torch.cuda.current_stream(device).wait_stream(side)
        torch.cuda.synchronize(device)
    return True


def capture(body: Callable[[], object], device: torch.device, pool: Any = None) -> Any:
    """Return the CUDA graph of a body that has run before.

    Graphs of one `pool` share memory, so no graph may read what another one left there.
    """
    graph = torch.cuda.CUDAGraph()
    # Threads of NCCL may call CUDA meanwhile.
    with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
        body()
    return graph
