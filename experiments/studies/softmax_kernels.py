"""Softmax and its k largest probabilities in Triton: one program a row of x, in blocks.

A program keeps one running maximum and BLOCK partial sums. The k largest numbers so far wait in a
short list. A block is searched only if its maximum belongs into the list, which becomes rare: x in
random order has about k log(vocabulary / BLOCK) such elements after the first block.
"""

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from sparseflash.kernels.launch import FUSED

LOWEST = tl.constexpr(-3.0e38)  # a maximum before the first element: finite, so that no NaN arises
INF = tl.constexpr(float("inf"))
FEW_ROWS = 128  # below this a GPU has more multiprocessors than rows: more threads for each


def softmax(x: Tensor, y: Tensor, *, online: bool) -> Tensor:
    """Write the softmax of the rows of x (batch, vocabulary), float32, into y."""
    with _on(x):
        _softmax[(len(x),)](x, y, x.shape[1], ONLINE=online, **_tile(x))
    return y


def top_k(x: Tensor, k: int, kind: str) -> tuple[Tensor, Tensor]:
    """Return the k largest numbers of each row, largest first, and their indices: (batch, k) each.

    kind: "plain" takes them as they are; "safe" and "online" take their softmax.
    Each row must have at least k numbers above -inf.
    """
    values = torch.empty(len(x), k, device=x.device)
    indices = torch.empty(len(x), k, dtype=torch.int64, device=x.device)
    with _on(x):
        _top_k[(len(x),)](
            x, values, indices, x.shape[1], KIND=kind, K=k, SLOTS=triton.next_power_of_2(k),
            **_tile(x),
        )  # fmt: skip
    return values, indices


def run(algorithm: str, x: Tensor, y: Tensor, k: int) -> Tensor | tuple[Tensor, Tensor]:
    """Return an algorithm of `ALGORITHMS`; y is room for a softmax."""
    match algorithm:
        case "safe" | "online":
            return softmax(x, y, online=algorithm == "online")
        case "safe_topk":
            return top_k(softmax(x, y, online=False), k, "plain")
        case "safe_fused" | "online_fused":
            return top_k(x, k, algorithm.removesuffix("_fused"))
    raise ValueError(f"{algorithm!r} has no kernel")


def _on(x: Tensor) -> AbstractContextManager:
    return torch.cuda.device(x.device) if x.is_cuda else nullcontext()


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
def _softmax(X, Y, vocabulary, ONLINE: tl.constexpr, BLOCK: tl.constexpr):
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
def _top_k(
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
