"""Time and memory of a call, and of a step of attention: its inputs, its gate, its failures."""

import gc
import re
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from experiments.bench.cases import DTYPES, LAYOUTS, Case
from experiments.bench.gate import Gate, WrongResult
from experiments.training.device import MIB, capture, lacks_memory, warm_up

DIRECTIONS = ("forward", "backward", "both")
Attend = Callable[[Tensor, Tensor, Tensor], Tensor]
SLOW_S = 0.5  # a call that takes longer is timed twice, not for a span of time


class Times(NamedTuple):
    """Milliseconds of one call, by the columns of a `TimedRow`."""

    ms_median: float
    ms_p20: float
    ms_p80: float
    calls: int | None = None


def measure(call: Callable[[], object], device: torch.device, seconds: float) -> Times:
    """Return times of `call` over about `seconds` of repeats, after a warm-up; a call of more than
    `SLOW_S` is timed twice.

    On a GPU the cache is cleared before every repeat (triton.testing.do_bench); on a CPU it is
    whatever the repeat before left in it.
    """

    def once() -> float:
        start = time.perf_counter()
        call()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return 1000 * (time.perf_counter() - start)

    once()
    times = [once()]
    if times[0] > 1000 * SLOW_S:
        return times_of([*times, once()])
    if device.type == "cuda":
        from triton.testing import do_bench

        rep = round(1000 * seconds)
        return times_of(do_bench(call, warmup=rep // 4, rep=rep, return_mode="all"))
    while sum(times) < 1000 * seconds * (1 if len(times) >= 3 else 3):  # at least three repeats
        times.append(once())
    return times_of(times)


def times_of(ms: Any) -> Times:
    """Return the median and percentiles of times."""
    median, p20, p80 = map(float, np.quantile(ms, [0.5, 0.2, 0.8]))
    return Times(median, p20, p80, len(ms))


def in_graph(call: Callable[[], object], device: torch.device) -> Callable[[], object] | None:
    """Return what replays a CUDA graph of the call; None for a call that waits for the GPU."""
    return capture(call, device).replay if warm_up(call, device) else None


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
        """Return the largest relative error of output and gradients.

        Raise WrongResult if it is beyond the limit.
        """
        error = 0.0 if directions == ("backward",) else gate.forward_error(self.forward())
        if directions != ("forward",):
            grads: Any = self.both(gate.dout)[: None if gate.tables else 3]
            error = max(error, gate.backward_error(*grads))
        return gate.passed(error)

    def saved_mib(self) -> float:
        """Return MiB of the distinct storages that autograd keeps, inputs included."""
        return saved_bytes(lambda: self.attend(*self.qkv)) / MIB

    def peak_mib(self, device: torch.device) -> float | None:
        """Return the peak of forward and backward on a GPU, with q, k, v and dout, or None."""
        held = sum(t.numel() * t.element_size() for t in (*self.qkv, self.dout)) / MIB
        extra = peak_extra_mib(self.both, device)
        return None if extra is None else held + extra

    def time(self, direction: str, device: torch.device, seconds: float) -> dict[str, Any]:
        """Return the times of a direction as fields of a row."""
        return measure(self.call(direction), device, seconds)._asdict()


def saved_bytes(forward: Callable[[], object], without: Iterable[Tensor] = ()) -> int:
    """Return bytes of the distinct storages that autograd keeps of a forward, but for some."""
    left_out = {t.untyped_storage().data_ptr() for t in without}
    found: dict[int, int] = {}

    def pack(t: Tensor) -> Tensor:
        storage = t.untyped_storage()
        found[storage.data_ptr()] = storage.nbytes()
        return t.detach()  # an output itself would hold its own graph, for ever

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        out = forward()  # kept alive, so that no address comes twice
    del out
    return sum(size for at, size in found.items() if at not in left_out)


def draw(case: Case, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """Return standard normal q, k and v with gradients, in the layout of the case.

    They are drawn on the device: on a CPU those of a million tokens take minutes.
    """
    generator = torch.Generator(device).manual_seed(0)
    options = {"device": device, "dtype": DTYPES[case.dtype], "generator": generator}

    def one(heads: int, n: int, dim: int) -> Tensor:
        if case.layout == LAYOUTS[0]:
            return torch.randn(case.batch, heads, n, dim, **options).requires_grad_()
        x = torch.randn(case.batch, n, heads, dim, **options)
        return x.transpose(1, 2).requires_grad_()

    return (
        one(case.heads, case.n_q, case.head_dim),
        one(case.kv_heads, case.n_k, case.head_dim),
        one(case.kv_heads, case.n_k, case.value_dim),
    )


# ---- failures


def why(error: Exception) -> str:
    """Return a failure as the status of a row."""
    if isinstance(error, WrongResult):
        return str(error)
    kind = "out of memory" if lacks_memory(error) else "failed"
    none = re.match("No (available kernel|viable backend)", str(error))  # of torch's SDPA
    if isinstance(error, ValueError | NotImplementedError) or none:
        kind = "unsupported"
    text = " ".join(str(error).split()) or type(error).__name__
    return f"{kind}: {text[:160]}"


def breaks_context(failure: str) -> bool:
    """Return whether every later call in the same process would fail as well."""
    return "CUDA error" in failure and "out of memory" not in failure


def free(device: torch.device) -> None:
    """Give memory of earlier measurements back."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
