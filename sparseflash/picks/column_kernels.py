"""dK and dV of attention to picked blocks, by the inverse lists: a program computes some of the
queries that picked one block, whose rows of q it gathers. A block that many picked has several
parts, which are added up in order.
"""

import triton
import triton.language as tl

from sparseflash.kernels.common.softmax import gradient_scale, probabilities, to_lse_log2
from sparseflash.kernels.portable.common import load_tile, store_tile
from sparseflash.picks.row_kernels import UNSPECIALIZED, hidden_from, load_at


@triton.jit(do_not_specialize=UNSPECIALIZED)
def picks_backward_kv(
    Q, K, V, DOut, Lse, Delta, PartK, PartV, Queries, Ptr, FirstPart, Owner,
    stride_qb, stride_qh, stride_qn, stride_kb, stride_kh, stride_kn,
    stride_vb, stride_vh, stride_vn, stride_gb, stride_gh, stride_gn,
    scale_log2, n_q, n_k, sel_heads, n_blocks, n_lists, part_length,
    GROUP: tl.constexpr, SHARE: tl.constexpr,
    HEAD_DIM: tl.constexpr, HEAD_DIM_V: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
    TOKENS: tl.constexpr, ROWS: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK: tl.constexpr,
    CAUSAL: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """PartK (parts, BLOCK, HEAD_DIM) and PartV (parts, BLOCK, HEAD_DIM_V), float32.

    Queries: those that picked a block, list for list; Ptr: where each list begins; FirstPart: the
    first part of each; Owner: the list of each part, or their number for no part.
    A tile has TOKENS queries of ROWS heads, GROUP of which exist.
    """
    part = tl.program_id(0)
    start = tl.program_id(1) * BLOCK_N  # in the block
    owner = tl.load(Owner + part)
    if owner < n_lists:
        z = owner // n_blocks
        block = owner % n_blocks
        b = (z // sel_heads).to(tl.int64)
        s = z % sel_heads
        first = tl.load(Ptr + owner) + (part - tl.load(FirstPart + owner)) * part_length
        last = tl.minimum(first + part_length, tl.load(Ptr + owner + 1))
        key = block * BLOCK + start + tl.arange(0, BLOCK_N)
        k = load_tile(
            K + b * stride_kb + (s // SHARE).to(tl.int64) * stride_kh, block * BLOCK + start,
            stride_kn, n_k, BLOCK_N, HEAD_DIM, BLOCK_D, True,
        )  # fmt: skip
        v = load_tile(
            V + b * stride_vb + (s // SHARE).to(tl.int64) * stride_vh, block * BLOCK + start,
            stride_vn, n_k, BLOCK_N, HEAD_DIM_V, BLOCK_DV, True,
        )  # fmt: skip
        row = tl.arange(0, TOKENS * ROWS)
        head = (s * GROUP + row % ROWS).to(tl.int64)
        dk = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
        dv = tl.zeros([BLOCK_N, BLOCK_DV], tl.float32)
        for t in tl.range(0, tl.cdiv(last - first, TOKENS)):
            at = first + t * TOKENS + row // ROWS
            exists = (at < last) & (row % ROWS < GROUP)
            query = tl.load(Queries + at, mask=exists, other=0)  # [TOKENS * ROWS]
            q_at = b * stride_qb + head * stride_qh + query.to(tl.int64) * stride_qn
            g_at = b * stride_gb + head * stride_gh + query.to(tl.int64) * stride_gn
            q = load_at(Q, q_at, exists, HEAD_DIM, BLOCK_D)  # [TOKENS * ROWS, BLOCK_D]
            dout = load_at(DOut, g_at, exists, HEAD_DIM_V, BLOCK_DV)
            row_at = (z.to(tl.int64) * GROUP + row % ROWS) * n_q + query
            lse_log2 = to_lse_log2(tl.load(Lse + row_at, mask=exists, other=float("-inf")))
            delta = tl.load(Delta + row_at, mask=exists, other=0.0)
            scores = tl.dot(k, q.T, input_precision=PRECISION)  # [BLOCK_N, TOKENS * ROWS]
            p = probabilities(scores, scale_log2, lse_log2[None, :])
            seen = key[:, None] < hidden_from(query, n_q, n_k, CAUSAL)[None, :]
            p = tl.where(seen & (key < n_k)[:, None], p, 0.0)
            dv = tl.dot(p.to(dout.dtype), dout, dv, input_precision=PRECISION)
            dp = tl.dot(v, dout.T, input_precision=PRECISION)  # [BLOCK_N, TOKENS * ROWS]
            ds = p * (dp - delta[None, :])
            dk = tl.dot(ds.to(q.dtype), q, dk, input_precision=PRECISION)
        PartK += part.to(tl.int64) * (BLOCK * HEAD_DIM)
        PartV += part.to(tl.int64) * (BLOCK * HEAD_DIM_V)
        store_tile(PartK, start, HEAD_DIM, BLOCK, dk, BLOCK_N, HEAD_DIM, BLOCK_D)
        store_tile(PartV, start, HEAD_DIM_V, BLOCK, dv, BLOCK_N, HEAD_DIM_V, BLOCK_DV)


@triton.jit
def _sum_of_parts(
    Part, first, last, start, BLOCK: tl.constexpr, ROWS: tl.constexpr, HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
):  # fmt: skip
    """[ROWS, BLOCK_D] rows start.. of the blocks of the parts first to last, added up."""
    acc = tl.zeros([ROWS, BLOCK_D], tl.float32)
    for part in tl.range(first, last):
        base = Part + tl.cast(part, tl.int64) * (BLOCK * HEAD_DIM)
        acc += load_tile(base, start, HEAD_DIM, BLOCK, ROWS, HEAD_DIM, BLOCK_D, True)
    return acc


@triton.jit(do_not_specialize=UNSPECIALIZED)
def picks_add_parts(
    PartK, PartV, FirstPart, DK, DV,
    stride_kb, stride_kh, stride_kn, stride_vb, stride_vh, stride_vn,
    scale_log2, n_k, sel_heads, n_blocks,
    SHARE: tl.constexpr, HEAD_DIM: tl.constexpr, HEAD_DIM_V: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """dK and dV like k and v: the parts of each block, of the SHARE lists of a key head."""
    start = tl.program_id(0) * ROWS
    z = tl.program_id(1)  # batch entry and key head
    heads = sel_heads // SHARE
    b = (z // heads).to(tl.int64)
    h = (z % heads).to(tl.int64)
    dk = tl.zeros([ROWS, BLOCK_D], tl.float32)
    dv = tl.zeros([ROWS, BLOCK_DV], tl.float32)
    for i in range(SHARE):
        list_ = (z * SHARE + i) * n_blocks + start // BLOCK
        first = tl.load(FirstPart + list_)
        last = tl.load(FirstPart + list_ + 1)
        dk += _sum_of_parts(PartK, first, last, start % BLOCK, BLOCK, ROWS, HEAD_DIM, BLOCK_D)
        dv += _sum_of_parts(PartV, first, last, start % BLOCK, BLOCK, ROWS, HEAD_DIM_V, BLOCK_DV)
    dk_base = DK + b * stride_kb + h * stride_kh
    dv_base = DV + b * stride_vb + h * stride_vh
    scale = gradient_scale(scale_log2)
    store_tile(dk_base, start, stride_kn, n_k, dk * scale, ROWS, HEAD_DIM, BLOCK_D)
    store_tile(dv_base, start, stride_vn, n_k, dv, ROWS, HEAD_DIM_V, BLOCK_DV)
