"""Gradient of a bias by distance, from the tiles near the diagonal.

Tiles whose distances all take the first entry of the bias, or all the last, add to one sum each:
`backward_q` has these. The other tiles are few where the radius is short. They are computed once
more here, by small tiles, because a tile that is summed by distance takes many registers.
docs/internals/kernels.md has the mathematics.
"""

import triton
import triton.language as tl

from sparseflash.kernels.dropout import head_keys
from sparseflash.kernels.softmax import probabilities
from sparseflash.kernels.tl.common import (
    UNSPECIALIZED,
    block_list,
    block_start,
    keep_bits,
    load_tile,
    split_program,
    tile_bits,
)
from sparseflash.kernels.tl.terms import is_high, is_low, shift_with, with_terms


@triton.jit
def add_by_distance(DBias, ds, radius, first, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """Add ds [BLOCK_M, BLOCK_N] by distance to sums that are this program's own.

    DBias points to their middle. The tile is skewed: a distance is a column.
    """
    tl.debug_barrier()  # the sums of the tile before are stored
    WIDTH: tl.constexpr = 2 * max(BLOCK_M, BLOCK_N)  # of BLOCK_M + BLOCK_N - 1 distances
    d = tl.arange(0, WIDTH) - BLOCK_M
    key = d[None, :] + tl.arange(0, BLOCK_M)[:, None]  # [BLOCK_M, WIDTH]
    inside = (key >= 0) & (key < BLOCK_N)
    skewed = tl.gather(ds, tl.minimum(tl.maximum(key, 0), BLOCK_N - 1), 1)
    sums = tl.sum(tl.where(inside, skewed, 0.0), 0)  # [WIDTH]
    d += first
    within = tl.abs(d) < radius
    before = tl.load(DBias + d, mask=within, other=0.0)
    tl.store(DBias + d, before + sums, mask=within)
    low = tl.sum(tl.where(d <= -radius, sums, 0.0), 0)
    high = tl.sum(tl.where(d >= radius, sums, 0.0), 0)
    tl.store(DBias - radius, tl.load(DBias - radius) + low)
    tl.store(DBias + radius, tl.load(DBias + radius) + high)


@triton.jit(do_not_specialize=UNSPECIALIZED)
def backward_bias(
    Q, K, V, DOut, LseLog2, Delta, DBias,
    row_ptr, row_mid, col_idx, tile_idx, bits,
    stride_qb, stride_qh, stride_qn, stride_kb, stride_kh, stride_kn,
    stride_vb, stride_vh, stride_vn, stride_gb, stride_gh, stride_gn,
    scale_log2, seed_ptr, drop_threshold, keep_scale,
    n_q, n_k, n_tiles, heads, group, mask_stride_b, mask_stride_h,
    cap, Slopes, Bias, radius,
    HEAD_DIM: tl.constexpr, HEAD_DIM_V: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, FAR_M: tl.constexpr, FAR_N: tl.constexpr,
    BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr, DENSE: tl.constexpr, PARTIAL: tl.constexpr,
    DROPOUT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """DBias, zeros (B * H_q, n_tiles, 2 radius + 1): a program sums its own, of BLOCK_M queries.

    FAR_M, FAR_N: the tiles of backward_q, multiples of BLOCK_M and BLOCK_N. Those that are far are
    not summed here.

    q [BLOCK_M, BLOCK_D]; dout [BLOCK_M, BLOCK_DV]; lse_log2, delta [BLOCK_M];
    k [BLOCK_N, BLOCK_D]; v [BLOCK_N, BLOCK_DV]
    """
    tile, bh = split_program(n_tiles)
    b = (bh // heads).to(tl.int64)
    h = (bh % heads).to(tl.int64)
    q_start = tile * BLOCK_M
    if Slopes is not None:
        Slopes += h
    Bias += h * (2 * radius + 1) + radius
    DBias += tl.program_id(0).to(tl.int64) * (2 * radius + 1) + radius
    k_base = K + b * stride_kb + (h // group) * stride_kh
    v_base = V + b * stride_vb + (h // group) * stride_vh
    q_base = Q + b * stride_qb + h * stride_qh
    q = load_tile(q_base, q_start, stride_qn, n_q, BLOCK_M, HEAD_DIM, BLOCK_D, True)
    g_base = DOut + b * stride_gb + h * stride_gh
    dout = load_tile(g_base, q_start, stride_gn, n_q, BLOCK_M, HEAD_DIM_V, BLOCK_DV, True)
    rows = q_start + tl.arange(0, BLOCK_M)
    at = bh.to(tl.int64) * n_q + rows
    lse_log2 = tl.load(LseLog2 + at, mask=rows < n_q, other=float("inf"))
    delta = tl.load(Delta + at, mask=rows < n_q, other=0.0)
    if DROPOUT:
        row_head, column_head = head_keys(seed_ptr, bh)

    row = 0 if DENSE else b * mask_stride_b + h * mask_stride_h + tile // (BLOCK_Q // BLOCK_M)
    first_block, _middle, n_partial, n_full = block_list(
        row_ptr, row_mid, row, n_k, BLOCK_K, BLOCK_N, DENSE
    )
    if not DENSE:
        col_idx += first_block
        tile_idx += first_block
    first_key = n_k - n_q  # at distance 0 from query 0
    for t in tl.range(0, n_partial + n_full):
        start = block_start(col_idx, t, BLOCK_K, BLOCK_N, DENSE)
        far_first = start // FAR_N * FAR_N - q_start // FAR_M * FAR_M - first_key
        if not (is_low(radius, far_first, FAR_N) | is_high(radius, far_first, FAR_M)):
            first = start - q_start - first_key
            k = load_tile(k_base, start, stride_kn, n_k, BLOCK_N, HEAD_DIM, BLOCK_D, True)
            v = load_tile(v_base, start, stride_vn, n_k, BLOCK_N, HEAD_DIM_V, BLOCK_DV, True)
            s = tl.dot(q, k.T, input_precision=PRECISION)  # [BLOCK_M, BLOCK_N]
            _, logits, unit, rest = with_terms(
                s, scale_log2, cap, Slopes, Bias, radius, first,
                BLOCK_M, BLOCK_N, False, True, q.dtype != tl.float32,
            )  # fmt: skip
            p = probabilities(logits, unit, shift_with(lse_log2, Slopes, rest, unit)[:, None])
            p = tl.where((start + tl.arange(0, BLOCK_N) < n_k)[None, :], p, 0.0)
            if PARTIAL and not DENSE:
                if t < n_partial:
                    allowed = tile_bits(
                        bits, tl.load(tile_idx + t // (BLOCK_K // BLOCK_N)), q_start % BLOCK_Q,
                        start % BLOCK_K, BLOCK_Q, BLOCK_K, BLOCK_M, BLOCK_N, False,
                    )  # fmt: skip
                    p = tl.where(allowed, p, 0.0)
            dp = tl.dot(dout, v.T, input_precision=PRECISION)  # [BLOCK_M, BLOCK_N]
            if DROPOUT:
                keep = keep_bits(
                    row_head, column_head, q_start, start, drop_threshold, BLOCK_M, BLOCK_N, False
                )
                dp = tl.where(keep, dp * keep_scale, 0.0)
            add_by_distance(DBias, p * (dp - delta[:, None]), radius, first, BLOCK_M, BLOCK_N)
