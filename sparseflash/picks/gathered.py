"""Attention to key blocks that each query picked for itself, by the inverse lists: a program
computes some of the queries that picked one block, whose rows of q it gathers.

Where few heads pick together, that fills the tiles of out and dQ, too. Then each pick of a query
has an out and an LSE of its own, or a dQ, and `merge_picks` adds them up. dK and dV always come
from here: a block that many picked has several parts, which are added up in order. There are no
atomics, so the bits are always the same.
"""

import triton
import triton.language as tl

from sparseflash.kernels.common.softmax import (
    finite,
    gradient_scale,
    natural_lse,
    nonzero,
    probabilities,
    to_lse_log2,
)
from sparseflash.kernels.portable.common import load_tile, store_tile
from sparseflash.kernels.portable.forward import online_softmax
from sparseflash.picks.joined import UNSPECIALIZED, hidden_from


@triton.jit
def _gather(base, at, exists, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr):
    """Rows of HEAD_DIM elements that begin at `at` [ROWS]: [ROWS, BLOCK_D]."""
    dim = tl.arange(0, BLOCK_D)
    inside = exists[:, None] & (dim < HEAD_DIM)[None, :]
    return tl.load(base + at[:, None] + dim[None, :], mask=inside, other=0.0)


@triton.jit
def _scatter(base, at, exists, values, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr):
    """Store [ROWS, BLOCK_D] values to rows of HEAD_DIM elements that begin at `at` [ROWS]."""
    dim = tl.arange(0, BLOCK_D)
    inside = exists[:, None] & (dim < HEAD_DIM)[None, :]
    tl.store(base + at[:, None] + dim[None, :], values, mask=inside)


@triton.jit
def _start_part(
    K, V, Places, Ptr, FirstPart, Owner, stride_kb, stride_kh, stride_vb, stride_vh,
    n_q, n_k, sel_heads, n_blocks, first_z, end_z,
    GROUP: tl.constexpr, SHARE: tl.constexpr, N_PICKS: tl.constexpr, TOKENS: tl.constexpr,
    ROWS: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK: tl.constexpr, CAUSAL: tl.constexpr,
):  # fmt: skip
    """Return what a program of one part, of at most TOKENS queries of ROWS heads, begins with.

    z, b: the list among those from first_z on, and its batch entry. Of each row [TOKENS * ROWS]:
    head, query, where its place is, whether it exists, and its first hidden key. Beyond the last
    part none exists. The first key of the block, and its tiles with keys that some row sees; K and
    V of the list.
    """
    part = tl.load(FirstPart + first_z * n_blocks) + tl.program_id(0)
    owner = tl.load(Owner + part)
    # beyond the last list: a part that the first one has not, and so an empty one
    owner = tl.where(owner < end_z * n_blocks, owner, first_z * n_blocks)
    z = owner // n_blocks
    b = (z // sel_heads).to(tl.int64)
    s = z % sel_heads
    first = tl.load(Ptr + owner) + (part - tl.load(FirstPart + owner)) * TOKENS
    last = tl.minimum(first + TOKENS, tl.load(Ptr + owner + 1))
    row = tl.arange(0, TOKENS * ROWS)
    at = first + row // ROWS
    exists = (at < last) & (row % ROWS < GROUP)
    query = tl.load(Places + at, mask=exists, other=0) // N_PICKS
    hidden = hidden_from(query, n_q, n_k, CAUSAL)
    start = owner % n_blocks * BLOCK
    end_key = tl.minimum(tl.max(tl.where(exists, hidden, 0), 0), start + BLOCK)
    tiles = tl.cdiv(tl.maximum(end_key - start, 0), BLOCK_N)
    k_base = K + b * stride_kb + (s // SHARE).to(tl.int64) * stride_kh
    v_base = V + b * stride_vb + (s // SHARE).to(tl.int64) * stride_vh
    head = (s * GROUP + row % ROWS).to(tl.int64)
    return z - first_z, b, head, query, at, exists, hidden, start, tiles, k_base, v_base


@triton.jit
def _rows_of_parts(
    Places, z, at, exists, n_q, GROUP: tl.constexpr, N_PICKS: tl.constexpr, TOKENS: tl.constexpr,
    ROWS: tl.constexpr,
):  # fmt: skip
    """Return the row of each row's pick in Part (lists, n_q, N_PICKS, GROUP, dim): [TOKENS * ROWS].

    Places are read again, since in the layout of a store they would take many registers in a loop.
    """
    place = tl.load(Places + at, mask=exists, other=0, volatile=True)
    row = z.to(tl.int64) * n_q * N_PICKS + place
    return row * GROUP + tl.arange(0, TOKENS * ROWS) % ROWS


@triton.jit(do_not_specialize=UNSPECIALIZED)
def gathered_forward(
    Q, K, V, PartOut, PartLse, Places, Ptr, FirstPart, Owner,
    stride_qb, stride_qh, stride_qn, stride_kb, stride_kh, stride_kn,
    stride_vb, stride_vh, stride_vn,
    scale_log2, n_q, n_k, sel_heads, n_blocks, first_z, end_z,
    GROUP: tl.constexpr, SHARE: tl.constexpr, N_PICKS: tl.constexpr,
    HEAD_DIM: tl.constexpr, HEAD_DIM_V: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
    TOKENS: tl.constexpr, ROWS: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK: tl.constexpr,
    CAUSAL: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """PartOut (lists, n_q, N_PICKS, GROUP, HEAD_DIM_V) and PartLse, without the last, float32: of
    the lists first_z to end_z of all batch entries.

    Places: query * N_PICKS + pick of those that picked a block, list for list. The lists and their
    parts are as in `picks_backward_kv`, with parts of TOKENS queries, one for each program.
    """
    z, b, head, query, at, exists, hidden, start, tiles, k_base, v_base = _start_part(
        K, V, Places, Ptr, FirstPart, Owner, stride_kb, stride_kh, stride_vb, stride_vh,
        n_q, n_k, sel_heads, n_blocks, first_z, end_z,
        GROUP, SHARE, N_PICKS, TOKENS, ROWS, BLOCK_N, BLOCK, CAUSAL,
    )  # fmt: skip
    q_at = b * stride_qb + head * stride_qh + query.to(tl.int64) * stride_qn
    q = _gather(Q, q_at, exists, HEAD_DIM, BLOCK_D)  # [TOKENS * ROWS, BLOCK_D]
    m = tl.full([TOKENS * ROWS], float("-inf"), tl.float32)
    l = tl.zeros([TOKENS * ROWS], tl.float32)
    acc = tl.zeros([TOKENS * ROWS, BLOCK_DV], tl.float32)
    for t in tl.range(0, tiles):
        key = start + t * BLOCK_N
        k = load_tile(k_base, key, stride_kn, n_k, BLOCK_N, HEAD_DIM, BLOCK_D, True)
        scores = tl.dot(q, k.T, input_precision=PRECISION)  # [TOKENS * ROWS, BLOCK_N]
        seen = (key + tl.arange(0, BLOCK_N))[None, :] < hidden[:, None]
        scores = tl.where(seen, scores, float("-inf"))
        p, alpha, m, l = online_softmax(scores, m, l, scale_log2, True)
        v = load_tile(v_base, key, stride_vn, n_k, BLOCK_N, HEAD_DIM_V, BLOCK_DV, True)
        acc = tl.dot(p.to(v.dtype), v, acc * alpha[:, None], input_precision=PRECISION)
    total = nonzero(l)
    acc /= total[:, None]
    place = _rows_of_parts(Places, z, at, exists, n_q, GROUP, N_PICKS, TOKENS, ROWS)
    _scatter(PartOut, place * HEAD_DIM_V, exists, acc, HEAD_DIM_V, BLOCK_DV)
    tl.store(PartLse + place, natural_lse(m, total), mask=exists)


@triton.jit(do_not_specialize=UNSPECIALIZED)
def gathered_backward_q(
    Q, K, V, DOut, Lse, Delta, PartQ, Places, Ptr, FirstPart, Owner,
    stride_qb, stride_qh, stride_qn, stride_kb, stride_kh, stride_kn,
    stride_vb, stride_vh, stride_vn, stride_gb, stride_gh, stride_gn,
    scale_log2, n_q, n_k, sel_heads, n_blocks, first_z, end_z,
    GROUP: tl.constexpr, SHARE: tl.constexpr, N_PICKS: tl.constexpr,
    HEAD_DIM: tl.constexpr, HEAD_DIM_V: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
    TOKENS: tl.constexpr, ROWS: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK: tl.constexpr,
    CAUSAL: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """PartQ (lists, n_q, N_PICKS, GROUP, HEAD_DIM), float32; the rest is as in `gathered_forward`
    and `picks_backward_q`.
    """
    z, b, head, query, at, exists, hidden, start, tiles, k_base, v_base = _start_part(
        K, V, Places, Ptr, FirstPart, Owner, stride_kb, stride_kh, stride_vb, stride_vh,
        n_q, n_k, sel_heads, n_blocks, first_z, end_z,
        GROUP, SHARE, N_PICKS, TOKENS, ROWS, BLOCK_N, BLOCK, CAUSAL,
    )  # fmt: skip
    q_at = b * stride_qb + head * stride_qh + query.to(tl.int64) * stride_qn
    q = _gather(Q, q_at, exists, HEAD_DIM, BLOCK_D)  # [TOKENS * ROWS, BLOCK_D]
    g_at = b * stride_gb + head * stride_gh + query.to(tl.int64) * stride_gn
    dout = _gather(DOut, g_at, exists, HEAD_DIM_V, BLOCK_DV)  # [TOKENS * ROWS, BLOCK_DV]
    row_at = (b * sel_heads * GROUP + head) * n_q + query
    lse_log2 = to_lse_log2(tl.load(Lse + row_at, mask=exists, other=float("-inf")))
    delta = tl.load(Delta + row_at, mask=exists, other=0.0)  # [TOKENS * ROWS]
    dq = tl.zeros([TOKENS * ROWS, BLOCK_D], tl.float32)
    for t in tl.range(0, tiles):
        key = start + t * BLOCK_N
        k = load_tile(k_base, key, stride_kn, n_k, BLOCK_N, HEAD_DIM, BLOCK_D, True)
        v = load_tile(v_base, key, stride_vn, n_k, BLOCK_N, HEAD_DIM_V, BLOCK_DV, True)
        scores = tl.dot(q, k.T, input_precision=PRECISION)  # [TOKENS * ROWS, BLOCK_N]
        p = probabilities(scores, scale_log2, lse_log2[:, None])
        seen = (key + tl.arange(0, BLOCK_N))[None, :] < hidden[:, None]
        p = tl.where(seen, p, 0.0)
        dp = tl.dot(dout, v.T, input_precision=PRECISION)  # [TOKENS * ROWS, BLOCK_N]
        ds = p * (dp - delta[:, None])
        dq = tl.dot(ds.to(k.dtype), k, dq, input_precision=PRECISION)
    dq *= gradient_scale(scale_log2)
    place = _rows_of_parts(Places, z, at, exists, n_q, GROUP, N_PICKS, TOKENS, ROWS)
    _scatter(PartQ, place * HEAD_DIM, exists, dq, HEAD_DIM, BLOCK_D)


@triton.jit(do_not_specialize=UNSPECIALIZED)
def merge_picks(
    Part, PartLse, Picks, Out, Lse, stride_ob, stride_oh, stride_on,
    n_q, n_k, sel_heads, first_z,
    GROUP: tl.constexpr, N_PICKS: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, CAUSAL: tl.constexpr,
):  # fmt: skip
    """Out and Lse: the parts of each query's picks, weighed by the exponentials of their LSE.

    Where PartLse is None, Out is their sum. Part, from the list first_z on, and Picks: as in
    `gathered_forward` and `picks_forward`. What nobody sees has no part.
    """
    z = first_z + tl.program_id(1)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    query = row // GROUP
    exists = query < n_q
    hidden = hidden_from(query, n_q, n_k, CAUSAL)
    Picks += (z.to(tl.int64) * n_q + query) * N_PICKS
    place = (tl.program_id(1).to(tl.int64) * n_q + query) * (N_PICKS * GROUP) + row % GROUP
    m = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, BLOCK_D], tl.float32)
    for i in range(N_PICKS):
        seen = exists & (tl.load(Picks + i, mask=exists, other=0) * BLOCK < hidden)
        at = place + i * GROUP
        part = _gather(Part, at * HEAD_DIM, seen, HEAD_DIM, BLOCK_D)  # [ROWS, BLOCK_D]
        if PartLse is not None:
            lse = tl.load(PartLse + at, mask=seen, other=float("-inf"))
            m_new = tl.maximum(m, lse)
            alpha = tl.exp(m - finite(m_new))
            weight = tl.exp(lse - finite(m_new))  # [ROWS]
            total = total * alpha + weight
            acc = acc * alpha[:, None] + weight[:, None] * part
            m = m_new
        else:
            acc += part
    b = (z // sel_heads).to(tl.int64)
    head = (z % sel_heads * GROUP + row % GROUP).to(tl.int64)
    if PartLse is not None:
        total = nonzero(total)
        acc /= total[:, None]
        tl.store(Lse + (b * sel_heads * GROUP + head) * n_q + query, tl.log(total) + m, mask=exists)
    out_at = b * stride_ob + head * stride_oh + query.to(tl.int64) * stride_on
    _scatter(Out, out_at, exists, acc.to(Out.dtype.element_ty), HEAD_DIM, BLOCK_D)


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
            q = _gather(Q, q_at, exists, HEAD_DIM, BLOCK_D)  # [TOKENS * ROWS, BLOCK_D]
            dout = _gather(DOut, g_at, exists, HEAD_DIM_V, BLOCK_DV)
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
