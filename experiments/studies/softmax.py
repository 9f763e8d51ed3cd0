"""Safe and online softmax, and softmax fused with top-k (arXiv 1805.02867), in Triton.

Over vocabularies and batches; a copy and torch.softmax stand beside them. A row has the error, the
time, and the bandwidth that its memory accesses make. It needs a GPU. See docs/results/papers.md.

A program takes a row of x. It keeps one running maximum and BLOCK partial sums. The k largest
numbers so far wait in a short list. A block is searched only if its maximum belongs into the list,
which becomes rare: x in random order has about k log(vocabulary / BLOCK) such elements after the
first block.
"""

import os
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from itertools import product
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from experiments.bench.timing import measure
from experiments.common.devices import free_memory
from experiments.common.rows import OK, Found, Row, found
from experiments.common.tables import MISSING, markdown
from experiments.studies import runner
from experiments.studies.runner import Run
from sparseflash.kernels.common.launch import FUSED
from sparseflash.testing import relative_error

KEY = "algorithm implementation batch vocabulary k".split()
SOURCES = ("experiments/studies",)
LIMIT = 1e-5  # relative error against float64
FEW_ROWS = 128  # below this a GPU has more multiprocessors than rows: more threads for each
LOWEST = tl.constexpr(-3.0e38)  # a maximum before the first element: finite, so that no NaN arises
INF = tl.constexpr(float("inf"))
Shape = tuple[int, int]  # batch, vocabulary
Result = Tensor | tuple[Tensor, Tensor]


class Algorithm(NamedTuple):
    """One way to a softmax, or to the k largest probabilities and their indices."""

    title: str
    topk: bool
    accesses: int | None  # reads and writes of slow memory, for each element of x; None: unknown


ALGORITHMS = {
    "copy": Algorithm("copy", False, 2),
    "safe": Algorithm("safe softmax", False, 4),  # maximum, sum, result read x; one write
    "online": Algorithm("online softmax", False, 3),  # maximum and sum read x together
    "torch": Algorithm("torch.softmax", False, None),
    "safe_topk": Algorithm("safe, then top-k", True, 5),  # the result is read once more
    "safe_fused": Algorithm("safe, fused with top-k", True, 2),  # maximum; sum and top-k
    "online_fused": Algorithm("online, fused with top-k", True, 1),
    "torch_topk": Algorithm("torch.softmax, torch.topk", True, None),
}
TORCH = ("copy", "torch", "torch_topk")
BASE, FAST = {False: "safe", True: "safe_topk"}, {False: "online", True: "online_fused"}


@dataclass(kw_only=True)
class Options(runner.Options):
    name: str = "softmax"
    vocabularies: list[int] = field(
        default_factory=lambda: [10, 100, 1000, 4000, 10000, 25000, 100000, 1000000]
    )
    batches: list[int] = field(default_factory=lambda: [10, 4000])  # rows of a vector batch
    k: list[int] = field(default_factory=lambda: [5])  # of the top-k; in Section 5.2 to 30


DEFAULTS = dict.fromkeys(("cuda", "cpu"), Options())


@dataclass(frozen=True)
class Case:
    """Shape of x, and how many of its largest probabilities are wanted."""

    batch: int
    vocabulary: int
    k: int


def cases(run: Run) -> list[Case]:
    """Return the shapes whose x and softmax fit into half of the memory."""
    if run.device.type == "cpu" and os.environ.get("TRITON_INTERPRET") != "1":
        raise ValueError("name=softmax needs a GPU, or TRITON_INTERPRET=1")
    o, most = run.options, free_memory(run.device) // 16
    shapes = product(o.batches, o.vocabularies, o.k)
    return [Case(*c) for c in shapes if c[2] <= c[1] <= most / c[0]]


def ways(case: Case, run: Run) -> list[Row]:
    """Return the algorithms; without top-k they are measured with the first k alone."""
    kinds = {name: "torch" if name in TORCH else "triton" for name in ALGORITHMS}
    return [
        {"algorithm": name, "implementation": kind, "k": case.k if ALGORITHMS[name].topk else 0}
        for name, kind in kinds.items()
        if ALGORITHMS[name].topk or case.k == run.options.k[0]
    ]


def opened(case: Case, run: Run) -> Callable[[Row], dict[str, Any]]:
    """Return what measures an algorithm."""
    generator = torch.Generator(run.device).manual_seed(0)
    x = torch.randn(case.batch, case.vocabulary, generator=generator, device=run.device)

    def one(row: Row) -> dict[str, Any]:
        call = make_call(row["algorithm"], x, case.k)
        wrong = error(row["algorithm"], call(), x, case.k)
        if wrong > LIMIT:
            return {"status": f"wrong result: error {wrong:.2g}", "error": wrong}
        times = measure(call, x.device, run.options.seconds)
        accesses = ALGORITHMS[row["algorithm"]].accesses
        gb_s = None if accesses is None else accesses * x.nbytes / times.ms_median / 1e6
        return {"error": wrong, "accesses": accesses, "gb_s": gb_s, **times._asdict()}

    return one


def make_call(algorithm: str, x: Tensor, k: int) -> Callable[[], Result]:
    """Return what is timed; it writes a softmax into memory that is there already."""
    y = torch.empty_like(x)
    calls: dict[str, Callable[[], Result]] = {
        "copy": lambda: y.copy_(x),
        "torch": lambda: torch.softmax(x, 1, out=y),
        "torch_topk": lambda: torch.softmax(x, 1, out=y).topk(k, 1),
        "safe": lambda: softmax(x, y, online=False),
        "online": lambda: softmax(x, y, online=True),
        "safe_topk": lambda: top_k(softmax(x, y, online=False), k, "plain"),
        "safe_fused": lambda: top_k(x, k, "safe"),
        "online_fused": lambda: top_k(x, k, "online"),
    }
    return calls[algorithm]


def error(algorithm: str, result: Result, x: Tensor, k: int) -> float:
    """Return the relative error of the first and the last row against float64.

    Of a top-k, also that of the probabilities at the indices.
    """
    rows = [0, len(x) - 1]
    right = x[rows].double()
    if algorithm != "copy":
        right = right.softmax(1)
    if isinstance(result, Tensor):
        return relative_error(result[rows], right)
    values, indices = result[0][rows], result[1][rows]
    best = right.topk(k, 1).values
    return max(relative_error(each, best) for each in (values, right.gather(1, indices)))


# ---- kernels


def softmax(x: Tensor, y: Tensor, *, online: bool) -> Tensor:
    """Write the softmax of the rows of x (batch, vocabulary), float32, into y."""
    with torch.cuda.device(x.device) if x.is_cuda else nullcontext():
        _softmax_kernel[(len(x),)](x, y, x.shape[1], ONLINE=online, **_tile(x))
    return y


def top_k(x: Tensor, k: int, kind: str) -> tuple[Tensor, Tensor]:
    """Return the k largest numbers of each row, largest first, and their indices: (batch, k) each.

    kind: "plain" takes them as they are; "safe" and "online" take their softmax.
    Each row must have at least k numbers above -inf.
    """
    values = torch.empty(len(x), k, device=x.device)
    indices = torch.empty(len(x), k, dtype=torch.int64, device=x.device)
    slots = triton.next_power_of_2(k)
    with torch.cuda.device(x.device) if x.is_cuda else nullcontext():
        _top_k_kernel[(len(x),)](
            x, values, indices, x.shape[1], KIND=kind, K=k, SLOTS=slots, **_tile(x)
        )  # fmt: skip
    return values, indices


def _tile(x: Tensor) -> dict[str, Any]:
    block = min(triton.next_power_of_2(x.shape[1]), 8192 if len(x) < FEW_ROWS else 2048)
    return {"BLOCK": block, "num_warps": max(1, min(block // 256, 16)), **FUSED}


@triton.jit
def _load(X, start, vocabulary, BLOCK: tl.constexpr):
    at = start + tl.arange(0, BLOCK)
    return tl.load(X + at, mask=at < vocabulary, other=-INF)  # [BLOCK]


@triton.jit
def _maximum(X, vocabulary, BLOCK: tl.constexpr):
    """Return the maximum of a row: one pass."""
    m = tl.full((BLOCK,), LOWEST, tl.float32)
    for start in range(0, vocabulary, BLOCK):
        m = tl.maximum(m, _load(X, start, vocabulary, BLOCK))
    return tl.max(m, 0)


@triton.jit
def _online_step(x, top, m, total):
    """Add a block x, whose maximum is `top`, to the running maximum and partial sums."""
    m_new = tl.maximum(m, top)
    return m_new, total * tl.exp(m - m_new) + tl.exp(x - m_new)  # [BLOCK]


@triton.jit
def _softmax_kernel(X, Y, vocabulary, ONLINE: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64) * vocabulary
    X += row
    total = tl.zeros((BLOCK,), tl.float32)
    if ONLINE:
        m = tl.max(tl.full((BLOCK,), LOWEST, tl.float32), 0)
        for start in range(0, vocabulary, BLOCK):
            x = _load(X, start, vocabulary, BLOCK)
            m, total = _online_step(x, tl.max(x, 0), m, total)
    else:
        m = _maximum(X, vocabulary, BLOCK)
        for start in range(0, vocabulary, BLOCK):
            total += tl.exp(_load(X, start, vocabulary, BLOCK) - m)
    factor = 1.0 / tl.sum(total, 0)
    for start in range(0, vocabulary, BLOCK):
        at = start + tl.arange(0, BLOCK)
        p = tl.exp(_load(X, start, vocabulary, BLOCK) - m) * factor
        tl.store(Y + row + at, p, mask=at < vocabulary)


@triton.jit
def _insert(x, top, start, values, indices, SLOTS: tl.constexpr, BLOCK: tl.constexpr):
    """Put the numbers of a block that belong into the list in place of its smallest ones."""
    slot = tl.arange(0, SLOTS)
    lane = tl.arange(0, BLOCK)
    smallest, where = tl.min(values, 0, return_indices=True)
    while top > smallest:
        at = tl.argmax(x, 0)
        values = tl.where(slot == where, top, values)
        indices = tl.where(slot == where, start + at, indices)
        x = tl.where(lane == at, -INF, x)
        top = tl.max(x, 0)
        smallest, where = tl.min(values, 0, return_indices=True)
    return values, indices


@triton.jit
def _top_k_kernel(
    X, Values, Indices, vocabulary, KIND: tl.constexpr, K: tl.constexpr, SLOTS: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    X += row * vocabulary
    slot = tl.arange(0, SLOTS)
    values = tl.where(slot < K, -INF, INF)  # slots beyond K are never the smallest
    indices = tl.zeros((SLOTS,), tl.int32)
    m = tl.max(tl.full((BLOCK,), LOWEST, tl.float32), 0)
    total = tl.zeros((BLOCK,), tl.float32)
    if KIND == "safe":
        m = _maximum(X, vocabulary, BLOCK)
    for start in range(0, vocabulary, BLOCK):
        x = _load(X, start, vocabulary, BLOCK)
        top = tl.max(x, 0)
        if KIND == "online":
            m, total = _online_step(x, top, m, total)
        elif KIND == "safe":
            total += tl.exp(x - m)
        values, indices = _insert(x, top, start, values, indices, SLOTS, BLOCK)
    values = tl.where(slot < K, values, -INF)
    for i in tl.static_range(K):
        best, where = tl.max(values, 0, return_indices=True)
        index = tl.sum(tl.where(slot == where, indices, 0), 0)
        values = tl.where(slot == where, -INF, values)
        if KIND != "plain":
            best = tl.exp(best - m) / tl.sum(total, 0)
        tl.store(Values + row * K + i, best)
        tl.store(Indices + row * K + i, index.to(tl.int64))


# ---- tables


def ks(rows: list[Found]) -> list[int]:
    """Return the k of the top-k rows."""
    return sorted({row.k for row in rows if row.k})


def measured(rows: list[Found], k: int | None = None) -> dict[Shape, dict[str, Found]]:
    """Return the newest row of each shape and algorithm, shapes in order.

    k: of the top-k; None: the smallest there is.
    """
    k = min(ks(rows), default=0) if k is None else k
    shapes: dict[Shape, dict[str, Found]] = {}
    for row in rows:
        if row.k in (0, k):
            shapes.setdefault((row.batch, row.vocabulary), {})[row.algorithm] = row
    return dict(sorted(shapes.items()))


def tables(frame: Any) -> dict[str, str]:
    """Return softmax, topk and larger_k, one table a device, below its name where there are
    several.
    """
    devices: dict[str, list[Found]] = {}
    for row in found(frame[frame.status == OK]):
        devices.setdefault(row.device, []).append(row)
    made = {}
    for name, make in {"softmax": _softmax, "topk": _topk, "larger_k": _larger_k}.items():
        lines = {device: make(rows) for device, rows in devices.items()}
        texts = {d: markdown(some, left=()) for d, some in lines.items() if len(some) > 1}
        if len(devices) > 1:
            texts = {device: f"{device}:\n\n{text}" for device, text in texts.items()}
        if texts:
            made[name] = "\n\n".join(texts.values())
    return made


def _softmax(rows: list[Found], topk: bool = False) -> list[list[str]]:
    """Return milliseconds, the speed-up over the slowest way, and the bandwidth over a copy's."""
    names = [name for name, a in ALGORITHMS.items() if a.topk == topk and name != "copy"]
    head = ["batch", "V", *(f"{ALGORITHMS[name].title} (ms)" for name in names)]
    lines = [[*head, "speed-up of online", "its bandwidth / copy's"]]
    for (batch, vocabulary), by_name in measured(rows).items():
        best, copy, share = by_name.get(FAST[topk]), by_name.get("copy"), MISSING
        if best and copy and best.gb_s and copy.gb_s:
            share = f"{best.gb_s / copy.gb_s:.2f}"
        times = [_ms(by_name.get(name)) for name in names]
        lines.append([str(batch), f"{vocabulary:,}", *times, _gain(by_name, topk), share])
    return lines


def _topk(rows: list[Found]) -> list[list[str]]:
    return _softmax(rows, topk=True)


def _larger_k(rows: list[Found]) -> list[list[str]]:
    """Return Section 5.2: milliseconds of each k of shapes with several, and the speed-up over safe
    softmax, then top-k.
    """
    names = [name for name, a in ALGORITHMS.items() if a.topk]
    head = ["batch", "V", "k", *(f"{ALGORITHMS[name].title} (ms)" for name in names)]
    lines = [[*head, "speed-up of online"]]
    made = {(*shape, k): some for k in ks(rows) for shape, some in measured(rows, k).items()}
    made = {key: some for key, some in made.items() if some.keys() & {*names}}
    for (batch, vocabulary, k), by_name in sorted(made.items()):
        if sum((b, v) == (batch, vocabulary) for b, v, _ in made) > 1:
            times = [_ms(by_name.get(name)) for name in names]
            lines.append([str(batch), f"{vocabulary:,}", str(k), *times, _gain(by_name, True)])
    return lines


def _gain(by_name: dict[str, Found], topk: bool) -> str:
    base, best = by_name.get(BASE[topk]), by_name.get(FAST[topk])
    return f"{base.ms_median / best.ms_median:.2f}" if base and best else MISSING


def _ms(row: Found | None) -> str:
    return MISSING if row is None else f"{row.ms_median:.3g}"
