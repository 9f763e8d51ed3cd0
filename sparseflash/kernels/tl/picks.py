"""Attention to key blocks that each query picked for itself: a program computes one query, of all
heads that picked together.

The heads of a group are the rows of one tile, so keys and values are read once for all of them, and
no key is read that the query did not pick. dK and dV have the inverse lists, in
`picks_backward.py`. docs/internals/kernels.md has the mathematics.
"""

import triton
import triton.language as tl

from sparseflash.kernels.softmax import gradient_scale, natural_lse, probabilities, to_lse_log2
from sparseflash.kernels.tl.common import load_tile
from sparseflash.kernels.tl.forward import online_softmax

UNSPECIALIZED = ("n_q", "n_k", "sel_heads", "n_blocks", "n_lists", "part_length")


@triton.jit
def hidden_from(query, n_q, n_k, CAUSAL: tl.constexpr):
    """Keys from this number on are hidden from queries, which are counted from the end."""
    return query + n_k - n_q + 1 if CAUSAL else query * 0 + n_k


@triton.jit
def rows_of(base, head, stride_h, GROUP: tl.constexpr, ROWS: tl.constexpr, HEAD_DIM: tl.constexpr,
            BLOCK_D: tl.constexpr):  # fmt: skip
    """Pointers to one token of the GROUP heads from `head` on [ROWS, BLOCK_D], and which exist."""
    row = tl.arange(0, ROWS)
    dim = tl.arange(0, BLOCK_D)
    pointers = base + (head + row)[:, None].to(tl.int64) * stride_h + dim[None, :]
    return pointers, (row < GROUP)[:, None] & (dim < HEAD_DIM)[None, :]


@triton.jit
def picked_tiles(Picks, hidden, BLOCK: tl.constexpr, TILE: tl.constexpr, N_PICKS: tl.constexpr):
    """Tiles of TILE keys in the blocks of a list that begin before key `hidden`."""
    at = tl.arange(0, triton.next_power_of_2(N_PICKS))
    block = tl.load(Picks + at, mask=at < N_PICKS, other=2**30 // BLOCK)
    return tl.sum((block * BLOCK < hidden).to(tl.int32), 0) * (BLOCK // TILE)


@triton.jit
def picked_start(Picks, t, BLOCK: tl.constexpr, TILE: tl.constexpr):
    """First key of tile t of a list."""
    return tl.load(Picks + t // (BLOCK // TILE)) * BLOCK + t % (BLOCK // TILE) * TILE


@triton.jit
def start_query(
    Q, K, V, Picks, stride_qb, stride_qh, stride_qn, stride_kb, stride_kh, stride_vb, stride_vh,
    n_q, n_k, sel_heads, GROUP: tl.constexpr, SHARE: tl.constexpr, N_PICKS: tl.constexpr,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr, CAUSAL: tl.constexpr,
):  # fmt: skip
    """What a program begins with: query; z, b, s: its list among all, its batch entry, and its list
    in that; the first hidden key; Picks, K and V of the list; q [BLOCK_M, BLOCK_D].
    """
    query = tl.program_id(0)
    z = tl.program_id(1)
    b = (z // sel_heads).to(tl.int64)
    s = z % sel_heads
    Picks += (z.to(tl.int64) * n_q + query) * N_PICKS
    hidden = hidden_from(query, n_q, n_k, CAUSAL)
    k_base = K + b * stride_kb + (s // SHARE).to(tl.int64) * stride_kh
    v_base = V + b * stride_vb + (s // SHARE).to(tl.int64) * stride_vh
    at, exists = rows_of(
        Q + b * stride_qb + query.to(tl.int64) * stride_qn, s * GROUP, stride_qh,
        GROUP, BLOCK_M, HEAD_DIM, BLOCK_D,
    )  # fmt: skip
    q = tl.load(at, mask=exists, other=0.0)  # [BLOCK_M, BLOCK_D]
    return query, z, b, s, hidden, Picks, k_base, v_base, q


@triton.jit(do_not_specialize=UNSPECIALIZED)
def picks_forward(
    Q, K, V, Out, Lse, Picks,
    stride_qb, stride_qh, stride_qn, stride_kb, stride_kh, stride_kn,
    stride_vb, stride_vh, stride_vn, stride_ob, stride_oh, stride_on,
    scale_log2, n_q, n_k, sel_heads,
    GROUP: tl.constexpr, SHARE: tl.constexpr, N_PICKS: tl.constexpr,
    HEAD_DIM: tl.constexpr, HEAD_DIM_V: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK: tl.constexpr, CAUSAL: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """q (B, H_q, n_q, HEAD_DIM), k, v and Picks (B, sel_heads, n_q, N_PICKS) -> Out, Lse.

    Picks: numbers of blocks of BLOCK keys, ascending; what begins beyond the keys is none.
    GROUP: query heads that picked together, at most BLOCK_M. SHARE: lists of a key head.
    """
    query, z, b, s, hidden, Picks, k_base, v_base, q = start_query(
        Q, K, V, Picks, stride_qb, stride_qh, stride_qn, stride_kb, stride_kh, stride_vb, stride_vh,
        n_q, n_k, sel_heads, GROUP, SHARE, N_PICKS, HEAD_DIM, BLOCK_D, BLOCK_M, CAUSAL,
    )  # fmt: skip
    m = tl.full([BLOCK_M], float("-inf"), tl.float32)
    l = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_DV], tl.float32)
    for t in tl.range(0, picked_tiles(Picks, hidden, BLOCK, BLOCK_N, N_PICKS)):
        start = picked_start(Picks, t, BLOCK, BLOCK_N)
        k = load_tile(k_base, start, stride_kn, n_k, BLOCK_N, HEAD_DIM, BLOCK_D, True)
        scores = tl.dot(q, k.T, input_precision=PRECISION)  # [BLOCK_M, BLOCK_N]
        seen = start + tl.arange(0, BLOCK_N) < hidden
        scores = tl.where(seen[None, :], scores, float("-inf"))
        p, alpha, m, l = online_softmax(scores, m, l, scale_log2, True)
        v = load_tile(v_base, start, stride_vn, n_k, BLOCK_N, HEAD_DIM_V, BLOCK_DV, True)
        acc = tl.dot(p.to(v.dtype), v, acc * alpha[:, None], input_precision=PRECISION)
    total = tl.where(l > 0, l, 1.0)
    at, exists = rows_of(
        Out + b * stride_ob + query.to(tl.int64) * stride_on, s * GROUP, stride_oh,
        GROUP, BLOCK_M, HEAD_DIM_V, BLOCK_DV,
    )  # fmt: skip
    tl.store(at, (acc / total[:, None]).to(Out.dtype.element_ty), mask=exists)
    row = tl.arange(0, BLOCK_M)
    at = Lse + (z.to(tl.int64) * GROUP + row) * n_q + query
    tl.store(at, natural_lse(m, total), mask=row < GROUP)


@triton.jit(do_not_specialize=UNSPECIALIZED)
def picks_backward_q(
    Q, K, V, DOut, Lse, Delta, DQ, Picks,
    stride_qb, stride_qh, stride_qn, stride_kb, stride_kh, stride_kn,
    stride_vb, stride_vh, stride_vn, stride_gb, stride_gh, stride_gn,
    stride_dqb, stride_dqh, stride_dqn,
    scale_log2, n_q, n_k, sel_heads,
    GROUP: tl.constexpr, SHARE: tl.constexpr, N_PICKS: tl.constexpr,
    HEAD_DIM: tl.constexpr, HEAD_DIM_V: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK: tl.constexpr, CAUSAL: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """dQ like q; Lse and Delta (B, H_q, n_q). The rest is as in `picks_forward`."""
    query, z, b, s, hidden, Picks, k_base, v_base, q = start_query(
        Q, K, V, Picks, stride_qb, stride_qh, stride_qn, stride_kb, stride_kh, stride_vb, stride_vh,
        n_q, n_k, sel_heads, GROUP, SHARE, N_PICKS, HEAD_DIM, BLOCK_D, BLOCK_M, CAUSAL,
    )  # fmt: skip
    at, exists = rows_of(
        DOut + b * stride_gb + query.to(tl.int64) * stride_gn, s * GROUP, stride_gh,
        GROUP, BLOCK_M, HEAD_DIM_V, BLOCK_DV,
    )  # fmt: skip
    dout = tl.load(at, mask=exists, other=0.0)  # [BLOCK_M, BLOCK_DV]
    row = tl.arange(0, BLOCK_M)
    at_row = (z.to(tl.int64) * GROUP + row) * n_q + query
    lse_log2 = to_lse_log2(tl.load(Lse + at_row, mask=row < GROUP, other=float("-inf")))
    delta = tl.load(Delta + at_row, mask=row < GROUP, other=0.0)  # [BLOCK_M]
    dq = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    for t in tl.range(0, picked_tiles(Picks, hidden, BLOCK, BLOCK_N, N_PICKS)):
        start = picked_start(Picks, t, BLOCK, BLOCK_N)
        k = load_tile(k_base, start, stride_kn, n_k, BLOCK_N, HEAD_DIM, BLOCK_D, True)
        v = load_tile(v_base, start, stride_vn, n_k, BLOCK_N, HEAD_DIM_V, BLOCK_DV, True)
        scores = tl.dot(q, k.T, input_precision=PRECISION)  # [BLOCK_M, BLOCK_N]
        p = probabilities(scores, scale_log2, lse_log2[:, None])
        seen = start + tl.arange(0, BLOCK_N) < hidden
        p = tl.where(seen[None, :], p, 0.0)
        dp = tl.dot(dout, v.T, input_precision=PRECISION)  # [BLOCK_M, BLOCK_N]
        ds = p * (dp - delta[:, None])
        dq = tl.dot(ds.to(k.dtype), k, dq, input_precision=PRECISION)
    at, exists = rows_of(
        DQ + b * stride_dqb + query.to(tl.int64) * stride_dqn, s * GROUP, stride_dqh,
        GROUP, BLOCK_M, HEAD_DIM, BLOCK_D,
    )  # fmt: skip
    tl.store(at, (dq * gradient_scale(scale_log2)).to(DQ.dtype.element_ty), mask=exists)
