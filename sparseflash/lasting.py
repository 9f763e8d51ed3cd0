"""Device memory that outlives the call that makes it."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch

Value = TypeVar("Value")


def make_lasting(make: Callable[[], Value], device: torch.device | str) -> Value:
    """make(), without gradients, for a cache to keep.

    While torch.compile warms up or records a CUDA graph, whatever its thread allocates belongs to
    the pool of the graph, and torch refuses what stays there. So on a GPU a thread of its own
    makes it. Raises RuntimeError where a CUDA graph is being captured, which records no
    allocations that outlive it.
    """

    def plainly() -> Value:
        with torch.inference_mode(False), torch.no_grad():
            return make()

    device = torch.device(device)
    if device.type != "cuda":
        return plainly()

    def on_device() -> Value:
        with torch.cuda.device(device):
            made = plainly()
            torch.cuda.current_stream().synchronize()
        return made

    with torch.cuda.device(device):
        if torch.cuda.is_current_stream_capturing():
            raise RuntimeError(
                "the block lists of a mask are made at its first call, not while a CUDA graph is"
                " captured; call once with this mask and these shapes before capturing"
            )
        torch.cuda.current_stream().synchronize()  # `make` reads what may still be under way
    with ThreadPoolExecutor(max_workers=1) as thread:
        return thread.submit(on_device).result()
