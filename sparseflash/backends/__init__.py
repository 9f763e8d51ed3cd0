"""Backends: modules with `unsupported`, `forward` and `backward`, imported when they are chosen.

What `forward` finds out from the layout of its inputs alone, a `Forward` keeps for other calls.
"""

from collections.abc import Callable
from functools import cache
from importlib import import_module
from types import ModuleType

import torch
from torch import Tensor

from sparseflash.schedule import Schedule

NAMES = ("hopper", "triton", "cpu", "reference")  # the fastest first: the order of backend="auto"


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


def prepared(
    module: ModuleType, q: Tensor, k: Tensor, v: Tensor, schedule: Schedule | None, scale: float,
    dropout_p: float,
) -> Callable[[Tensor, Tensor, Tensor, Tensor | None], tuple[Tensor, Tensor]]:  # fmt: skip
    """`forward` of a backend, as a function of q, k, v and seed, for inputs laid out like these."""
    if hasattr(module, "Forward"):
        return module.Forward(q, k, v, schedule, scale, dropout_p)
    return lambda q, k, v, seed: module.forward(q, k, v, schedule, scale, dropout_p, seed)


def empty_out(q: Tensor, v: Tensor) -> Tensor:
    """Uninitialised out (B, H_q, N_q, D_v), with heads and tokens in memory in the order of q."""
    head_dim = v.shape[-1]
    if head_dim == q.shape[-1]:
        return torch.empty_like(q)
    batch, heads, n_q, _ = q.shape
    if q.stride(1) < q.stride(2):
        return q.new_empty(batch, n_q, heads, head_dim).transpose(1, 2)
    return q.new_empty(batch, heads, n_q, head_dim)


@cache
def _load(name: str) -> ModuleType:
    return import_module(f"sparseflash.backends.{name}")
