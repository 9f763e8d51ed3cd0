"""Bytes of the storages that operators return and that are still alive: memory without a GPU."""

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LiveBytes(TorchDispatchMode):
    """Counts storages from the operator that returns them to their release; `peak` is the most.

    What an operator allocates and frees inside is not seen. Storages from before are not counted.
    """

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        self.known: set[int] = set()

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        for x in tree_leaves((args, kwargs)):
            if isinstance(x, Tensor) and _key(x) not in self.known:
                self._know(x, 0)
        found = func(*args, **(kwargs or {}))
        for x in tree_leaves(found):
            if isinstance(x, Tensor):
                self._count(x)
        return found

    def _count(self, x: Tensor) -> None:
        size = x.untyped_storage().nbytes()
        if size and _key(x) not in self.known:
            self._know(x, size)

    def _know(self, x: Tensor, size: int) -> None:
        """Counts a storage until its release, after which another may have its address."""
        storage, key = x.untyped_storage(), _key(x)
        self.known.add(key)
        self.now += size
        self.peak = max(self.peak, self.now)
        weakref.finalize(storage, self._release, key, size)

    def _release(self, key: int, size: int) -> None:
        self.known.discard(key)
        self.now -= size


def _key(x: Tensor) -> int:
    return x.untyped_storage()._cdata


def peak_bytes(step: Callable[[], object], device: torch.device) -> int:
    """The most that a step holds beyond what is held before it.

    On a GPU by its allocator, else by the storages that operators return.
    """
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        held = torch.cuda.memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        step()
        torch.cuda.synchronize(device)
        return torch.cuda.max_memory_allocated(device) - held
    with LiveBytes() as live:
        step()
    return live.peak
