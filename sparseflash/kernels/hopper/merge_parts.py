"""Sums over split tiles: attention over parts of the keys, gradients over parts of lists.

A split tile has several slots, one for each part; `merge` says which (see `TileLists`).
docs/internals/kernels.md has the mathematics.
"""

import triton
import triton.language as tl

from sparseflash.kernels.common.softmax import finite, nonzero
from sparseflash.kernels.portable.common import store_tile


@triton.jit
def merge_parts(
    part_out, part_lse, merge, out, lse, sink, part_max, max_scores,
    n_split, n_parts, list_batch, list_heads, heads, n_q, dim, stride_b, stride_h, stride_n,
    BLOCK_M: tl.constexpr, BLOCK_DV: tl.constexpr, ROWS: tl.constexpr, PACK: tl.constexpr,
):  # fmt: skip
    """Weigh the parts of a split tile by the exponentials of their LSE, in the order of the slots.

    part_out float32 (B * H, n_parts, BLOCK_M, BLOCK_DV) and part_lse (B * H, n_parts, BLOCK_M) ->
    out (B, H, n_q, dim), with strides, and lse (B * H, n_q). A program takes ROWS rows of a tile.
    Of PACK heads, the rows of a part lie side by side.
    A part with nothing to attend to has the LSE -inf; where all have it, out is 0 and lse -inf.
    sink: float32 (H,), a logit for each head that joins the whole once, or None. part_max, like
    part_lse -> max_scores, like lse, the largest of all parts; or both None.
    """
    bh = tl.program_id(1).to(tl.int64)
    b = tl.where(list_batch > 1, bh // heads, 0)
    h = tl.where(list_heads > 1, bh % heads, 0)
    entry = merge + ((b * list_heads + h) * n_split + tl.program_id(0)) * 4
    tile, first, count = tl.load(entry), tl.load(entry + 1), tl.load(entry + 2)
    if tile >= 0:
        row = tl.program_id(2) * ROWS + tl.arange(0, ROWS)
        col = tl.arange(0, BLOCK_DV)
        slot = ((bh // PACK * n_parts + first) * PACK + bh % PACK) * BLOCK_M + row
        m = tl.full([ROWS], float("-inf"), tl.float32)
        for i in range(count):
            m = tl.maximum(m, tl.load(part_lse + slot + i * (PACK * BLOCK_M)))  # [ROWS]
        if sink is not None:  # one more part, whose output is 0
            logit = tl.load(sink + bh % heads)
            m = tl.maximum(m, logit)
        shift = finite(m)
        total = tl.zeros([ROWS], tl.float32)
        if sink is not None:
            total += tl.exp(logit - shift)
        acc = tl.zeros([ROWS, BLOCK_DV], tl.float32)
        for i in range(count):
            at = slot + i * (PACK * BLOCK_M)
            weight = tl.exp(tl.load(part_lse + at) - shift)  # [ROWS]
            total += weight
            # [ROWS, BLOCK_DV]
            acc += weight[:, None] * tl.load(part_out + at[:, None] * BLOCK_DV + col[None, :])
        q = tile * BLOCK_M + row
        acc = acc / nonzero(total)[:, None]
        place = out + (bh // heads) * stride_b + (bh % heads) * stride_h
        place += q.to(tl.int64)[:, None] * stride_n + col[None, :]
        inside = (q < n_q)[:, None] & (col < dim)[None, :]
        tl.store(place, acc.to(out.dtype.element_ty), mask=inside)
        tl.store(lse + bh * n_q + q, tl.log(total) + m, mask=q < n_q)
        if max_scores is not None:
            top = tl.full([ROWS], float("-inf"), tl.float32)
            for i in range(count):
                own = tl.load(part_max + slot + i * (PACK * BLOCK_M))  # [ROWS]
                top = tl.maximum(top, own, propagate_nan=tl.PropagateNan.ALL)
            tl.store(max_scores + bh * n_q + q, top, mask=q < n_q)


@triton.jit(do_not_specialize=["n", "heads", "n_parts", "n_split", "list_batch", "list_heads"])
def backward_merge(
    parts, merge, out, stride_b, stride_h, stride_n, n, heads, n_parts, n_split,
    list_batch, list_heads,
    WIDTH: tl.constexpr, FIRST: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr,
    TILE: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Sum the parts of the tiles that were split, always in the same order.

    parts float32 (B * H, n_parts, TILE, WIDTH), of which the columns FIRST.. hold this gradient ->
    out (B, H, n, HEAD_DIM), with strides. A program takes ROWS rows of a tile.
    """
    start = tl.program_id(0) % (TILE // ROWS) * ROWS
    i = tl.program_id(0) // (TILE // ROWS) % n_split
    bh = tl.program_id(0) // (TILE // ROWS) // n_split
    b = bh // heads
    h = bh % heads
    list_ = tl.where(list_batch > 1, b, 0) * list_heads + tl.where(list_heads > 1, h, 0)
    entry = merge + (list_ * n_split + i) * 4
    tile = tl.load(entry)
    if tile >= 0:
        slot = bh.to(tl.int64) * n_parts + tl.load(entry + 1)
        row = start + tl.arange(0, ROWS)
        at = row[:, None] * WIDTH + FIRST + tl.arange(0, BLOCK_D)[None, :]
        acc = tl.zeros([ROWS, BLOCK_D], tl.float32)
        for part in range(tl.load(entry + 2)):
            acc += tl.load(parts + (slot + part) * (TILE * WIDTH) + at)  # [ROWS, BLOCK_D]
        base = out + b.to(tl.int64) * stride_b + h.to(tl.int64) * stride_h
        store_tile(base, tile * TILE + start, stride_n, n, acc, ROWS, HEAD_DIM, BLOCK_D)
