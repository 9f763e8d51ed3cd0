"""Attention to key blocks that each query picked for itself: a program computes a few queries that
follow each other, of all heads that picked together.

The heads of a group and these queries are the rows of one tile. Keys and values that several of
the queries picked are read once for all of them, and what none of them picked is not read. dK and
dV have the inverse lists, in `gathered.py`. docs/internals/kernels.md has the mathematics.
"""

import triton
import triton.language as tl

from sparseflash.kernels.common.softmax import (
    gradient_scale,
    natural_lse,
    nonzero,
    probabilities,
    to_lse_log2,
)
from sparseflash.kernels.portable.common import load_rows, matrix_origin
from sparseflash.kernels.portable.forward import online_softmax

UNSPECIALIZED = ("n_q", "n_k", "sel_heads", "n_blocks", "n_lists", "part_length")


@triton.jit
def hidden_from(query, n_q, n_k, CAUSAL: tl.constexpr):
    """Keys from this number on are hidden from queries, which are counted from the end."""
    return query + n_k - n_q + 1 if CAUSAL else query * 0 + n_k


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
def rows_of(base, query, head, exists, stride_n, stride_h, HEAD_DIM: tl.constexpr,
            BLOCK_D: tl.constexpr):  # fmt: skip
    """Pointers to rows of HEAD_DIM elements [ROWS, BLOCK_D], and which exist; query and head of
    each: [ROWS].
    """
    dim = tl.arange(0, BLOCK_D)
    at = query.to(tl.int64) * stride_n + head.to(tl.int64) * stride_h
    return base + at[:, None] + dim[None, :], exists[:, None] & (dim < HEAD_DIM)[None, :]


@triton.jit
def joined_tile(Blocks, Who, t, of_row, hidden, BLOCK: tl.constexpr, TILE: tl.constexpr):
    """First key of tile t of joined lists, and who sees its keys: [ROWS, TILE] bool.

    of_row, hidden: the number of each row's query in its tile, and its first hidden key.
    """
    at = t // (BLOCK // TILE)
    start = tl.load(Blocks + at) * BLOCK + t % (BLOCK // TILE) * TILE
    bits = tl.load(Who + at)
    last = tl.where((bits >> of_row) & 1 != 0, hidden, 0)
    return start, (start + tl.arange(0, TILE))[None, :] < last[:, None]


@triton.jit
def start_queries(
    Q, Blocks, Who, Count, stride_qb, stride_qh, stride_qn,
    stride_kb, stride_kh, stride_vb, stride_vh, n_q, n_k, sel_heads,
    GROUP: tl.constexpr, SHARE: tl.constexpr, N_PICKS: tl.constexpr, QUERIES: tl.constexpr,
    ROWS: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK: tl.constexpr,
    BLOCK_N: tl.constexpr, CAUSAL: tl.constexpr,
):  # fmt: skip
    """Return what a program begins with. Of each row [QUERIES * ROWS]: the number of its query in
    the tile, query, head and whether it exists, and its first hidden key. b: the batch entry.
    tiles: of the joined lists, whose Blocks and Who come next. Where k and v of the list begin; q
    of the rows.
    """
    tile = tl.program_id(0)
    z = tl.program_id(1)
    b = (z // sel_heads).to(tl.int64)
    s = z % sel_heads
    row = tl.arange(0, QUERIES * ROWS)
    of_row = row // ROWS
    query = tile * QUERIES + of_row
    head = s * GROUP + row % ROWS
    exists = (query < n_q) & (row % ROWS < GROUP)
    hidden = hidden_from(query, n_q, n_k, CAUSAL)
    joined = z.to(tl.int64) * tl.num_programs(0) + tile
    tiles = tl.load(Count + joined) * (BLOCK // BLOCK_N)
    Blocks += joined * (QUERIES * N_PICKS)
    Who += joined * (QUERIES * N_PICKS)
    k_offset = b * stride_kb + (s // SHARE).to(tl.int64) * stride_kh
    v_offset = b * stride_vb + (s // SHARE).to(tl.int64) * stride_vh
    at, inside = rows_of(
        Q + b * stride_qb, query, head, exists, stride_qn, stride_qh, HEAD_DIM, BLOCK_D
    )
    q = tl.load(at, mask=inside, other=0.0)  # [QUERIES * ROWS, BLOCK_D]
    return of_row, query, head, exists, hidden, b, tiles, Blocks, Who, k_offset, v_offset, q


@triton.jit(do_not_specialize=UNSPECIALIZED)
def picks_forward(
    Q, K, V, K_desc, V_desc, Out, Lse, Blocks, Who, Count,
    stride_qb, stride_qh, stride_qn, stride_kb, stride_kh, stride_kn,
    stride_vb, stride_vh, stride_vn, stride_ob, stride_oh, stride_on,
    scale_log2, n_q, n_k, sel_heads,
    GROUP: tl.constexpr, SHARE: tl.constexpr, N_PICKS: tl.constexpr, QUERIES: tl.constexpr,
    ROWS: tl.constexpr, HEAD_DIM: tl.constexpr, HEAD_DIM_V: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK: tl.constexpr, CAUSAL: tl.constexpr,
    WHOLE: tl.constexpr, TMA: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """q (B, H_q, n_q, HEAD_DIM), k, v and the lists of `join_picks` -> Out, Lse.

    GROUP: query heads that picked together, at most ROWS. SHARE: lists of a key head. WHOLE: every
    tile has BLOCK_N keys. TMA: k and v have descriptors.
    """
    of_row, query, head, exists, hidden, b, tiles, Blocks, Who, k_offset, v_offset, q = (
        start_queries(
            Q, Blocks, Who, Count, stride_qb, stride_qh, stride_qn,
            stride_kb, stride_kh, stride_vb, stride_vh, n_q, n_k, sel_heads,
            GROUP, SHARE, N_PICKS, QUERIES, ROWS, HEAD_DIM, BLOCK_D, BLOCK, BLOCK_N, CAUSAL,
        )
    )  # fmt: skip
    k_row, k_col = matrix_origin(k_offset, stride_kn, TMA)
    v_row, v_col = matrix_origin(v_offset, stride_vn, TMA)
    m = tl.full([QUERIES * ROWS], float("-inf"), tl.float32)
    l = tl.zeros([QUERIES * ROWS], tl.float32)
    acc = tl.zeros([QUERIES * ROWS, BLOCK_DV], tl.float32)
    for t in tl.range(0, tiles):
        start, seen = joined_tile(Blocks, Who, t, of_row, hidden, BLOCK, BLOCK_N)
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
    at, inside = rows_of(
        Out + b * stride_ob, query, head, exists, stride_on, stride_oh, HEAD_DIM_V, BLOCK_DV
    )
    tl.store(at, (acc / total[:, None]).to(Out.dtype.element_ty), mask=inside)
    at_row = (b * sel_heads * GROUP + head) * n_q + query
    tl.store(Lse + at_row, natural_lse(m, total), mask=exists)


@triton.jit(do_not_specialize=UNSPECIALIZED)
def picks_backward_q(
    Q, K, V, K_desc, V_desc, DOut, Lse, Delta, DQ, Blocks, Who, Count,
    stride_qb, stride_qh, stride_qn, stride_kb, stride_kh, stride_kn,
    stride_vb, stride_vh, stride_vn, stride_gb, stride_gh, stride_gn,
    stride_dqb, stride_dqh, stride_dqn,
    scale_log2, n_q, n_k, sel_heads,
    GROUP: tl.constexpr, SHARE: tl.constexpr, N_PICKS: tl.constexpr, QUERIES: tl.constexpr,
    ROWS: tl.constexpr, HEAD_DIM: tl.constexpr, HEAD_DIM_V: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK: tl.constexpr, CAUSAL: tl.constexpr,
    WHOLE: tl.constexpr, TMA: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """dQ like q; Lse and Delta (B, H_q, n_q). The rest is as in `picks_forward`."""
    of_row, query, head, exists, hidden, b, tiles, Blocks, Who, k_offset, v_offset, q = (
        start_queries(
            Q, Blocks, Who, Count, stride_qb, stride_qh, stride_qn,
            stride_kb, stride_kh, stride_vb, stride_vh, n_q, n_k, sel_heads,
            GROUP, SHARE, N_PICKS, QUERIES, ROWS, HEAD_DIM, BLOCK_D, BLOCK, BLOCK_N, CAUSAL,
        )
    )  # fmt: skip
    k_row, k_col = matrix_origin(k_offset, stride_kn, TMA)
    v_row, v_col = matrix_origin(v_offset, stride_vn, TMA)
    at, inside = rows_of(
        DOut + b * stride_gb, query, head, exists, stride_gn, stride_gh, HEAD_DIM_V, BLOCK_DV
    )
    dout = tl.load(at, mask=inside, other=0.0)  # [QUERIES * ROWS, BLOCK_DV]
    at_row = (b * sel_heads * GROUP + head) * n_q + query
    lse_log2 = to_lse_log2(tl.load(Lse + at_row, mask=exists, other=float("-inf")))
    delta = tl.load(Delta + at_row, mask=exists, other=0.0)  # [QUERIES * ROWS]
    dq = tl.zeros([QUERIES * ROWS, BLOCK_D], tl.float32)
    for t in tl.range(0, tiles):
        start, seen = joined_tile(Blocks, Who, t, of_row, hidden, BLOCK, BLOCK_N)
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
    at, inside = rows_of(
        DQ + b * stride_dqb, query, head, exists, stride_dqn, stride_dqh, HEAD_DIM, BLOCK_D
    )
    tl.store(at, (dq * gradient_scale(scale_log2)).to(DQ.dtype.element_ty), mask=inside)
