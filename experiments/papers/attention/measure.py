"""Gate, time and memory of an attention: what the tables of the papers are made of."""

import gc
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from experiments.bench.cases import DTYPES, Case
from experiments.bench.gate import Gate
from experiments.bench.timing import MIB, Times, measure, peak_extra_mib
from experiments.training.device import lacks_memory

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
        """The output, without a graph."""
        with torch.no_grad():
            return self.attend(*self.qkv)

    def both(self, dout: Tensor | None = None) -> tuple[Tensor | None, ...]:
        """The gradients."""
        out, dout = self.attend(*self.qkv), self.dout if dout is None else dout
        inputs = (*self.qkv, *self.wanted)
        return torch.autograd.grad(out, inputs, dout, allow_unused=True)

    def calls(self, directions: Sequence[str]) -> dict[str, Callable[[], object]]:
        """What is timed: forward alone, backward alone on a graph that is kept, or both."""
        found: dict[str, Callable[[], object]] = {}
        if "forward" in directions:
            found["forward"] = self.forward
        if "backward" in directions:
            out, dout = self.attend(*self.qkv), self.dout
            inputs = (*self.qkv, *self.wanted)
            found["backward"] = lambda: torch.autograd.grad(
                out, inputs, dout, retain_graph=True, allow_unused=True
            )
        if "both" in directions:
            found["both"] = self.both
        return found

    def saved_mib(self) -> float:
        """MiB of the distinct storages that autograd keeps for the backward, inputs included."""
        return saved_bytes(lambda: self.attend(*self.qkv)) / MIB

    def peak_mib(self, device: torch.device) -> float | None:
        """Peak of forward and backward on a GPU, with q, k, v and dout; None on a CPU."""
        held = sum(t.numel() * t.element_size() for t in (*self.qkv, self.dout)) / MIB
        extra = peak_extra_mib(self.both, device)
        return None if extra is None else held + extra


def saved_bytes(forward: Callable[[], object]) -> int:
    """Bytes of the distinct storages that autograd keeps of a forward."""
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
    """Standard normal q, k and v with gradients."""
    generator = torch.Generator(device).manual_seed(0)
    options = {"device": device, "dtype": DTYPES[case.dtype], "generator": generator}
    q, k, v = (
        torch.randn((case.batch, heads, case.n_q, case.head_dim), **options).requires_grad_()
        for heads in (case.heads, case.kv_heads, case.kv_heads)
    )
    return q, k, v


def gate_error(gate: Gate, step: Step) -> float:
    """The larger relative error of output and gradients."""
    out, gradients = step.forward(), step.both(gate.dout)
    dq, dk, dv = (t for t in gradients[:3] if t is not None)
    return max(gate.forward_error(out), gate.backward_error(dq, dk, dv))


def time_call(call: Callable[[], object], device: torch.device, seconds: float) -> Times:
    """Times of a call that ran before; one of more than SLOW_S is timed twice."""
    synchronize(device)
    start = time.perf_counter()
    call()
    synchronize(device)
    first = time.perf_counter() - start
    if first < SLOW_S:
        return measure(call, device, seconds)
    start = time.perf_counter()
    call()
    synchronize(device)
    found = 1000 * np.array([first, time.perf_counter() - start])
    return Times(float(np.median(found)), float(found.min()), float(found.max()))


def synchronize(device: torch.device) -> None:
    """Waits for a GPU."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def free(device: torch.device) -> None:
    """Gives memory of earlier measurements back."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def why(error: Exception) -> str:
    """A failure as the status of a row."""
    kind = "out of memory" if lacks_memory(error) else "failed"
    if isinstance(error, ValueError | NotImplementedError):
        kind = "unsupported"
    text = " ".join(str(error).split()) or type(error).__name__
    return f"{kind}: {text[:160]}"
