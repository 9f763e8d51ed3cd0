"""Attention to key blocks that each query picked for itself: out, and dQ.

The rows of a tile are some queries of all heads that picked together, chosen in one of two ways.
GATHERED, they are some of those that picked one block, by the inverse lists: a program computes one
block, each pick of a query has an out and an LSE of its own, or a dQ, and `merge_picks` adds them
up. That fills the tiles where few heads pick together. Otherwise the queries follow each other, and
a program computes all blocks that any of them picked: `join_picks` lists these, so that keys and
values that several of the queries picked are read once for all of them.

There are no atomics, so the bits are always the same. dK and dV are in `column_kernels.py`.
docs/internals/kernels.md has the mathematics.
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
from sparseflash.kernels.portable.common import load_rows, matrix_origin
from sparseflash.kernels.portable.forward import online_softmax

UNSPECIALIZED = (
    "n_q", "n_k", "sel_heads", "n_blocks", "n_lists", "part_length", "first_z", "end_z",
)  # fmt: skip


@triton.jit
def hidden_from(query, n_q, n_k, CAUSAL: tl.constexpr):
    """Keys from this number on are hidden from queries, which are counted from the end."""
    return query + n_k - n_q + 1 if CAUSAL else query * 0 + n_k


@triton.jit
def load_at(base, at, exists, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr):
    """Rows of HEAD_DIM elements that begin at `at` [ROWS]: [ROWS, BLOCK_D]."""
    dim = tl.arange(0, BLOCK_D)
    inside = exists[:, None] & (dim < HEAD_DIM)[None, :]
    return tl.load(base + at[:, None] + dim[None, :], mask=inside, other=0.0)


@triton.jit
def store_at(base, at, exists, values, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr):
    """Store [ROWS, BLOCK_D] values to rows of HEAD_DIM elements that begin at `at` [ROWS]."""
    dim = tl.arange(0, BLOCK_D)
    inside = exists[:, None] & (dim < HEAD_DIM)[None, :]
    tl.store(base + at[:, None] + dim[None, :], values.to(base.dtype.element_ty), mask=inside)


@triton.jit
def _picked(Picks, at, block, N_PICKS: tl.constexpr, PICKS: tl.constexpr):
    """Whether the ascending lists of N_PICKS that begin at `at` hold `block`, by binary search."""
    below = at * 0  # how many of the list are below `block`
    step: tl.constexpr = PICKS
    for _ in tl.static_range(PICKS.bit_length()):
        after = below + step
        inside = after <= N_PICKS
        last = tl.load(Picks + at + after - 1, mask=inside, other=0)
        below = tl.where(inside & (last < block), after, below)
        step = step // 2
    found = tl.load(Picks + at + below, mask=below < N_PICKS, other=-1)
    return found == block


@triton.jit(do_not_specialize=UNSPECIALIZED)
def join_picks(
    Picks, Blocks, Who, Count, n_q, n_k,
    N_PICKS: tl.constexpr, PICKS: tl.constexpr, QUERIES: tl.constexpr, BLOCK: tl.constexpr,
    CAUSAL: tl.constexpr,
):  # fmt: skip
    """List the blocks that QUERIES queries picked, once each, and in bit i of Who whether query i
    did.

    Picks (lists, n_q, N_PICKS) -> Blocks and Who (lists, tiles, QUERIES * N_PICKS), and Count
    (lists, tiles) of them. PICKS: N_PICKS, rounded up to a power of two.
    """
    tile = tl.program_id(0)
    z = tl.program_id(1).to(tl.int64)
    place = tl.arange(0, QUERIES * PICKS)
    mine = place // PICKS
    query = tile * QUERIES + mine
    exists = (query < n_q) & (place % PICKS < N_PICKS)
    Picks += (z * n_q + tile * QUERIES) * N_PICKS
    block = tl.load(Picks + mine * N_PICKS + place % PICKS, mask=exists, other=2**30 // BLOCK)
    exists &= block * BLOCK < hidden_from(query, n_q, n_k, CAUSAL)
    who = tl.zeros([QUERIES * PICKS], tl.int32)
    for i in range(QUERIES):
        other = tl.minimum(i, n_q - 1 - tile * QUERIES)  # beyond the last: the last, once more
        hidden = hidden_from(tile * QUERIES + other, n_q, n_k, CAUSAL)
        also = _picked(Picks, place * 0 + other * N_PICKS, block, N_PICKS, PICKS)
        who |= (also & (i == other) & (block * BLOCK < hidden)).to(tl.int32) << i
    first = exists & ((who & ((1 << mine) - 1)) == 0)
    at = (z * tl.num_programs(0) + tile) * (QUERIES * N_PICKS)
    rank = tl.cumsum(first.to(tl.int32), 0) - 1
    tl.store(Blocks + at + rank, block, mask=first)
    tl.store(Who + at + rank, who, mask=first)
    tl.store(Count + z * tl.num_programs(0) + tile, tl.sum(first.to(tl.int32), 0))


@triton.jit
def _start(
    lists, n_q, n_k, sel_heads, n_blocks, first_z, end_z,
    GROUP: tl.constexpr, N_PICKS: tl.constexpr, QUERIES: tl.constexpr, ROWS: tl.constexpr,
    BLOCK: tl.constexpr, BLOCK_N: tl.constexpr, CAUSAL: tl.constexpr, GATHERED: tl.constexpr,
):  # fmt: skip
    """Return what a program of QUERIES queries of ROWS heads, GROUP of which exist, begins with.

    b, s: batch entry, and heads that picked together. Of each row [QUERIES * ROWS]: query, head,
    whether it exists, and its first hidden key. Then how many tiles of keys there are, and `walk`:
    what `_tile` takes and, of gathered queries, `_parts_of`.
    """
    row = tl.arange(0, QUERIES * ROWS)
    if GATHERED:
        Places, Ptr, FirstPart, Owner = lists
        part = tl.load(FirstPart + first_z * n_blocks) + tl.program_id(0)
        owner = tl.load(Owner + part)
        # beyond the last list: a part that the first one has not, and so an empty one
        owner = tl.where(owner < end_z * n_blocks, owner, first_z * n_blocks)
        z = owner // n_blocks
        first = tl.load(Ptr + owner) + (part - tl.load(FirstPart + owner)) * QUERIES
        last = tl.minimum(first + QUERIES, tl.load(Ptr + owner + 1))
        at = first + row // ROWS
        exists = (at < last) & (row % ROWS < GROUP)
        query = tl.load(Places + at, mask=exists, other=0) // N_PICKS
        hidden = hidden_from(query, n_q, n_k, CAUSAL)
        start = owner % n_blocks * BLOCK
        end_key = tl.minimum(tl.max(tl.where(exists, hidden, 0), 0), start + BLOCK)
        tiles = tl.cdiv(tl.maximum(end_key - start, 0), BLOCK_N)
        walk = start, z - first_z, at
    else:
        Blocks, Who, Count = lists
        z = tl.program_id(1)
        of_row = row // ROWS  # number of the row's query in the tile
        query = tl.program_id(0) * QUERIES + of_row
        exists = (query < n_q) & (row % ROWS < GROUP)
        hidden = hidden_from(query, n_q, n_k, CAUSAL)
        joined = z.to(tl.int64) * tl.num_programs(0) + tl.program_id(0)
        tiles = tl.load(Count + joined) * (BLOCK // BLOCK_N)
        listed = joined * (QUERIES * N_PICKS)
        walk = Blocks + listed, Who + listed, of_row
    b = (z // sel_heads).to(tl.int64)
    s = z % sel_heads
    head = s * GROUP + row % ROWS
    return b, s, query, head, exists, hidden, tiles, walk


@triton.jit
def _tile(walk, t, hidden, BLOCK: tl.constexpr, BLOCK_N: tl.constexpr, GATHERED: tl.constexpr):
    """First key of tile t of a program, and who sees its keys: [ROWS, BLOCK_N] bool."""
    if GATHERED:
        start = walk[0] + t * BLOCK_N
    else:
        Blocks, Who, of_row = walk
        at = t // (BLOCK // BLOCK_N)
        start = tl.load(Blocks + at) * BLOCK + t % (BLOCK // BLOCK_N) * BLOCK_N
        hidden = tl.where((tl.load(Who + at) >> of_row) & 1 != 0, hidden, 0)
    return start, (start + tl.arange(0, BLOCK_N))[None, :] < hidden[:, None]


@triton.jit
def _parts_of(
    Places, walk, exists, n_q, GROUP: tl.constexpr, N_PICKS: tl.constexpr, QUERIES: tl.constexpr,
    ROWS: tl.constexpr,
):  # fmt: skip
    """Return the row of each row's pick in Part (lists, n_q, N_PICKS, GROUP, dim):
    [QUERIES * ROWS].

    Places are read again, since in the layout of a store they would take many registers in a loop.
    """
    place = tl.load(Places + walk[2], mask=exists, other=0, volatile=True)
    row = walk[1].to(tl.int64) * n_q * N_PICKS + place
    return row * GROUP + tl.arange(0, QUERIES * ROWS) % ROWS


@triton.jit(do_not_specialize=UNSPECIALIZED)
def picks_forward(
    Q, K, V, K_desc, V_desc, Out, Lse, lists,
    stride_qb, stride_qh, stride_qn, stride_kb, stride_kh, stride_kn,
    stride_vb, stride_vh, stride_vn, stride_ob, stride_oh, stride_on,
    scale_log2, n_q, n_k, sel_heads, n_blocks, first_z, end_z,
    GROUP: tl.constexpr, SHARE: tl.constexpr, N_PICKS: tl.constexpr, QUERIES: tl.constexpr,
    ROWS: tl.constexpr, HEAD_DIM: tl.constexpr, HEAD_DIM_V: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK: tl.constexpr, CAUSAL: tl.constexpr,
    GATHERED: tl.constexpr, WHOLE: tl.constexpr, TMA: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Out and Lse of q (B, H_q, n_q, HEAD_DIM), k and v.

    lists: Blocks, Who and Count of `join_picks`. GATHERED, they are places, ptr, first_part and
    owner of `Inverse`, with parts of QUERIES; then Out is (lists, n_q, N_PICKS, GROUP, HEAD_DIM_V)
    and Lse without the last, float32, of the n_blocks lists of each of first_z to end_z.
    GROUP: query heads that picked together, at most ROWS. SHARE: lists of a key head. WHOLE: every
    tile has BLOCK_N keys. TMA: k and v have descriptors.
    """
    b, s, query, head, exists, hidden, tiles, walk = _start(
        lists, n_q, n_k, sel_heads, n_blocks, first_z, end_z,
        GROUP, N_PICKS, QUERIES, ROWS, BLOCK, BLOCK_N, CAUSAL, GATHERED,
    )  # fmt: skip
    k_offset = b * stride_kb + (s // SHARE).to(tl.int64) * stride_kh
    v_offset = b * stride_vb + (s // SHARE).to(tl.int64) * stride_vh
    k_row, k_col = matrix_origin(k_offset, stride_kn, TMA)
    v_row, v_col = matrix_origin(v_offset, stride_vn, TMA)
    q_at = b * stride_qb + query.to(tl.int64) * stride_qn + head.to(tl.int64) * stride_qh
    q = load_at(Q, q_at, exists, HEAD_DIM, BLOCK_D)  # [QUERIES * ROWS, BLOCK_D]
    m = tl.full([QUERIES * ROWS], float("-inf"), tl.float32)
    l = tl.zeros([QUERIES * ROWS], tl.float32)
    acc = tl.zeros([QUERIES * ROWS, BLOCK_DV], tl.float32)
    for t in tl.range(0, tiles):
        start, seen = _tile(walk, t, hidden, BLOCK, BLOCK_N, GATHERED)
        k = load_rows(
            K + k_offset, K_desc, k_row, k_col, start, stride_kn, n_k,
            BLOCK_N, HEAD_DIM, BLOCK_D, WHOLE, TMA,
        )  # fmt: skip
        scores = tl.dot(q, k.T, input_precision=PRECISION)  # [QUERIES * ROWS, BLOCK_N]
        scores = tl.where(seen, scores, float("-inf"))
        p, alpha, m, l = online_softmax(scores, m, l, scale_log2, True)
        v = load_rows(
            V + v_offset, V_desc, v_row, v_col, start, stride_vn, n_k,
            BLOCK_N, HEAD_DIM_V, BLOCK_DV, WHOLE, TMA,
        )  # fmt: skip
        acc = tl.dot(p.to(v.dtype), v, acc * alpha[:, None], input_precision=PRECISION)
    total = nonzero(l)
    acc /= total[:, None]
    if GATHERED:
        lse_at = _parts_of(lists[0], walk, exists, n_q, GROUP, N_PICKS, QUERIES, ROWS)
        out_at = lse_at * HEAD_DIM_V
    else:
        lse_at = (b * sel_heads * GROUP + head) * n_q + query
        out_at = b * stride_ob + query.to(tl.int64) * stride_on + head.to(tl.int64) * stride_oh
    store_at(Out, out_at, exists, acc, HEAD_DIM_V, BLOCK_DV)
    tl.store(Lse + lse_at, natural_lse(m, total), mask=exists)


@triton.jit(do_not_specialize=UNSPECIALIZED)
def picks_backward_q(
    Q, K, V, K_desc, V_desc, DOut, Lse, Delta, DQ, lists,
    stride_qb, stride_qh, stride_qn, stride_kb, stride_kh, stride_kn,
    stride_vb, stride_vh, stride_vn, stride_gb, stride_gh, stride_gn,
    stride_dqb, stride_dqh, stride_dqn,
    scale_log2, n_q, n_k, sel_heads, n_blocks, first_z, end_z,
    GROUP: tl.constexpr, SHARE: tl.constexpr, N_PICKS: tl.constexpr, QUERIES: tl.constexpr,
    ROWS: tl.constexpr, HEAD_DIM: tl.constexpr, HEAD_DIM_V: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK: tl.constexpr, CAUSAL: tl.constexpr,
    GATHERED: tl.constexpr, WHOLE: tl.constexpr, TMA: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """DQ like q or, GATHERED, float32 (lists, n_q, N_PICKS, GROUP, HEAD_DIM); Lse and Delta
    (B, H_q, n_q). The rest is as in `picks_forward`.
    """
    b, s, query, head, exists, hidden, tiles, walk = _start(
        lists, n_q, n_k, sel_heads, n_blocks, first_z, end_z,
        GROUP, N_PICKS, QUERIES, ROWS, BLOCK, BLOCK_N, CAUSAL, GATHERED,
    )  # fmt: skip
    k_offset = b * stride_kb + (s // SHARE).to(tl.int64) * stride_kh
    v_offset = b * stride_vb + (s // SHARE).to(tl.int64) * stride_vh
    k_row, k_col = matrix_origin(k_offset, stride_kn, TMA)
    v_row, v_col = matrix_origin(v_offset, stride_vn, TMA)
    q_at = b * stride_qb + query.to(tl.int64) * stride_qn + head.to(tl.int64) * stride_qh
    q = load_at(Q, q_at, exists, HEAD_DIM, BLOCK_D)  # [QUERIES * ROWS, BLOCK_D]
    g_at = b * stride_gb + query.to(tl.int64) * stride_gn + head.to(tl.int64) * stride_gh
    dout = load_at(DOut, g_at, exists, HEAD_DIM_V, BLOCK_DV)  # [QUERIES * ROWS, BLOCK_DV]
    row_at = (b * sel_heads * GROUP + head) * n_q + query
    lse_log2 = to_lse_log2(tl.load(Lse + row_at, mask=exists, other=float("-inf")))
    delta = tl.load(Delta + row_at, mask=exists, other=0.0)  # [QUERIES * ROWS]
    dq = tl.zeros([QUERIES * ROWS, BLOCK_D], tl.float32)
    for t in tl.range(0, tiles):
        start, seen = _tile(walk, t, hidden, BLOCK, BLOCK_N, GATHERED)
        k = load_rows(
            K + k_offset, K_desc, k_row, k_col, start, stride_kn, n_k,
            BLOCK_N, HEAD_DIM, BLOCK_D, WHOLE, TMA,
        )  # fmt: skip
        v = load_rows(
            V + v_offset, V_desc, v_row, v_col, start, stride_vn, n_k,
            BLOCK_N, HEAD_DIM_V, BLOCK_DV, WHOLE, TMA,
        )  # fmt: skip
        scores = tl.dot(q, k.T, input_precision=PRECISION)  # [QUERIES * ROWS, BLOCK_N]
        p = tl.where(seen, probabilities(scores, scale_log2, lse_log2[:, None]), 0.0)
        dp = tl.dot(dout, v.T, input_precision=PRECISION)  # [QUERIES * ROWS, BLOCK_N]
        ds = p * (dp - delta[:, None])
        dq = tl.dot(ds.to(k.dtype), k, dq, input_precision=PRECISION)
    if GATHERED:
        dq_at = _parts_of(lists[0], walk, exists, n_q, GROUP, N_PICKS, QUERIES, ROWS) * HEAD_DIM
    else:
        dq_at = b * stride_dqb + query.to(tl.int64) * stride_dqn + head.to(tl.int64) * stride_dqh
    store_at(DQ, dq_at, exists, dq * gradient_scale(scale_log2), HEAD_DIM, BLOCK_D)


@triton.jit(do_not_specialize=UNSPECIALIZED)
def merge_picks(
    Part, PartLse, Picks, Out, Lse, stride_ob, stride_oh, stride_on,
    n_q, n_k, sel_heads, first_z,
    GROUP: tl.constexpr, N_PICKS: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, CAUSAL: tl.constexpr,
):  # fmt: skip
    """Out and Lse: the parts of each query's picks, weighed by the exponentials of their LSE.

    Where PartLse is None, Out is their sum. Part, from the list first_z on, and Picks: as in
    `picks_forward` and `join_picks`. What nobody sees has no part.
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
        part = load_at(Part, at * HEAD_DIM, seen, HEAD_DIM, BLOCK_D)  # [ROWS, BLOCK_D]
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
    store_at(Out, out_at, exists, acc, HEAD_DIM, BLOCK_D)
