"""What attention must cost: work, least traffic and the ideal time of a shape, a mask and a device.

A kernel can be compared with these numbers. They hold for any implementation that computes the
non-empty blocks and nothing else; see docs/guide/measuring.md.
"""

from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import torch
from torch.utils.benchmark import Timer

from experiments.common.config import choose
from masks import BlockMask

LSE_BYTES = 4
DIRECTIONS = ("forward", "backward")


class Shape(NamedTuple):
    """q (batch, heads, n_q, head_dim), k (batch, kv_heads, n_k, head_dim), v and out: v_dim."""

    batch: int
    heads: int
    kv_heads: int
    n_q: int
    n_k: int
    head_dim: int
    v_dim: int
    itemsize: int  # bytes of an element


class Cost(NamedTuple):
    """Totals of one call over all batches and heads."""

    pairs: int  # (query, key) pairs in the computed blocks
    flops: float  # of the matrix products: two forward, five backward
    exp2: float  # exponentials
    hbm_bytes: float  # every input that has work read once, every output written once


class Ideal(NamedTuple):
    """Milliseconds that each resource needs by itself."""

    matmul_ms: float
    exp2_ms: float
    hbm_ms: float

    @property
    def ms(self) -> float:
        """The ideal time: all three fully overlapped."""
        return max(self)

    @property
    def bound(self) -> str:
        """What binds: matmul, exp2 or hbm."""
        return self._fields[self.index(self.ms)].removesuffix("_ms")


def cost(
    shape: Shape,
    blocks: BlockMask | None = None,
    direction: str = "forward",
) -> Cost:
    """Work and least traffic of one call; `blocks` None is dense attention.

    A backward reads q, k, v, out, dout and the LSE, and writes dq, dk and dv, in five products.
    Blocks at a ragged end count with the tokens that exist.

    Raises ValueError for an unknown direction, and for a mask of other lengths, batch or heads.
    """
    _check(shape, blocks, direction)
    found = _counts(shape, blocks)
    d, dv, size = shape.head_dim, shape.v_dim, shape.itemsize
    rows, keys = shape.batch * shape.heads * shape.n_q, shape.batch * shape.kv_heads * shape.n_k
    row_in, row_out, both = d * size, dv * size, (d + dv) * size
    if direction == "forward":
        products = d + dv
        own = found.live_q * row_in + rows * (row_out + LSE_BYTES)
        hbm_bytes = own + found.live_k * both
    else:
        products = 3 * d + 2 * dv
        own = found.live_k * both + rows * row_in + keys * both
        hbm_bytes = own + found.live_q * (both + row_out + LSE_BYTES)
    flops, exp2 = 2.0 * found.pairs * products, float(found.pairs)
    return Cost(found.pairs, flops, exp2, float(hbm_bytes))


def ideal(cost: Cost, ceilings: "Ceilings", dtype: str) -> Ideal:
    """Return the least time of a cost on a device; `.ms` is the ideal.

    Raises ValueError if the ceilings have no rate for the dtype ("bfloat16", ...).
    """
    if dtype not in ceilings.matmul_tflops:
        raise ValueError(
            f"no measured rate for {dtype}, only for {', '.join(ceilings.matmul_tflops)}; "
            "measure_ceilings(device, (dtype,)) finds it"
        )
    return Ideal(
        matmul_ms=cost.flops / ceilings.matmul_tflops[dtype] / 1e9,
        exp2_ms=cost.exp2 / ceilings.exp2_tps / 1e9,
        hbm_ms=cost.hbm_bytes / ceilings.copy_tbs / 1e9,
    )


class _Counts(NamedTuple):
    pairs: int
    live_q: int  # (batch, head, query) rows that attend to anything
    live_k: int  # (batch, kv head, key) rows that anything attends to


def _check(shape: Shape, blocks: BlockMask | None, direction: str) -> None:
    choose("direction", direction, DIRECTIONS)
    for name in ("batch", "heads", "n_q", "n_k") if blocks is not None else ():
        has, wanted = getattr(blocks, name), getattr(shape, name)
        if has != wanted and not (has == 1 and name in ("batch", "heads")):
            raise ValueError(f"the mask has {name}={has}, the shape {wanted}")


def _counts(shape: Shape, blocks: BlockMask | None) -> _Counts:
    every_q, every_k = shape.batch * shape.heads, shape.batch * shape.kv_heads
    if blocks is None:
        n_q, n_k = shape.n_q, shape.n_k
        return _Counts(every_q * n_q * n_k, every_q * n_q, every_k * n_k)
    kept, sizes = blocks.layout() > 0, blocks.block_size  # [batch, heads, rows, cols]
    ends = zip(sizes, (blocks.n_q, blocks.n_k), kept.shape[2:], strict=True)
    q_len, k_len = (np.minimum(size, n - size * np.arange(count)) for size, n, count in ends)
    # blocks of keys that any query head of their kv head attends to
    group = shape.heads // shape.kv_heads if blocks.heads > 1 else 1
    used = kept.any(2).reshape(blocks.batch, -1, group, blocks.cols).any(2)
    repeats = every_q // (blocks.batch * blocks.heads)  # slices that share a mask
    repeats_k = shape.batch // blocks.batch * (shape.kv_heads if blocks.heads == 1 else 1)
    return _Counts(
        pairs=int((kept @ k_len @ q_len).sum()) * repeats,
        live_q=int((kept.any(3) @ q_len).sum()) * repeats,
        live_k=int((used @ k_len).sum()) * repeats_k,
    )


# ---- the rates that devices reach in practice


class Ceilings(NamedTuple):
    """Rates that a device reaches in practice."""

    matmul_tflops: Mapping[str, float]  # of a large matrix product, by dtype
    copy_tbs: float  # TB/s of a copy, bytes read and bytes written
    exp2_tps: float  # 1e12 exponentials a second
    source: str  # how and when this was found


# Kept by the name that the driver gives the device.
CEILINGS = {
    "NVIDIA H200": Ceilings(
        {"bfloat16": 790.0, "float16": 790.0},
        copy_tbs=4.27,
        exp2_tps=16 * 132 * 1.98e9 / 1e12,  # a clock and multiprocessor, of these, Hz
        source="torch.matmul of 8192 x 8192 and copy_ of 2 GiB, 2026-11-20; exp2 by its clock",
    )
}


@lru_cache
def measure_ceilings(device: str, dtypes: tuple[str, ...] = ("bfloat16",)) -> Ceilings:
    """Return the measured ceilings of a device; measuring takes about a second, once in a process.

    The rate of exponentials is measured on a CPU. On a GPU it follows from the special-function
    units: 16 a clock and multiprocessor.
    """
    where = torch.device(device)
    size, copied = (8192, 2**30) if where.type == "cuda" else (1024, 2**26)
    rates = {}
    for dtype in dtypes:
        a, b = (torch.randn(size, size, device=where).to(getattr(torch, dtype)) for _ in range(2))
        rates[dtype] = 2 * size**3 / _seconds(lambda a=a, b=b: a @ b) / 1e12
    x = torch.ones(copied, dtype=torch.uint8, device=where)
    y = torch.empty_like(x)
    copy = 2 * copied / _seconds(lambda: y.copy_(x)) / 1e12
    if where.type == "cuda":
        units = torch.cuda.get_device_properties(where).multi_processor_count
        clock = torch.cuda.clock_rate(where) * 1e6  # Hz, as the products above left it
        exp2 = 16 * units * clock / 1e12
    else:
        z = torch.randn(2**20)  # 4 MiB: a large share of it stays in the cache
        out = torch.empty_like(z)
        exp2 = z.numel() / _seconds(lambda: torch.exp2(z, out=out)) / 1e12
    return Ceilings(rates, copy, exp2, "measured in this process")


def _seconds(call: Callable[[], object]) -> float:
    """Return the time of the fastest of many calls, with all threads and with one: the threads of a
    busy machine wait for one another.
    """
    timers = (
        Timer("call()", globals={"call": call}, num_threads=n) for n in {1, torch.get_num_threads()}
    )
    return min(min(timer.blocked_autorange(min_run_time=0.1).times) for timer in timers)


# ---- the formulas by which the papers compare standard attention with FlashAttention
# All are for one head of one sequence: N queries, N keys, head dim d. Accesses count elements read
# from or written to HBM. Dao et al., arXiv 2205.14135 (Algorithms 0, 1, 3 and 4).


def flops(n: int, head_dim: int, direction: str = "forward", *, recompute: bool = True) -> int:
    """Return operations of the matrix products, 2 N^2 d each; direction: forward, backward or both.

    4 N^2 d forward. 8 N^2 d backward from stored probabilities; 10 if S is recomputed, as
    FlashAttention does. Both directions: 12 or 14.
    """
    products = {"forward": 2, "backward": 4, "both": 6}[direction]
    return 2 * (products + (recompute and direction != "forward")) * n * n * head_dim


def standard_accesses(n: int, head_dim: int, direction: str = "forward") -> int:
    """Return elements that standard attention moves: every product and softmax reads and writes.

    Forward 4 N^2 + 4 N d: S written and read, P written and read; q, k, v and out.
    Backward 7 N^2 + 8 N d: P read twice, dP and dS written, dP read once, dS twice.
    """
    matrices, vectors = {"forward": (4, 4), "backward": (7, 8), "both": (11, 12)}[direction]
    return matrices * n * n + vectors * n * head_dim


def flash_accesses(n: int, head_dim: int, sram: int, direction: str = "forward") -> int:
    """Return elements that FlashAttention moves with `sram` elements M of fast memory: order
    N^2 d^2 / M.

    Each of the N / B_c tiles of keys and values is loaded once, and meets every query: B_c is
    M / 4 d, since four tiles fill the fast memory. Forward it reads q, out and both statistics and
    writes the last three again; backward it reads q, out, dout, dq and both statistics and writes
    dq.
    """
    passes = -(-n // -(-sram // (4 * head_dim)))
    if direction == "both":
        return sum(flash_accesses(n, head_dim, sram, one) for one in DIRECTIONS)
    if direction == "forward":
        return 2 * n * head_dim + passes * (3 * n * head_dim + 4 * n)
    return 4 * n * head_dim + passes * (5 * n * head_dim + 2 * n)
