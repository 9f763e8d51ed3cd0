"""Before and after the Hopper passes of a backward: delta, the LSE, and the order of dQ.

docs/internals/kernels.md has the mathematics.
"""

import triton
import triton.language as tl

from sparseflash.kernels.common.softmax import to_lse_log2
from sparseflash.kernels.portable.backward_prepare import delta_of, store_sink_gradient
from sparseflash.kernels.portable.common import store_tile


@triton.jit(do_not_specialize=["n_q", "n_pad", "heads"])
def backward_start(
    Out, DOut, Lse, DLse, NegDelta, LseLog2, Counters, DQSum, Sink, DSink,
    stride_ob, stride_oh, stride_on, stride_gb, stride_gh, stride_gn,
    stride_lb, stride_lh, stride_ln,
    n_q, n_pad, heads,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, DQ_BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr,
    LSE_GRAD: tl.constexpr, CLEAR: tl.constexpr,
):  # fmt: skip
    """Store what the Hopper passes need of every query, both (B, H, n_pad): -delta, where the sums
    of dP begin, and the LSE in base 2. Clears the float32 buffer of dQ and the two counters of
    tiles.

    Empty rows, and those beyond the end, have delta 0 and the LSE +inf, so that their P is 0.
    Where Sink (H,) is not None, DSink (B, H, n_pad / BLOCK_M) gets its gradient by tiles.
    """
    # backwards, so that L2 holds the first heads, with which the next kernel begins
    pid = tl.num_programs(0) - 1 - tl.program_id(0)
    n_tiles = n_pad // BLOCK_M
    start = pid % n_tiles * BLOCK_M
    bh = pid // n_tiles
    b = (bh // heads).to(tl.int64)
    h = (bh % heads).to(tl.int64)
    rows = start + tl.arange(0, BLOCK_M)
    at = bh.to(tl.int64) * n_pad + rows
    if CLEAR:
        dim = tl.arange(0, DQ_BLOCK_D)
        zeros = tl.zeros([BLOCK_M, DQ_BLOCK_D], tl.float32)
        tl.store(DQSum + at[:, None] * DQ_BLOCK_D + dim[None, :], zeros)
    delta = delta_of(
        Out, DOut, DLse, b, h, start,
        stride_ob, stride_oh, stride_on, stride_gb, stride_gh, stride_gn,
        stride_lb, stride_lh, stride_ln, n_q, HEAD_DIM, BLOCK_D, BLOCK_M, LSE_GRAD,
    )  # fmt: skip
    neg_delta = -delta
    inside = rows < n_q
    lse = tl.load(Lse + bh.to(tl.int64) * n_q + rows, mask=inside, other=float("-inf"))
    tl.store(NegDelta + at, tl.where(lse == float("-inf"), 0.0, neg_delta))
    tl.store(LseLog2 + at, to_lse_log2(lse))
    if Sink is not None:
        store_sink_gradient(Sink + h, DSink, pid, delta, lse, inside)
    if pid == 0:
        tl.store(Counters + tl.arange(0, 2), tl.zeros([2], tl.int32))


@triton.jit(do_not_specialize=["n_q", "n_pad", "heads"])
def backward_finish(
    DQSum, DQ, stride_b, stride_h, stride_n, n_q, n_pad, heads, scale,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr,
):  # fmt: skip
    """dQ from its float32 sums, which lie in slabs of 16 rows in the order of wgmma's registers."""
    # backwards, because L2 holds the last heads
    pid = tl.num_programs(0) - 1 - tl.program_id(0)
    n_tiles = n_pad // BLOCK_M
    start = pid % n_tiles * BLOCK_M
    bh = pid // n_tiles
    first = (bh.to(tl.int64) * n_pad + start) * BLOCK_D
    x = tl.load(DQSum + first + tl.arange(0, BLOCK_M * BLOCK_D))  # [BLOCK_M * BLOCK_D]
    # slab, 8 columns, row in 8, column pair, half of the slab, column in the pair
    x = tl.reshape(x, [BLOCK_M // 16, BLOCK_D // 8, 8, 4, 2, 2])
    x = (
        tl.reshape(tl.permute(x, (0, 4, 2, 1, 3, 5)), [BLOCK_M, BLOCK_D]) * scale
    )  # [BLOCK_M, BLOCK_D]
    base = DQ + (bh // heads).to(tl.int64) * stride_b + (bh % heads).to(tl.int64) * stride_h
    store_tile(base, start, stride_n, n_q, x, BLOCK_M, HEAD_DIM, BLOCK_D)
