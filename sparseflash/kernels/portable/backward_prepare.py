"""Before and after the passes of a backward: delta, the LSE, and the order of dQ.

docs/internals/kernels.md has the mathematics.
"""

import triton
import triton.language as tl

from sparseflash.kernels.common.softmax import sink_probabilities, to_lse_log2
from sparseflash.kernels.portable.common import load_tile, split_program


@triton.jit
def delta_of(
    Out, DOut, DLse, b, h, start,
    stride_ob, stride_oh, stride_on, stride_gb, stride_gh, stride_gn,
    stride_lb, stride_lh, stride_ln, n_q,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr, LSE_GRAD: tl.constexpr,
):  # fmt: skip
    """delta = rowsum(dout * out), minus dlse where there is one: [BLOCK_M]."""
    o_base = Out + b * stride_ob + h * stride_oh
    out = load_tile(o_base, start, stride_on, n_q, BLOCK_M, HEAD_DIM, BLOCK_D, True)
    g_base = DOut + b * stride_gb + h * stride_gh
    dout = load_tile(g_base, start, stride_gn, n_q, BLOCK_M, HEAD_DIM, BLOCK_D, True)
    delta = tl.sum(out.to(tl.float32) * dout.to(tl.float32), 1)
    if LSE_GRAD:
        rows = start + tl.arange(0, BLOCK_M)
        dlse = DLse + b * stride_lb + h * stride_lh + rows.to(tl.int64) * stride_ln
        delta -= tl.load(dlse, mask=rows < n_q, other=0.0).to(tl.float32)
    return delta


@triton.jit
def store_sink_gradient(Sink, DSink, at, delta, lse, inside):
    """Store what the rows of a tile add to the gradient of their head's sink, in place `at`.

    Sink points to that of the head. delta, lse, inside [BLOCK_M]; inside: not beyond the end.
    """
    p = sink_probabilities(tl.load(Sink), lse)
    some = inside & (lse != float("-inf"))
    tl.store(DSink + at, -tl.sum(tl.where(some, p * delta, 0.0), 0))


@triton.jit
def raise_to(Largest, x, inside):
    """Make the bits of a float32 at least those of |x| where it is inside; NaN has the largest."""
    bits = x.to(tl.float32).to(tl.int32, bitcast=True) & 0x7FFFFFFF
    tl.atomic_max(Largest, tl.max(tl.where(inside, bits, 0)), sem="relaxed")


@triton.jit(do_not_specialize=["n_q", "n_k", "n_tiles", "heads"])
def backward_prepare(
    Out, DOut, Lse, DLse, Delta, LseLog2, Sink, DSink,
    stride_ob, stride_oh, stride_on, stride_gb, stride_gh, stride_gn,
    stride_lb, stride_lh, stride_ln,
    n_q, n_tiles, heads,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr, LSE_GRAD: tl.constexpr,
    V=None, Largest=None, v_strides=None, n_k=None, group=None, share=None,
):  # fmt: skip
    """delta and the LSE in base 2, both (B, H, n_q).

    An empty row has delta 0, whatever its dlse, and the LSE +inf, so that its P is 0.
    Where Sink (H,) is not None, DSink (B, H, n_tiles) gets the sums of its gradient over tiles.
    Where Largest (3,) is not None, it gets the bits of the largest |dout| of rows that are not
    empty, finite |v| and share * |delta| + 1e-30, which are float32.
    """
    tile, bh = split_program(n_tiles)
    b = (bh // heads).to(tl.int64)
    h = (bh % heads).to(tl.int64)
    start = tile * BLOCK_M
    delta = delta_of(
        Out, DOut, DLse, b, h, start,
        stride_ob, stride_oh, stride_on, stride_gb, stride_gh, stride_gn,
        stride_lb, stride_lh, stride_ln, n_q, HEAD_DIM, BLOCK_D, BLOCK_M, LSE_GRAD,
    )  # fmt: skip
    rows = start + tl.arange(0, BLOCK_M)
    inside = rows < n_q
    at = bh.to(tl.int64) * n_q + rows
    lse = tl.load(Lse + at, mask=inside, other=0.0)  # [BLOCK_M]
    tl.store(Delta + at, tl.where(lse == float("-inf"), 0.0, delta), mask=inside)
    tl.store(LseLog2 + at, to_lse_log2(lse), mask=inside)
    if Sink is not None:
        store_sink_gradient(Sink + h, DSink, bh * n_tiles + tile, delta, lse, inside)
    if Largest is not None:
        some = inside & (lse != float("-inf"))
        g_base = DOut + b * stride_gb + h * stride_gh
        dout = load_tile(g_base, start, stride_gn, n_q, BLOCK_M, HEAD_DIM, BLOCK_D, True)
        raise_to(Largest, dout, some[:, None])
        v_base = V + b * v_strides[0] + h // group * v_strides[1]
        part = tile * group + bh % group  # of the keys of the head, which its group shares
        for key in tl.range(part * BLOCK_M, n_k, n_tiles * group * BLOCK_M):
            v = load_tile(v_base, key, v_strides[2], n_k, BLOCK_M, HEAD_DIM, BLOCK_D, True)
            raise_to(Largest + 1, v, tl.abs(v.to(tl.float32)) < float("inf"))
        raise_to(Largest + 2, tl.abs(delta) * share + 1e-30, some)
