"""Attention of some rows over further keys, merged into that over the first ones."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from sparseflash.kernels.launch import FUSED
from sparseflash.kernels.softmax import finite, nonzero

ROWS = 16  # of a program


def merge_rows(out: Tensor, lse: Tensor, other: Tensor, other_lse: Tensor, rows: Tensor | None):
    """Merge `other` into `out` in place, each weighed by the exponential of its LSE.

    Args:
        out: (B, H, N, D), innermost stride 1; lse: (B, H, N) float32, contiguous.
        other, other_lse: the same of R rows.
        rows: (R,) int64, which of the N these are; None: all.

    A part with nothing to attend to has the LSE -inf and output 0.
    """
    heads, n, dim = out.shape[1:]
    count = other.shape[2]
    grid = triton.cdiv(count, ROWS), out.shape[0] * heads
    with torch.cuda.device(out.device):
        _merge[grid](
            out, lse, other, other_lse.contiguous(), rows, *out.stride()[:3], *other.stride()[:3],
            heads, n, count, dim, BLOCK_D=triton.next_power_of_2(dim), ROWS=ROWS, **FUSED,
        )  # fmt: skip


@triton.jit
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
