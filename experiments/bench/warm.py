"""Compile the kernels of a run in several processes at once, into the caches on disk."""

import os
import time
from collections.abc import Sequence
from dataclasses import replace

import torch

from experiments.bench.run import Bench, Measurement, breaks_context
from experiments.common.processes import CONTEXT, leave_alone

LOST = "device lost"  # what a worker answers once a kernel has broken its CUDA context
_bench: Bench | None = None  # of a worker
_lost = False


def warm(
    wanted: Sequence[Measurement], device: torch.device, workers: int, limit_s: float
) -> list[Measurement]:
    """Run one measurement of every kind once; returns those whose kind ran within `limit_s`.

    This finds kernels that hang, where they can be stopped, and kernels that break the CUDA
    context, after which a process can measure nothing more.
    """
    if not wanted:
        return []
    kinds: dict[tuple, Measurement] = {}
    for what in wanted:
        kinds.setdefault(kind(what), what)
    start, late, broken = time.monotonic(), set(kinds), set()
    pool = CONTEXT.Pool(workers, _start, (str(device),))
    try:
        calls = {name: pool.apply_async(_once, (bare(what),)) for name, what in kinds.items()}
        while late and time.monotonic() < start + limit_s:
            for name in [n for n in late if calls[n].ready()]:
                failure = calls[name].get()
                if failure == LOST:  # to a worker whose device is not
                    calls[name] = pool.apply_async(_once, (bare(kinds[name]),))
                    continue
                if failure:
                    print(f"warm-up: {failure}", flush=True)
                late.discard(name)
                if breaks_context(failure or ""):
                    broken.add(name)
            time.sleep(0.05)
    finally:
        pool.terminate()
    took = time.monotonic() - start
    print(f"warm-up: {len(kinds)} kinds of call in {took:.0f} s, {len(late)} not done", flush=True)
    late |= broken
    for name in late:
        print(f"warm-up: left out: {name}", flush=True)
    return [what for what in wanted if kind(what) not in late]


def kind(what: Measurement) -> tuple:
    """Return what kernels are compiled for: measurements of one kind share them."""
    case = what.case
    partial = None if case.blocks is None else bool(len(case.blocks.bits))
    head = (what.provider, what.direction, partial, case.causal, case.layout, case.dtype)
    return (*head, case.block_q, case.block_k, *case.shape)


def bare(what: Measurement) -> Measurement:
    """Without the block mask that its case has built: building it is quicker than sending it."""
    return replace(what, case=replace(what.case))


def _start(device: str) -> None:
    global _bench
    leave_alone()
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")  # there are enough processes
    _bench = Bench(torch.device(device), 0.0)


def _once(what: Measurement) -> str | None:
    """None, or what went wrong: the run itself finds it again and gives it a row."""
    global _lost
    assert _bench is not None
    if _lost:
        time.sleep(1)
        return LOST
    try:
        _bench.ungated(what)()
        if _bench.device.type == "cuda":
            torch.cuda.synchronize()
    except Exception as error:
        reason = " ".join(str(error).split())[:160]
        case = f"{what.case.mask} N {what.case.n_q} D {what.case.head_dim}"
        failure = f"{what.provider} {what.direction} {case}: {reason}"
        _lost = breaks_context(failure)
        return failure
    return None
