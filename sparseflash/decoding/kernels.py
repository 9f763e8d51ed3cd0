"""Decoding kernels: few queries against a long cache, split along the keys.

The queries of all heads that share a key head are the rows of one tile, so keys and values are
read once. A program takes one part of the key tiles; `merge_splits` adds the parts up.
docs/internals/kernels.md has the mathematics.
"""

import triton
import triton.language as tl

from sparseflash.kernels.common.softmax import (
    LN2,
    LOG2E,
    finite,
    natural_lse,
    natural_max,
    nonzero,
    with_nan,
    with_sink,
)  # fmt: skip
from sparseflash.kernels.portable.common import block_start, row_bits
from sparseflash.kernels.portable.forward import online_softmax

# kernel arguments of which every value takes the same compiled kernel
UNSPECIALIZED = (
    "n_q", "n_k", "n_parts", "n_tiles", "n_heads", "pack", "group", "mask_stride_b",
    "mask_stride_h", "stride_table", "stride_part", "stride_part_lse",
)  # fmt: skip
MIN_TILES = tl.constexpr(2)  # of a part: a shorter list has fewer parts


@triton.jit(do_not_specialize=UNSPECIALIZED)
def decode_parts(
    Q, K, V, Out, Lse, MaxScores, lengths, starts, table, row_ptr, col_idx, tile_idx, bits,
    stride_qb, stride_qh, stride_qn, stride_kb, stride_kh, stride_kn,
    stride_vb, stride_vh, stride_vn, stride_ob, stride_oh, stride_on,
    stride_part, stride_part_lse, stride_table, scale_log2,
    n_q, n_k, n_parts, n_tiles, n_heads, pack, group, mask_stride_b, mask_stride_h,
    HEAD_DIM: tl.constexpr, HEAD_DIM_V: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr,
    PAGE: tl.constexpr, LENGTHS: tl.constexpr, STARTS: tl.constexpr, LISTED: tl.constexpr,
    FROM_END: tl.constexpr, PARTIAL: tl.constexpr, CAUSAL: tl.constexpr, PRECISION: tl.constexpr,
    LAST: tl.constexpr, score_args=None, SCORE: tl.constexpr = None,
):  # fmt: skip
    """q (B, H_q, n_q, HEAD_DIM) and a cache -> parts of Out (B, H_q, n_q, HEAD_DIM_V) and of Lse
    (B, H_q, n_q), stride_part and stride_part_lse apart, and unless it is None MaxScores like Lse.

    Row r of a tile is query r // pack of head r % pack of the n_heads packs of query heads.
    PAGE: tokens of a page, where `table` names the pages of a sequence; 0: k (B, H_kv, n_k, D).
    LENGTHS: whether `lengths` limits the keys, or n_k does. STARTS: whether `starts` does.
    LISTED: whether there are lists of key blocks. FROM_END: whether query i takes their row
    length - n_q + i, or row i. CAUSAL: no lists, and query i sees the keys up to that position.
    LAST: whether a score gets query i as token length - n_q + i of as many, or as i of n_q.
    """
    pid = tl.program_id(0)
    tile = pid % n_tiles
    part = pid // n_tiles % n_parts
    pack_of = pid // n_tiles // n_parts
    b = (pack_of // n_heads).to(tl.int64)
    head = pack_of % n_heads
    n = n_k
    if LENGTHS:
        n = tl.minimum(tl.maximum(tl.load(lengths + b), 0), n_k).to(tl.int32)
    first_key = 0
    if STARTS:
        first_key = tl.minimum(tl.maximum(tl.load(starts + b), 0), n).to(tl.int32)

    row = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    query = row // pack
    q_head = (head * pack + row % pack).to(tl.int64)
    exists = query < n_q
    first_position = n - n_q if FROM_END else 0
    position = first_position + query  # negative: before the first token, so it sees nothing
    dim = tl.arange(0, BLOCK_D)
    dim_v = tl.arange(0, BLOCK_DV)
    q_at = b * stride_qb + q_head * stride_qh + query * stride_qn
    q_inside = exists[:, None] & (dim < HEAD_DIM)[None, :]
    q = tl.load(Q + q_at[:, None] + dim[None, :], mask=q_inside, other=0.0)  # [BLOCK_M, BLOCK_D]
    kv_head = (head * pack // group).to(tl.int64)
    k_base = K + kv_head * stride_kh
    v_base = V + kv_head * stride_vh

    m = tl.full([BLOCK_M], float("-inf"), tl.float32)
    l = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_DV], tl.float32)
    first_list = 0
    end_list = 1
    if LISTED:  # one for every query block that the positions lie in
        first_list = tl.maximum(first_position, 0) // BLOCK_Q
        end_list = tl.where(n > 0, (tl.maximum(first_position + n_q, 0) - 1) // BLOCK_Q + 1, 0)
    for i in range(first_list, end_list):
        if LISTED:
            ptr = row_ptr + b * mask_stride_b + head * mask_stride_h + i
            begin = tl.load(ptr)
            total = (tl.load(ptr + 1) - begin).to(tl.int32) * (BLOCK_K // BLOCK_N)
            blocks = col_idx + begin
            tiles = tile_idx + begin
            own_row = exists & (position >= 0) & (position // BLOCK_Q == i)
        else:
            total = tl.cdiv(n, BLOCK_N) - first_key // BLOCK_N
            blocks = col_idx
            tiles = tile_idx
            own_row = exists
        busy = tl.maximum(tl.minimum(n_parts, tl.cdiv(total, MIN_TILES)), 1)
        start_t = total * tl.minimum(part, busy) // busy
        end_t = total * tl.minimum(part + 1, busy) // busy
        for t in range(start_t, end_t):
            skipped = 0 if LISTED else first_key // BLOCK_N
            start = block_start(blocks, t + skipped, BLOCK_K, BLOCK_N, not LISTED)
            key = start + tl.arange(0, BLOCK_N)
            real = key < n
            if STARTS:
                real = real & (key >= first_key)
            if PAGE == 0:
                cell = b
                slot = key
            elif PAGE % BLOCK_N == 0:  # a tile lies in one page
                at = table + b * stride_table + start // PAGE
                cell = tl.load(at, mask=start < n, other=0).to(tl.int64)
                slot = key % PAGE
            else:
                at = table + b * stride_table + key // PAGE
                cell = tl.load(at, mask=real, other=0).to(tl.int64)  # [BLOCK_N]
                slot = key % PAGE
            slot = slot.to(tl.int64)
            k_at = (cell * stride_kb + slot * stride_kn)[:, None] + dim[None, :]
            k_inside = real[:, None] & (dim < HEAD_DIM)[None, :]
            k = tl.load(k_base + k_at, mask=k_inside, other=0.0)  # [BLOCK_N, BLOCK_D]
            s = tl.dot(q, k.T, input_precision=PRECISION)  # [BLOCK_M, BLOCK_N]
            allowed = own_row[:, None] & real[None, :]
            if CAUSAL:
                allowed = allowed & (key[None, :] <= position[:, None])
            if PARTIAL:
                code = tl.load(tiles + t // (BLOCK_K // BLOCK_N))
                bit_row = tl.maximum(code, 0).to(tl.int64) * BLOCK_Q
                bit_row += tl.maximum(position, 0) % BLOCK_Q  # [BLOCK_M]
                bit = row_bits(bits, bit_row, start % BLOCK_K, BLOCK_K, BLOCK_N, False)
                allowed = allowed & (bit | (code < 0))
            unit, add = scale_log2, None
            if SCORE is not None:  # of a function for pairs
                n_own = n if LAST else n_q
                token = tl.maximum(tl.minimum(n_own - n_q + query, n_own - 1), 0)
                s, unit, add, _kept = SCORE(
                    s, scale_log2 * LN2, (), b.to(tl.int32), q_head.to(tl.int32)[:, None],
                    token[:, None], tl.minimum(key, tl.maximum(n - 1, 0))[None, :], n_own, n, 0,
                    score_args, BLOCK_M, BLOCK_N, False, q.dtype != tl.float32,
                )  # fmt: skip
            s = tl.where(allowed, s, float("-inf"))
            p, alpha, m, l = online_softmax(s, m, l, unit, True, False, add)
            v_at = (cell * stride_vb + slot * stride_vn)[:, None] + dim_v[None, :]
            v_inside = real[:, None] & (dim_v < HEAD_DIM_V)[None, :]
            v = tl.load(v_base + v_at, mask=v_inside, other=0.0)  # [BLOCK_N, BLOCK_DV]
            acc = tl.dot(p.to(v.dtype), v, acc * alpha[:, None], input_precision=PRECISION)

    total_l = nonzero(l)
    out = (acc / total_l[:, None]).to(Out.dtype.element_ty)
    part_at = part.to(tl.int64)
    o_at = part_at * stride_part + b * stride_ob + q_head * stride_oh + query * stride_on
    o_inside = exists[:, None] & (dim_v < HEAD_DIM_V)[None, :]
    tl.store(Out + o_at[:, None] + dim_v[None, :], out, mask=o_inside)
    lse_at = part_at * stride_part_lse + (b * n_heads * pack + q_head) * n_q + query
    tl.store(Lse + lse_at, natural_lse(m, total_l), mask=exists)
    if MaxScores is not None:
        tl.store(MaxScores + lse_at, natural_max(with_nan(m, l)), mask=exists)


@triton.jit(do_not_specialize=["n_parts", "n_rows", "heads", "n_q"])
def merge_splits(
    parts, part_lse, part_max, out, lse, max_scores, sink, stride_ob, stride_oh, stride_on,
    n_parts, n_rows, heads, n_q,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_P: tl.constexpr,
):  # fmt: skip
    """Weigh the parts of a row by the exponentials of their LSE, in their order.

    parts float32 (n_parts, n_rows, HEAD_DIM) and part_lse (n_parts, n_rows) -> out (B, H, n_q,
    HEAD_DIM), with strides, and lse (n_rows), of n_rows = B * H * n_q. A program takes one row.
    A part with nothing to attend to has the LSE -inf; where all have it, out is 0 and lse -inf.
    sink: float32 (H,), a logit for each head that joins the whole, or None. part_max, like
    part_lse -> max_scores, like lse, the largest of all parts; or both None.
    """
    row = tl.program_id(0).to(tl.int64)
    col = tl.arange(0, BLOCK_D)
    m = tl.full([1], float("-inf"), tl.float32)
    total = tl.zeros([1], tl.float32)
    top = tl.full([1], float("-inf"), tl.float32)
    acc = tl.zeros([BLOCK_D], tl.float32)
    for first in range(0, n_parts, BLOCK_P):
        part = first + tl.arange(0, BLOCK_P)
        at = part.to(tl.int64) * n_rows + row
        own = tl.load(part_lse + at, mask=part < n_parts, other=float("-inf"))  # [BLOCK_P]
        m_new = tl.maximum(m, tl.max(own, 0))
        shift = finite(m_new)
        weight = tl.exp(own - shift)  # [BLOCK_P]
        alpha = tl.exp(m - shift)
        inside = (own > float("-inf"))[:, None] & (col < HEAD_DIM)[None, :]
        values = tl.load(parts + at[:, None] * HEAD_DIM + col[None, :], mask=inside, other=0.0)
        acc = acc * alpha + tl.sum(weight[:, None] * values, 0)
        total = total * alpha + tl.sum(weight, 0)
        m = m_new
        if max_scores is not None:
            own = tl.load(part_max + at, mask=part < n_parts, other=float("-inf"))  # [BLOCK_P]
            top = tl.maximum(top, tl.max(own, 0))
    if max_scores is not None:
        tl.store(max_scores + row + tl.arange(0, 1), with_nan(top, total))
    if sink is not None:  # one more key, whose value is 0
        m, total, alpha = with_sink(m * LOG2E, total, tl.load(sink + row // n_q % heads))
        m *= LN2
        acc *= alpha
    total = nonzero(total)
    place = out + row // n_q // heads * stride_ob + row // n_q % heads * stride_oh
    place += row % n_q * stride_on
    tl.store(place + col, (acc / total).to(out.dtype.element_ty), mask=col < HEAD_DIM)
    tl.store(lse + row + tl.arange(0, 1), m + tl.log(total))
