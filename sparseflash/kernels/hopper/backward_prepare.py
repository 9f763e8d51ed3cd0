"""Before and after the passes of the Hopper backward: row sums, and the order of dQ's float32
buffer; the sums of split tiles.
"""

import triton
import triton.language as tl

from sparseflash.kernels.tl.common import load_tile, store_tile


@triton.jit(do_not_specialize=["n_q", "n_pad", "heads"])
def backward_prepare(
    Out, DOut, Lse, DLse, Delta, Start, DQ,
    stride_ob, stride_oh, stride_on, stride_gb, stride_gh, stride_gn,
    stride_lb, stride_lh, stride_ln,
    n_q, n_pad, heads, inverse_scale,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, DQ_D: tl.constexpr, BLOCK_M: tl.constexpr,
    LSE_GRAD: tl.constexpr, CLEAR: tl.constexpr,
):  # fmt: skip
    """Where the sums of the passes begin, (B, H, n_pad): Delta = dlse - rowsum(out * dout) for dP
    and Start = -lse / scale for S. Clears the float32 buffer of dQ.

    Empty rows, and those beyond the end, begin at 0 and -inf, so that their probabilities are 0.
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
        dim = tl.arange(0, DQ_D)
        tl.store(DQ + at[:, None] * DQ_D + dim[None, :], tl.zeros([BLOCK_M, DQ_D], tl.float32))
    o_base = Out + b * stride_ob + h * stride_oh
    out = load_tile(o_base, start, stride_on, n_q, BLOCK_M, HEAD_DIM, BLOCK_D, True)
    g_base = DOut + b * stride_gb + h * stride_gh
    dout = load_tile(g_base, start, stride_gn, n_q, BLOCK_M, HEAD_DIM, BLOCK_D, True)
    delta = -tl.sum(out.to(tl.float32) * dout.to(tl.float32), 1)
    inside = rows < n_q
    if LSE_GRAD:
        dlse = DLse + b * stride_lb + h * stride_lh + rows.to(tl.int64) * stride_ln
        delta += tl.load(dlse, mask=inside, other=0.0).to(tl.float32)
    lse = tl.load(Lse + bh.to(tl.int64) * n_q + rows, mask=inside, other=float("-inf"))
    empty = lse == float("-inf")
    tl.store(Delta + at, tl.where(empty, 0.0, delta))  # whatever dlse is there
    tl.store(Start + at, tl.where(empty, float("-inf"), -lse * inverse_scale))


@triton.jit(do_not_specialize=["n_q", "n_pad", "heads"])
def backward_finish(
    Sum, DQ, stride_b, stride_h, stride_n, n_q, n_pad, heads, scale,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr,
):  # fmt: skip
    """dQ from its float32 sums, which lie in slabs of 16 rows in the order of wgmma's registers."""
    # backwards, because L2 holds the last heads
    pid = tl.num_programs(0) - 1 - tl.program_id(0)
    n_tiles = n_pad // BLOCK_M
    start = pid % n_tiles * BLOCK_M
    bh = pid // n_tiles
    first = (bh.to(tl.int64) * n_pad + start) * BLOCK_D
    x = tl.load(Sum + first + tl.arange(0, BLOCK_M * BLOCK_D))
    # slab, 8 columns, row in 8, column pair, half of the slab, column in the pair
    x = tl.reshape(x, [BLOCK_M // 16, BLOCK_D // 8, 8, 4, 2, 2])
    x = tl.reshape(tl.permute(x, (0, 4, 2, 1, 3, 5)), [BLOCK_M, BLOCK_D]) * scale
    base = DQ + (bh // heads).to(tl.int64) * stride_b + (bh % heads).to(tl.int64) * stride_h
    store_tile(base, start, stride_n, n_q, x, BLOCK_M, HEAD_DIM, BLOCK_D)


@triton.jit(do_not_specialize=["n", "heads", "n_parts", "n_merge", "list_batch", "list_heads"])
def backward_merge(
    Parts, Merge, Out, stride_b, stride_h, stride_n, n, heads, n_parts, n_merge,
    list_batch, list_heads,
    WIDTH: tl.constexpr, FIRST: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr,
    MAJOR: tl.constexpr, BLOCK_M: tl.constexpr,
):  # fmt: skip
    """Sum the parts of the tiles that were split, always in the same order."""
    chunk = tl.program_id(0) % (MAJOR // BLOCK_M) * BLOCK_M
    i = tl.program_id(0) // (MAJOR // BLOCK_M) % n_merge
    bh = tl.program_id(0) // (MAJOR // BLOCK_M) // n_merge
    b = bh // heads
    h = bh % heads
    slice_ = tl.where(list_batch > 1, b, 0) * list_heads + tl.where(list_heads > 1, h, 0)
    merge = Merge + (slice_ * n_merge + i) * 4
    tile = tl.load(merge)
    if tile >= 0:
        slot = bh.to(tl.int64) * n_parts + tl.load(merge + 1)
        row = chunk + tl.arange(0, BLOCK_M)
        inside = row[:, None] * WIDTH + FIRST + tl.arange(0, BLOCK_D)[None, :]
        x = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
        for part in range(tl.load(merge + 2)):
            x += tl.load(Parts + (slot + part) * (MAJOR * WIDTH) + inside)
        base = Out + b.to(tl.int64) * stride_b + h.to(tl.int64) * stride_h
        store_tile(base, tile * MAJOR + chunk, stride_n, n, x, BLOCK_M, HEAD_DIM, BLOCK_D)
