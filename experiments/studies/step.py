"""Forward and backward of an attention: gate, time and memory of one step."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

from experiments.bench.cases import DTYPES, Case
from experiments.bench.gate import Gate
from experiments.bench.timing import MIB, Times, measure, peak_extra_mib

DIRECTIONS = ("forward", "backward", "both")
Attend = Callable[[Tensor, Tensor, Tensor], Tensor]
SLOW_S = 0.5  # a call that takes longer is timed twice, not for a span of time


@dataclass(frozen=True)
class PaddedCase(Case):
    """A case whose keys end at the length of each sequence."""

    lengths: tuple[int, ...] = ()

    def allowed(self, batch: int, head: int, rows: np.ndarray) -> np.ndarray:
        found = super().allowed(batch, head, rows)
        return found & (np.arange(self.n_k) < self.lengths[batch]) if self.lengths else found


class PaddedGate(Gate):
    """The gate for queries within every length: the others mean nothing."""

    @cached_property
    def rows(self) -> Tensor:
        found = super().rows
        lengths = self.case.lengths if isinstance(self.case, PaddedCase) else ()
        return found[found < min(lengths)] if lengths else found


@dataclass(frozen=True, eq=False)
class Step:
    """Forward and backward of an attention on given inputs.

    wanted: further tensors that gradients are taken of.
    """

    attend: Attend
    qkv: tuple[Tensor, ...]
    wanted: tuple[Tensor, ...] = ()

    @cached_property
    def dout(self) -> Tensor:
        """A gradient like the output."""
        return torch.randn_like(self.forward())

    def forward(self) -> Tensor:
        """Return the output, without a graph."""
        with torch.no_grad():
            return self.attend(*self.qkv)

    def both(self, dout: Tensor | None = None) -> tuple[Tensor | None, ...]:
        """Return the gradients."""
        return self._gradients(self.attend(*self.qkv), self.dout if dout is None else dout)

    def _gradients(self, out: Tensor, dout: Tensor, **options: Any) -> tuple[Tensor | None, ...]:
        inputs = (*self.qkv, *self.wanted)
        return torch.autograd.grad(out, inputs, dout, allow_unused=True, **options)

    def call(self, direction: str) -> Callable[[], object]:
        """Return what is timed: forward alone, backward alone on a graph that is kept, or both."""
        if direction == "backward":
            out, dout = self.attend(*self.qkv), self.dout
            return lambda: self._gradients(out, dout, retain_graph=True)
        return self.forward if direction == "forward" else self.both

    def error(self, gate: Gate, directions: Sequence[str] = DIRECTIONS) -> float:
        """Return the largest relative error of output and gradients."""
        error = gate.forward_error(self.forward())
        if directions == ("forward",):
            return error
        dq, dk, dv = (t for t in self.both(gate.dout)[:3] if t is not None)
        return max(error, gate.backward_error(dq, dk, dv))

    def saved_mib(self) -> float:
        """Return MiB of the distinct storages that autograd keeps, inputs included."""
        return saved_bytes(lambda: self.attend(*self.qkv)) / MIB

    def peak_mib(self, device: torch.device) -> float | None:
        """Return the peak of forward and backward on a GPU, with q, k, v and dout, or None."""
        held = sum(t.numel() * t.element_size() for t in (*self.qkv, self.dout)) / MIB
        extra = peak_extra_mib(self.both, device)
        return None if extra is None else held + extra


def saved_bytes(forward: Callable[[], object]) -> int:
    """Return bytes of the distinct storages that autograd keeps of a forward."""
    found: dict[int, int] = {}

    def pack(t: Tensor) -> Tensor:
        storage = t.untyped_storage()
        found[storage.data_ptr()] = storage.nbytes()
        return t.detach()  # an output itself would hold its own graph, for ever

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        out = forward()  # kept alive, so that no address comes twice
    del out
    return sum(found.values())


def draw(case: Case, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """Return standard normal q, k and v with gradients."""
    generator = torch.Generator(device).manual_seed(0)
    options = {"device": device, "dtype": DTYPES[case.dtype], "generator": generator}
    q, k, v = (
        torch.randn((case.batch, heads, case.n_q, case.head_dim), **options).requires_grad_()
        for heads in (case.heads, case.kv_heads, case.kv_heads)
    )
    return q, k, v


def time_call(call: Callable[[], object], device: torch.device, seconds: float) -> Times:
    """Return times of a call that ran before; one of more than SLOW_S is timed twice."""

    def once() -> float:
        start = time.perf_counter()
        call()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return time.perf_counter() - start

    if device.type == "cuda":
        torch.cuda.synchronize(device)
    if (first := once()) < SLOW_S:
        return measure(call, device, seconds)
    found = 1000 * np.array([first, once()])
    return Times(float(np.median(found)), float(found.min()), float(found.max()))
