"""Safe and online softmax (arXiv 1805.02867), in Triton.

Over vocabularies and batches; a copy and torch.softmax stand beside them. A row has the error, the
time, and the bandwidth that its memory accesses make. It needs a GPU. See docs/results/papers.md.

A program takes a row of x. It keeps one running maximum and BLOCK partial sums.
"""

import os
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import pandas as pd
import torch
import triton
import triton.language as tl
from torch import Tensor

from experiments.bench.gate import checked
from experiments.bench.step import measure
from experiments.common.devices import free_memory
from experiments.common.rows import Found, Row
from experiments.common.tables import markdown
from experiments.studies import runner
from experiments.studies.runner import Run, grid, timed
from sparseflash.kernels.common.launch import FUSED
from sparseflash.testing import relative_error

KEY = "algorithm implementation batch vocabulary".split()
SOURCES = ("experiments/studies",)
LIMIT = 1e-5  # relative error against float64
FEW_ROWS = 128  # below this a GPU has more multiprocessors than rows: more threads for each
LOWEST = tl.constexpr(-3.0e38)  # a maximum before the first element: finite, so that no NaN arises
INF = tl.constexpr(float("inf"))


class Algorithm(NamedTuple):
    """One way to a softmax."""

    title: str
    implementation: str
    accesses: int | None  # reads and writes of slow memory, for each element of x; None: unknown


ALGORITHMS = {
    "copy": Algorithm("copy", "torch", 2),
    "safe": Algorithm("safe softmax", "triton", 4),  # maximum, sum, result read x; one write
    "online": Algorithm("online softmax", "triton", 3),  # maximum and sum read x together
    "torch": Algorithm("torch.softmax", "torch", None),
}


@dataclass(kw_only=True)
class Options(runner.Options):
    vocabularies: list[int] = field(
        default_factory=lambda: [10, 100, 1000, 4000, 10000, 25000, 100000, 1000000]
    )
    batches: list[int] = field(default_factory=lambda: [10, 4000])  # rows of a vector batch


def cases(run: Run) -> list[Found]:
    if run.device.type == "cpu" and os.environ.get("TRITON_INTERPRET") != "1":
        raise ValueError("name=softmax needs a GPU, or TRITON_INTERPRET=1")
    o, most = run.options, free_memory(run.device) // 16
    shapes = grid(batch=o.batches, vocabulary=o.vocabularies)
    return [shape for shape in shapes if shape.vocabulary <= most / shape.batch]


def ways(case: Found, run: Run) -> list[Row]:
    about = {name: a.implementation for name, a in ALGORITHMS.items()}
    return [{"algorithm": name, "implementation": kind} for name, kind in about.items()]


def opened(case: Found, run: Run) -> Callable[[Row], dict[str, Any]]:
    generator = torch.Generator(run.device).manual_seed(0)
    x = torch.randn(case.batch, case.vocabulary, generator=generator, device=run.device)

    def one(row: Row) -> dict[str, Any]:
        call = make_call(row["algorithm"], x)
        wrong = checked(error(row["algorithm"], call(), x), LIMIT)
        times = measure(call, x.device, run.options.seconds)
        accesses = ALGORITHMS[row["algorithm"]].accesses
        gb_s = None if accesses is None else accesses * x.nbytes / times.ms_median / 1e6
        return {"error": wrong, "accesses": accesses, "gb_s": gb_s, **times._asdict()}

    return one


def make_call(algorithm: str, x: Tensor) -> Callable[[], Tensor]:
    """Return what is timed; it writes a softmax into memory that is there already."""
    y = torch.empty_like(x)
    calls: dict[str, Callable[[], Tensor]] = {
        "copy": lambda: y.copy_(x),
        "torch": lambda: torch.softmax(x, 1, out=y),
        "safe": lambda: softmax(x, y, online=False),
        "online": lambda: softmax(x, y, online=True),
    }
    return calls[algorithm]


def error(algorithm: str, result: Tensor, x: Tensor) -> float:
    """Return the relative error of the first and the last row against float64."""
    rows = [0, len(x) - 1]
    right = x[rows].double()
    return relative_error(result[rows], right if algorithm == "copy" else right.softmax(1))


# ---- kernels


def softmax(x: Tensor, y: Tensor, *, online: bool) -> Tensor:
    """Write the softmax of the rows of x (batch, vocabulary), float32, into y."""
    block = min(triton.next_power_of_2(x.shape[1]), 8192 if len(x) < FEW_ROWS else 2048)
    tile = {"BLOCK": block, "num_warps": max(1, min(block // 256, 16)), **FUSED}
    with torch.cuda.device(x.device) if x.is_cuda else nullcontext():
        _softmax_kernel[(len(x),)](x, y, x.shape[1], ONLINE=online, **tile)
    return y


@triton.jit
def _load(X, start, vocabulary, BLOCK: tl.constexpr):
    at = start + tl.arange(0, BLOCK)
    return tl.load(X + at, mask=at < vocabulary, other=-INF)  # [BLOCK]


@triton.jit
def _softmax_kernel(X, Y, vocabulary, ONLINE: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64) * vocabulary
    X += row
    total = tl.zeros((BLOCK,), tl.float32)
    tops = tl.full((BLOCK,), LOWEST, tl.float32)
    m = tl.max(tops, 0)
    if ONLINE:
        for start in range(0, vocabulary, BLOCK):
            x = _load(X, start, vocabulary, BLOCK)
            m_new = tl.maximum(m, tl.max(x, 0))
            total = total * tl.exp(m - m_new) + tl.exp(x - m_new)  # [BLOCK]
            m = m_new
    else:
        for start in range(0, vocabulary, BLOCK):
            tops = tl.maximum(tops, _load(X, start, vocabulary, BLOCK))
        m = tl.max(tops, 0)
        for start in range(0, vocabulary, BLOCK):
            total += tl.exp(_load(X, start, vocabulary, BLOCK) - m)
    factor = 1.0 / tl.sum(total, 0)
    for start in range(0, vocabulary, BLOCK):
        at = start + tl.arange(0, BLOCK)
        p = tl.exp(_load(X, start, vocabulary, BLOCK) - m) * factor
        tl.store(Y + row + at, p, mask=at < vocabulary)


# ---- tables


def tables(frame: Any) -> dict[str, str]:
    """Return milliseconds, the speed-up of online over safe softmax, and its bandwidth over a
    copy's, on the device of the last row.
    """
    rows = timed(frame, KEY).drop_duplicates(["batch", "vocabulary", "algorithm"], keep="last")
    by = rows.set_index(["batch", "vocabulary", "algorithm"]).sort_index()
    ms, rate = by.ms_median.unstack(), by.gb_s.unstack()
    table = {f"{ALGORITHMS[name].title} (ms)": ms[name].map("{:.3g}".format)
             for name in ALGORITHMS if name != "copy"}  # fmt: skip
    table["speed-up of online"] = (ms.safe / ms.online).map("{:.2f}".format)
    table["its bandwidth / copy's"] = (rate["online"] / rate["copy"]).map("{:.2f}".format)
    found = pd.DataFrame(table).reset_index().rename(columns={"vocabulary": "V"})
    return {"softmax": markdown(found.assign(V=found.V.map("{:,}".format)), left=())}
