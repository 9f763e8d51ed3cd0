"""Attention over parts of the keys -> attention over all of them."""

import triton
import triton.language as tl


@triton.jit
def merge_parts(
    part_out, part_lse, merge, out, lse, n_split, n_parts, list_batch, list_heads, heads, n_q, dim,
    stride_b, stride_h, stride_n,
    ROWS: tl.constexpr, DIM: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Weigh the parts of a split tile by the exponentials of their LSE, in the order of the slots.

    part_out float32 (B * H, n_parts, ROWS, DIM) and part_lse (B * H, n_parts, ROWS) -> out
    (B, H, n_q, dim), with strides, and lse (B * H, n_q). merge: see `TileLists`.
    """
    bh = tl.program_id(1).to(tl.int64)
    b = tl.where(list_batch > 1, bh // heads, 0)
    h = tl.where(list_heads > 1, bh % heads, 0)
    entry = merge + ((b * list_heads + h) * n_split + tl.program_id(0)) * 4
    tile, first, count = tl.load(entry), tl.load(entry + 1), tl.load(entry + 2)
    if tile >= 0:
        start = tl.program_id(2) * BLOCK
        row = start + tl.arange(0, BLOCK)
        col = tl.arange(0, DIM)
        slot = (bh * n_parts + first) * ROWS + row
        top = tl.full([BLOCK], float("-inf"), tl.float32)
        for i in range(count):
            top = tl.maximum(top, tl.load(part_lse + slot + i * ROWS))
        top_finite = tl.where(top == float("-inf"), 0.0, top)
        total = tl.zeros([BLOCK], tl.float32)
        acc = tl.zeros([BLOCK, DIM], tl.float32)
        for i in range(count):
            at = slot + i * ROWS
            weight = tl.exp(tl.load(part_lse + at) - top_finite)
            total += weight
            acc += weight[:, None] * tl.load(part_out + at[:, None] * DIM + col[None, :])
        q = tile * ROWS + row
        acc = acc / tl.where(total > 0, total, 1.0)[:, None]
        place = out + (bh // heads) * stride_b + (bh % heads) * stride_h
        place += q.to(tl.int64)[:, None] * stride_n + col[None, :]
        tl.store(
            place, acc.to(out.dtype.element_ty), mask=(q < n_q)[:, None] & (col < dim)[None, :]
        )
        tl.store(lse + bh * n_q + q, tl.log(total) + top, mask=q < n_q)
