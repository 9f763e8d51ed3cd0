"""Device memory that outlives the call that allocates it."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch

Value = TypeVar("Value")


def persistent(make: Callable[[], Value], device: torch.device | str) -> Value:
    """Return make(), run without gradients, for a cache to keep.

    While torch.compile warms up or records a CUDA graph, the allocations of its thread belong to
    the pool of that graph, and torch refuses tensors that stay there. On a GPU a new thread
    therefore runs `make`. Raises RuntimeError while a CUDA graph is captured, because a capture
    cannot record an allocation that outlives it.
    """

    def without_gradients() -> Value:
        with torch.inference_mode(False), torch.no_grad():
            return make()

    device = torch.device(device)
    if device.type != "cuda":
        return without_gradients()

    def on_device() -> Value:
        with torch.cuda.device(device):
            made = without_gradients()
            torch.cuda.current_stream().synchronize()
        return made

    with torch.cuda.device(device):
        if torch.cuda.is_current_stream_capturing():
            raise RuntimeError(
                "the first call with a mask builds its block lists, which a CUDA graph cannot"
                " capture; call attention once with this mask and these shapes before capturing"
            )
        torch.cuda.current_stream().synchronize()  # `make` may read tensors that are being written
    with ThreadPoolExecutor(max_workers=1) as thread:
        return thread.submit(on_device).result()
