"""Backends: modules with `unsupported`, `forward` and `backward`, imported when they are chosen."""

from importlib import import_module
from types import ModuleType

from torch import Tensor

from sparseflash.schedule import Schedule

NAMES = ("triton", "cpu", "reference")  # the fastest first: the order of backend="auto"


def reasons(
    q: Tensor, k: Tensor, v: Tensor, schedule: Schedule | None, dropout_p: float
) -> dict[str, str | None]:
    """For every backend, in order of preference: why it cannot run this call, or None."""
    return {name: _load(name).unsupported(q, k, v, schedule, dropout_p) for name in NAMES}


def choose(
    backend: str, q: Tensor, k: Tensor, v: Tensor, schedule: Schedule | None, dropout_p: float
) -> ModuleType:
    """The named backend, or for "auto" the first that can run the call.

    Raises ValueError with the reasons where it, or none, can.
    """
    refused = []
    for name in NAMES if backend == "auto" else (backend,):
        module = _load(name)
        reason = module.unsupported(q, k, v, schedule, dropout_p)
        if reason is None:
            return module
        refused.append(f"backend {name!r} cannot run this call: {reason}")
    raise ValueError("; ".join(refused))


def _load(name: str) -> ModuleType:
    return import_module(f"sparseflash.backends.{name}")
