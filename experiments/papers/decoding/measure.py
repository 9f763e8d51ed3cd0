"""Measuring decoding steps: the gate against float64, then the time of a call and its bandwidth."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial

import torch
from torch import Tensor

from experiments.bench.cases import DTYPES
from experiments.bench.gate import LIMIT
from experiments.bench.timing import Times, in_graph, measure
from experiments.common.provenance import version
from experiments.common.records import OK
from experiments.papers.attention.measure import free, why
from experiments.papers.decoding.cases import SELECTED, Inputs, Step
from experiments.papers.decoding.providers import PROVIDERS, Call
from experiments.papers.rows import DecodeRow
from sparseflash.testing import oracle, relative_error

CHOOSING = "choose and decode"
COPIED = {"cuda": 2**30, "cpu": 2**26}  # bytes


@dataclass(frozen=True)
class Group:
    """What is measured together: one step, by all providers that it concerns."""

    step: Step
    rows: list[DecodeRow]


def groups(
    steps: Sequence[Step],
    providers: Sequence[str],
    rounds: int,
    device: torch.device,
    command: str,
) -> list[Group]:
    """Every step in every round; each group begins with another provider than the one before."""
    found = []
    for number in range(rounds):
        for place, step in enumerate(steps):
            names = [name for name in providers if PROVIDERS[name].concerns(step)]
            first = (number + place) % max(1, len(names))
            ways = [(name, "decode") for name in (*names[first:], *names[:first])]
            if step.mask == SELECTED:
                ways = [(name, way) for name, _ in ways for way in ("decode", CHOOSING)]
            rows = [base_row(step, *way, number + 1, device, command) for way in ways]
            if rows:
                found.append(Group(step, rows))
    return found


def base_row(
    step: Step, provider: str, way: str, number: int, device: torch.device, command: str
) -> DecodeRow:
    """The row of a measurement before it is made."""
    sizes = {
        name: getattr(step, name)
        for name in "page batch heads kv_heads n_q n head_dim dtype".split()
    }
    return DecodeRow(
        provider=provider, version=version(PROVIDERS[provider].package), step=way, round=number,
        mask=step.text, density=None, **sizes, **DecodeRow.origin(str(device), command),
    )  # fmt: skip


@torch.no_grad()
def measured(
    step: Step, device: torch.device, seconds: float, rows: Sequence[DecodeRow]
) -> list[DecodeRow]:
    """The rows of a group; those that have their time or a reason already stay as they are."""
    inputs = None
    found = []
    for row in rows:
        if not row.status or row.status.startswith("failed"):
            reason = PROVIDERS[row.provider].missing(device)
            if reason:
                row = replace(row, status=f"unsupported: {reason}")
            else:
                try:
                    inputs = inputs or Inputs(step, device)
                    row = one(inputs, row, seconds)
                except Exception as error:
                    refused = "No available kernel" in str(error)
                    row = replace(row, status="unsupported: no kernel" if refused else why(error))
        found.append(row)
    del inputs
    free(device)
    return found


def one(inputs: Inputs, row: DecodeRow, seconds: float) -> DecodeRow:
    """The row of one provider, measured."""
    step, device = inputs.step, inputs.device
    calls = PROVIDERS[row.provider].prepare(inputs, row.step == CHOOSING)
    error = gate_error(inputs, calls[0]())
    if not error < (limit := LIMIT[DTYPES[step.dtype]]):
        return replace(row, status=f"wrong result: error {error:.3g}, limit {limit:g}", error=error)
    times = time_of(calls, device, seconds)
    keys = inputs.seen.sum(-1).double().mean().item()
    read = step.read_bytes(keys)
    gbs, copied = read / times.ms_median / 1e6, copy_gbs(str(device))
    return replace(
        row, status=OK, error=error, **times._asdict(), density=keys / step.n,
        caches=len(inputs.caches), read_mb=read / 1e6, gbs=gbs, copy_gbs=copied,
        share=gbs / copied,
    )  # fmt: skip


def gate_error(inputs: Inputs, out: Tensor) -> float:
    """The largest relative error of the first and last sequence, in their first and last heads."""
    step, group = inputs.step, inputs.step.heads // inputs.step.kv_heads
    errors = []
    for b, head in {(0, 0), (step.batch - 1, step.kv_heads - 1)}:
        own = slice(head * group, (head + 1) * group)
        k, v = (t.double()[None, None] for t in inputs.keys_of(0, b, head))
        expected, _ = oracle(inputs.q[None, b, own].double(), k, v, inputs.allowed(b, head))
        errors.append(relative_error(out[None, b, own], expected))
    return max(errors)


def time_of(calls: Sequence[Call], device: torch.device, seconds: float) -> Times:
    """Milliseconds of a call, all of them one after another; on a GPU they are one CUDA graph.

    Raises ValueError for calls that wait for the GPU.
    """

    def every() -> None:
        for call in calls:
            call()

    run: Callable[[], object] | None = every
    if device.type == "cuda":
        run = in_graph(every, device)
    if run is None:
        raise ValueError("it waits for the GPU, so that no CUDA graph can hold it")
    times = measure(run, device, seconds)
    median, p20, p80 = (ms / len(calls) for ms in times[:3])
    return Times(median, p20, p80)


@cache
def copy_gbs(device: str) -> float:
    """1e9 bytes a second of a large copy, those read and those written; once in a process."""
    where = torch.device(device)
    x = torch.ones(COPIED[where.type], dtype=torch.uint8, device=where)
    times = measure(partial(torch.empty_like(x).copy_, x), where, 0.2)
    return 2 * len(x) / times.ms_median / 1e6
