"""Copies of blocks of tokens that travel between devices, and what comes back added or merged.

A unit is a block of tokens in one slice of the heads and the batch, see
sparseflash/distributed/exchange.py. Packed units are (units, size, rest, h, width), contiguous.
"""

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from sparseflash.kernels.common.launch import launch
from sparseflash.kernels.common.softmax import finite, nonzero

ROWS = 32  # of a program
START_CYCLES = 30_000


def pack(
    tensors: Sequence[Tensor], unit: Tensor, slices: tuple[int, int], size: int, blocks: int
) -> Tensor:
    """Return packed units of tensors (B, H, N, .) side by side; 0 behind their ends."""
    width = sum(x.shape[3] for x in tensors)
    first = tensors[0]
    rest, heads = first.shape[0] // slices[0], first.shape[1] // slices[1]
    packed = first.new_empty(len(unit), size, rest, heads, width)
    _units(tensors, unit, None, None, packed, slices, size, blocks)
    return packed


def unpack(tensors: Sequence[Tensor], unit: Tensor, packed: Tensor, *place: Any) -> None:
    """Replace units of the tensors by packed ones; place: the last arguments of `pack`."""
    _units(tensors, unit, unit, None, packed, *place)


def add(
    tensors: Sequence[Tensor], unit: Tensor, first: Tensor, come: Tensor, packed: Tensor,
    *place: Any,
) -> None:  # fmt: skip
    """Add packed units to those of the tensors, in place and in float32.

    Unit i gets the sum of packed[come[j]] with first[i] <= j < first[i + 1], in this order.
    """
    _units(tensors, unit, first, come, packed, *place)


def merge(out: Tensor, lse: Tensor, other: Tensor, other_lse: Tensor, rows: Tensor | None) -> None:
    """Merge attention over further keys into `out`, in place, each weighed by its LSE.

    Args:
        out: (B, H, N, D), innermost stride 1; lse: (B, H, N) float32, contiguous.
        other, other_lse: the same of R rows.
        rows: (R,) int64, which of the N these are; None: all.

    A part with nothing to attend to has the LSE -inf and output 0.
    """
    heads, n, dim = out.shape[1:]
    count = other.shape[2]
    grid = triton.cdiv(count, ROWS), out.shape[0] * heads
    with torch.cuda.device_of(out):
        launch(
            _merge, grid, out, lse, other, other_lse.contiguous(), rows, *out.stride()[:3],
            *other.stride()[:3], heads, n, count, dim, BLOCK_D=triton.next_power_of_2(dim),
            ROWS=ROWS,
        )  # fmt: skip


def let_transfer_start(device: torch.device) -> None:
    """Keep the stream busy on one multiprocessor for some microseconds.

    A persistent kernel that begins before the transfer would leave it no multiprocessor.
    """
    with torch.cuda.device(device):
        torch.cuda._sleep(START_CYCLES)


def _units(tensors, unit, first, come, packed, slices, size, blocks):
    offset, (_, _, rest, heads, width) = 0, packed.shape
    grid = len(unit), triton.cdiv(size * rest * heads, ROWS)
    for x in tensors if len(unit) else ():
        n, dim = x.shape[2:]
        with torch.cuda.device_of(x):
            launch(
                _copy, grid, x, unit, first, come, packed, *x.stride()[:3], n, blocks, slices[1],
                size, rest, heads, dim, width, offset, BLOCK_D=triton.next_power_of_2(dim),
                ROWS=ROWS,
            )  # fmt: skip
        offset += dim


@triton.jit(do_not_specialize=["n", "blocks", "offset"])
def _copy(
    x, unit, first, come, packed, stride_b, stride_h, stride_n, n, blocks, slices, size, rest,
    heads, dim, width, offset, BLOCK_D: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    i = tl.program_id(0)
    u = tl.load(unit + i)
    line, block = u // blocks, u % blocks
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    in_unit = size * rest * heads
    inside = row < in_unit
    token = block * size + row // (rest * heads)
    b, h = line // slices * rest + row // heads % rest, line % slices * heads + row % heads
    col = tl.arange(0, BLOCK_D)
    kept = (inside & (token < n))[:, None] & (col < dim)[None, :]
    own = x + (b * stride_b + h * stride_h + token * stride_n)[:, None] + col[None, :]
    line_at = row.to(tl.int64)[:, None] * width + offset + col[None, :]
    if come is None:
        at = packed + i.to(tl.int64) * in_unit * width + line_at
        if first is None:
            value = tl.load(own, mask=kept, other=0.0)
            tl.store(at, value, mask=inside[:, None] & (col < dim)[None, :])
        else:
            tl.store(own, tl.load(at, mask=kept), mask=kept)
    else:
        total = tl.load(own, mask=kept, other=0.0).to(tl.float32)
        for j in range(tl.load(first + i), tl.load(first + i + 1)):
            at = packed + tl.load(come + j) * in_unit * width + line_at
            total += tl.load(at, mask=kept, other=0.0).to(tl.float32)
        tl.store(own, total.to(x.dtype.element_ty), mask=kept)


@triton.jit(do_not_specialize=["n", "count"])
def _merge(
    out, lse, other, other_lse, rows, stride_b, stride_h, stride_n, other_b, other_h, other_n,
    heads, n, count, dim, BLOCK_D: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    bh = tl.program_id(1).to(tl.int64)
    line = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    inside = line < count
    row = line
    if rows is not None:
        row = tl.load(rows + line, mask=inside, other=0)
    row, line = row.to(tl.int64), line.to(tl.int64)
    first = tl.load(lse + bh * n + row, mask=inside, other=0.0)
    second = tl.load(other_lse + bh * count + line, mask=inside, other=0.0)
    m = tl.maximum(first, second)
    shift = finite(m)
    a, b = tl.exp(first - shift), tl.exp(second - shift)
    total = a + b
    col = tl.arange(0, BLOCK_D)
    whole = inside[:, None] & (col < dim)[None, :]
    place = out + bh // heads * stride_b + bh % heads * stride_h
    place += row[:, None] * stride_n + col[None, :]
    come = other + bh // heads * other_b + bh % heads * other_h
    come += line[:, None] * other_n + col[None, :]
    x = tl.load(place, mask=whole, other=0.0).to(tl.float32) * a[:, None]
    x += tl.load(come, mask=whole, other=0.0).to(tl.float32) * b[:, None]
    tl.store(place, (x / nonzero(total)[:, None]).to(out.dtype.element_ty), mask=whole)
    tl.store(lse + bh * n + row, tl.log(total) + m, mask=inside)
