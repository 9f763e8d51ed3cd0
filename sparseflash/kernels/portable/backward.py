"""Backward kernels: two passes, no atomics, so the gradients are the same bits from run to run.

`backward_kv` walks the query blocks of a key tile (CSC) and sums dK and dV; `backward_q` walks the
key blocks of a query tile (CSR) and sums dQ. Both recompute the probabilities from the LSE. The
first works on transposed scores S^T = K Q^T, so that P^T and dS^T are left operands as they come
out of the registers and nothing is transposed. docs/internals/kernels.md has the mathematics.
"""

import triton
import triton.language as tl

from sparseflash.kernels.common.dropout import head_keys
from sparseflash.kernels.common.softmax import probabilities
from sparseflash.kernels.portable.common import (
    UNSPECIALIZED,
    block_list,
    block_start,
    finished,
    keep_bits,
    load_full,
    load_rows,
    load_tile,
    matrix_origin,
    split_program,
    store_tile,
    tile_bits,
)
from sparseflash.kernels.portable.score import listed_between, near_keys, scored, sloped


@triton.jit
def kv_step(
    dk, dv, q, k, v, dout, lse_log2, delta, scale_log2, allowed, keep, keep_scale,
    scale, numbers, b, h, q_start, k_start, n_q, n_k, score_args,
    MASKED: tl.constexpr, DROPOUT: tl.constexpr, PRECISION: tl.constexpr,
    SCORE: tl.constexpr, SLOPE: tl.constexpr,
):  # fmt: skip
    """Add one query tile to dK and dV; scores are [BLOCK_N, BLOCK_M], keys by queries."""
    s = tl.dot(k, q.T, input_precision=PRECISION)  # [BLOCK_N, BLOCK_M]
    dp = tl.dot(v, dout.T, input_precision=PRECISION)  # [BLOCK_N, BLOCK_M]
    FAST: tl.constexpr = q.dtype != tl.float32
    if SCORE is None:
        p = probabilities(s, scale_log2, lse_log2[None, :])
    else:
        x, unit, add, kept_values = scored(
            s, scale, numbers, b, h, q_start, k_start, n_q, n_k, score_args,
            q.shape[0], k.shape[0], True, FAST, SCORE,
        )  # fmt: skip
        p = probabilities(x, unit, (lse_log2 - add)[None, :])
    if MASKED:
        p = tl.where(allowed, p, 0.0)
    kept = p
    if DROPOUT:
        kept = tl.where(keep, p, 0.0)
        dp = tl.where(keep, dp * keep_scale, 0.0)
    ds = p * (dp - delta[None, :])
    if SLOPE is not None:
        ds, _sums = sloped(
            s, ds, kept_values, scale, numbers, b, h, q_start, k_start, n_q, n_k, score_args, (),
            q.shape[0], k.shape[0], True, FAST, SLOPE,
        )  # fmt: skip
    dk = tl.dot(ds.to(q.dtype), q, dk, input_precision=PRECISION)  # [BLOCK_N, BLOCK_D]
    dv = tl.dot(kept.to(dout.dtype), dout, dv, input_precision=PRECISION)  # [BLOCK_N, BLOCK_DV]
    return dk, dv


@triton.jit(do_not_specialize=UNSPECIALIZED)
def backward_kv(
    Q, K, V, DOut, Q_desc, DOut_desc, DK, DV, LseLog2, Delta,
    col_ptr, col_mid, row_idx, tile_idx, bits,
    stride_qb, stride_qh, stride_qn, stride_kb, stride_kh, stride_kn,
    stride_vb, stride_vh, stride_vn, stride_gb, stride_gh, stride_gn,
    stride_dkb, stride_dkh, stride_dkn, stride_dvb, stride_dvh, stride_dvn,
    scale, scale_log2, seed_ptr, drop_threshold, keep_scale,
    n_q, n_k, n_tiles, heads, group, mask_stride_b, mask_stride_h,
    HEAD_DIM: tl.constexpr, HEAD_DIM_V: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr, DENSE: tl.constexpr, PARTIAL: tl.constexpr,
    TMA: tl.constexpr, DROPOUT: tl.constexpr, PRECISION: tl.constexpr,
    score_args=None, SCORE: tl.constexpr = None, NUMBERS: tl.constexpr = None,
    SLOPE: tl.constexpr = None, PAIRED: tl.constexpr = False,
):  # fmt: skip
    """DK and DV, like k and v: a program sums those of BLOCK_N keys of one key head.

    k, dk [BLOCK_N, BLOCK_D]; v, dv [BLOCK_N, BLOCK_DV]; q [BLOCK_M, BLOCK_D];
    dout [BLOCK_M, BLOCK_DV]; lse_log2, delta [BLOCK_M]
    """
    tile, bh_kv = split_program(n_tiles)
    kv_heads = heads // group
    b = (bh_kv // kv_heads).to(tl.int64)
    h_kv = (bh_kv % kv_heads).to(tl.int64)
    k_start = tile * BLOCK_N
    k_base = K + b * stride_kb + h_kv * stride_kh
    k = load_tile(k_base, k_start, stride_kn, n_k, BLOCK_N, HEAD_DIM, BLOCK_D, True)
    v_base = V + b * stride_vb + h_kv * stride_vh
    v = load_tile(v_base, k_start, stride_vn, n_k, BLOCK_N, HEAD_DIM_V, BLOCK_DV, True)
    dk = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
    dv = tl.zeros([BLOCK_N, BLOCK_DV], tl.float32)
    query = tl.arange(0, BLOCK_M)

    for g in range(group):
        h = h_kv * group + g
        bh = b * heads + h
        q_offset = b * stride_qb + h * stride_qh
        g_offset = b * stride_gb + h * stride_gh
        q_row, q_col = matrix_origin(q_offset, stride_qn, TMA)
        g_row, g_col = matrix_origin(g_offset, stride_gn, TMA)
        lse_row = LseLog2 + bh * n_q
        delta_row = Delta + bh * n_q
        col = 0 if DENSE else b * mask_stride_b + h * mask_stride_h + tile // (BLOCK_K // BLOCK_N)
        first, middle, n_partial, n_full = block_list(
            col_ptr, col_mid, col, n_q, BLOCK_Q, BLOCK_M, DENSE
        )
        partial_idx = row_idx if DENSE else row_idx + first
        full_idx = row_idx if DENSE else row_idx + middle
        partial_tile = tile_idx if DENSE else tile_idx + first
        row_head = 0
        column_head = 0
        if DROPOUT:
            row_head, column_head = head_keys(seed_ptr, bh)
        numbers = ()
        if SCORE is not None:
            numbers = NUMBERS(b.to(tl.int32), h.to(tl.int32), n_q, n_k, score_args)

        for phase in tl.static_range(0 if PARTIAL else 1, 2):  # partial blocks, then full ones
            for t in tl.range(0, n_full if phase == 1 else n_partial):
                # a query beyond n_q has lse = inf, hence p = 0, and needs no mask of its own
                if phase == 1:
                    start = block_start(full_idx, t, BLOCK_Q, BLOCK_M, DENSE)
                    allowed = True
                elif DENSE:
                    start = n_full * BLOCK_M
                    allowed = True
                    if SCORE is not None:  # whatever it gives for such a query
                        allowed = (start + query < n_q)[None, :]
                else:
                    start = block_start(partial_idx, t, BLOCK_Q, BLOCK_M, False)
                    allowed = tile_bits(
                        bits, tl.load(partial_tile + t // (BLOCK_Q // BLOCK_M)),
                        start % BLOCK_Q, k_start % BLOCK_K,
                        BLOCK_Q, BLOCK_K, BLOCK_M, BLOCK_N, True,
                    )  # fmt: skip
                q = load_rows(
                    Q + q_offset, Q_desc, q_row, q_col, start, stride_qn, n_q,
                    BLOCK_M, HEAD_DIM, BLOCK_D, phase == 1, TMA,
                )  # fmt: skip
                dout = load_rows(
                    DOut + g_offset, DOut_desc, g_row, g_col, start, stride_gn, n_q,
                    BLOCK_M, HEAD_DIM_V, BLOCK_DV, phase == 1, TMA,
                )  # fmt: skip
                if phase == 1:
                    lse_log2 = tl.load(lse_row + start + query)
                    delta = tl.load(delta_row + start + query)
                else:
                    there = start + query < n_q
                    lse_log2 = tl.load(lse_row + start + query, mask=there, other=float("inf"))
                    delta = tl.load(delta_row + start + query, mask=there, other=0.0)
                keep = True
                if DROPOUT:
                    keep = keep_bits(
                        row_head, column_head, start, k_start, drop_threshold, BLOCK_M, BLOCK_N,
                        True,
                    )  # fmt: skip
                dk, dv = kv_step(
                    dk, dv, q, k, v, dout, lse_log2, delta, scale_log2, allowed, keep, keep_scale,
                    scale, numbers, b, h, start, k_start, n_q, n_k, score_args,
                    phase == 0 and (not DENSE or SCORE is not None), DROPOUT, PRECISION,
                    SCORE, SLOPE,
                )  # fmt: skip
                if PAIRED:
                    dk, dv = finished(dk, t), finished(dv, t)

    dk *= scale
    if DROPOUT:
        dv *= keep_scale
    dk_base = DK + b * stride_dkb + h_kv * stride_dkh
    store_tile(dk_base, k_start, stride_dkn, n_k, dk, BLOCK_N, HEAD_DIM, BLOCK_D)
    dv_base = DV + b * stride_dvb + h_kv * stride_dvh
    store_tile(dv_base, k_start, stride_dvn, n_k, dv, BLOCK_N, HEAD_DIM_V, BLOCK_DV)


@triton.jit
def q_step(
    dq, sums, q, k, v, dout, lse_log2, delta, scale_log2, allowed, keep, keep_scale,
    scale, numbers, b, h, q_start, k_start, n_q, n_k, score_args,
    MASKED: tl.constexpr, DROPOUT: tl.constexpr, PRECISION: tl.constexpr,
    SCORE: tl.constexpr, SLOPE: tl.constexpr, WITH_DQ: tl.constexpr,
):  # fmt: skip
    """Add one key tile to dQ; scores are [BLOCK_M, BLOCK_N], queries by keys.

    sums: those of SLOPE. Without DQ, SLOPE adds to the gradients of tables.
    """
    s = tl.dot(q, k.T, input_precision=PRECISION)  # [BLOCK_M, BLOCK_N]
    FAST: tl.constexpr = q.dtype != tl.float32
    if SCORE is None:
        p = probabilities(s, scale_log2, lse_log2[:, None])
    else:
        x, unit, add, kept_values = scored(
            s, scale, numbers, b, h, q_start, k_start, n_q, n_k, score_args,
            q.shape[0], k.shape[0], False, FAST, SCORE,
        )  # fmt: skip
        p = probabilities(x, unit, (lse_log2 - add)[:, None])
    if MASKED:
        p = tl.where(allowed, p, 0.0)
    dp = tl.dot(dout, v.T, input_precision=PRECISION)  # [BLOCK_M, BLOCK_N]
    if DROPOUT:
        dp = tl.where(keep, dp * keep_scale, 0.0)
    ds = p * (dp - delta[:, None])
    if SLOPE is not None:
        ds, sums = sloped(
            s, ds, kept_values, scale, numbers, b, h, q_start, k_start, n_q, n_k, score_args, sums,
            q.shape[0], k.shape[0], False, FAST, SLOPE,
        )  # fmt: skip
    if WITH_DQ:
        dq = tl.dot(ds.to(k.dtype), k, dq, input_precision=PRECISION)  # [BLOCK_M, BLOCK_D]
    return dq, sums


@triton.jit(do_not_specialize=UNSPECIALIZED)
def backward_q(
    Q, K, V, DOut, K_desc, V_desc, DQ, LseLog2, Delta,
    row_ptr, row_mid, col_idx, tile_idx, bits,
    stride_qb, stride_qh, stride_qn, stride_kb, stride_kh, stride_kn,
    stride_vb, stride_vh, stride_vn, stride_gb, stride_gh, stride_gn,
    stride_dqb, stride_dqh, stride_dqn,
    scale, scale_log2, seed_ptr, drop_threshold, keep_scale,
    n_q, n_k, n_tiles, heads, group, mask_stride_b, mask_stride_h,
    HEAD_DIM: tl.constexpr, HEAD_DIM_V: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr, DENSE: tl.constexpr, PARTIAL: tl.constexpr,
    TMA: tl.constexpr, DROPOUT: tl.constexpr, PRECISION: tl.constexpr,
    score_args=None, RowSums=None, near_low=None, near_high=None,
    SCORE: tl.constexpr = None, NUMBERS: tl.constexpr = None, SLOPE: tl.constexpr = None,
    SUMS: tl.constexpr = 0, PAIRED: tl.constexpr = False,
):  # fmt: skip
    """DQ, like q: a program sums that of BLOCK_M queries of one head.

    With a score, RowSums (SUMS, B, H_q, n_q) is what SLOPE sums. Without DQ, SLOPE adds to the
    gradients of tables; with near_low and near_high only tiles between these distances have some.

    q, dq [BLOCK_M, BLOCK_D]; dout [BLOCK_M, BLOCK_DV]; lse_log2, delta [BLOCK_M];
    k [BLOCK_N, BLOCK_D]; v [BLOCK_N, BLOCK_DV]
    """
    tile, bh = split_program(n_tiles)
    b = (bh // heads).to(tl.int64)
    h = (bh % heads).to(tl.int64)
    q_start = tile * BLOCK_M
    k_offset = b * stride_kb + (h // group) * stride_kh
    v_offset = b * stride_vb + (h // group) * stride_vh
    k_row, k_col = matrix_origin(k_offset, stride_kn, TMA)
    v_row, v_col = matrix_origin(v_offset, stride_vn, TMA)
    q_base = Q + b * stride_qb + h * stride_qh
    q = load_tile(q_base, q_start, stride_qn, n_q, BLOCK_M, HEAD_DIM, BLOCK_D, True)
    g_base = DOut + b * stride_gb + h * stride_gh
    dout = load_tile(g_base, q_start, stride_gn, n_q, BLOCK_M, HEAD_DIM_V, BLOCK_DV, True)
    rows = q_start + tl.arange(0, BLOCK_M)
    at = bh.to(tl.int64) * n_q + rows
    lse_log2 = tl.load(LseLog2 + at, mask=rows < n_q, other=float("inf"))
    delta = tl.load(Delta + at, mask=rows < n_q, other=0.0)

    row = 0 if DENSE else b * mask_stride_b + h * mask_stride_h + tile // (BLOCK_Q // BLOCK_M)
    first, middle, n_partial, n_full = block_list(
        row_ptr, row_mid, row, n_k, BLOCK_K, BLOCK_N, DENSE
    )
    partial_idx = col_idx if DENSE else col_idx + first
    full_idx = col_idx if DENSE else col_idx + middle
    partial_tile = tile_idx if DENSE else tile_idx + first

    row_head = 0
    column_head = 0
    if DROPOUT:
        row_head, column_head = head_keys(seed_ptr, bh)
    dq = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    numbers = ()
    if SCORE is not None:
        numbers = NUMBERS(b.to(tl.int32), h.to(tl.int32), n_q, n_k, score_args)
    sums = ()
    for _ in tl.static_range(SUMS):
        sums = sums + (tl.zeros([BLOCK_M], tl.float32),)  # noqa: RUF005

    begin_partial = 0
    begin_full = 0
    ragged = n_full * BLOCK_N if DENSE else 0
    if near_low is not None:
        near_key, near_end = near_keys(q_start, near_low, near_high)
        if DENSE:
            begin_full, n_full = near_key // BLOCK_N, tl.minimum(n_full, near_end // BLOCK_N)
        else:
            begin_partial, n_partial = listed_between(
                partial_idx, n_partial, near_key, near_end, BLOCK_K, BLOCK_N
            )
            begin_full, n_full = listed_between(
                full_idx, n_full, near_key, near_end, BLOCK_K, BLOCK_N
            )

    if PARTIAL:
        for t in tl.range(begin_partial, n_partial):
            if DENSE:
                start = ragged
                allowed = (start + tl.arange(0, BLOCK_N) < n_k)[None, :]
            else:
                start = block_start(partial_idx, t, BLOCK_K, BLOCK_N, False)
                allowed = tile_bits(
                    bits, tl.load(partial_tile + t // (BLOCK_K // BLOCK_N)),
                    q_start % BLOCK_Q, start % BLOCK_K, BLOCK_Q, BLOCK_K, BLOCK_M, BLOCK_N, False,
                )  # fmt: skip
            k = load_tile(K + k_offset, start, stride_kn, n_k, BLOCK_N, HEAD_DIM, BLOCK_D, True)
            v = load_tile(V + v_offset, start, stride_vn, n_k, BLOCK_N, HEAD_DIM_V, BLOCK_DV, True)
            keep = True
            if DROPOUT:
                keep = keep_bits(
                    row_head, column_head, q_start, start, drop_threshold, BLOCK_M, BLOCK_N, False
                )
            dq, sums = q_step(
                dq, sums, q, k, v, dout, lse_log2, delta, scale_log2, allowed, keep, keep_scale,
                scale, numbers, b, h, q_start, start, n_q, n_k, score_args,
                True, DROPOUT, PRECISION, SCORE, SLOPE, DQ is not None,
            )  # fmt: skip

    # the index is loaded one tile ahead: a load that an address waits for would cost the pipeline a
    # stage
    start = 0
    if n_full > 0:
        start = block_start(full_idx, begin_full, BLOCK_K, BLOCK_N, DENSE)
    for t in tl.range(begin_full, n_full):
        next_start = block_start(full_idx, tl.minimum(t + 1, n_full - 1), BLOCK_K, BLOCK_N, DENSE)
        k = load_full(
            K + k_offset, K_desc, k_row, k_col, start, stride_kn, BLOCK_N, HEAD_DIM, BLOCK_D, TMA
        )
        v = load_full(
            V + v_offset, V_desc, v_row, v_col, start, stride_vn, BLOCK_N, HEAD_DIM_V, BLOCK_DV, TMA
        )
        keep = True
        if DROPOUT:
            keep = keep_bits(
                row_head, column_head, q_start, start, drop_threshold, BLOCK_M, BLOCK_N, False
            )
        dq, sums = q_step(
            dq, sums, q, k, v, dout, lse_log2, delta, scale_log2, True, keep, keep_scale,
            scale, numbers, b, h, q_start, start, n_q, n_k, score_args,
            False, DROPOUT, PRECISION, SCORE, SLOPE, DQ is not None,
        )  # fmt: skip
        if PAIRED:
            dq = finished(dq, t)
        start = next_start

    if DQ is not None:
        dq_base = DQ + b * stride_dqb + h * stride_dqh
        store_tile(dq_base, q_start, stride_dqn, n_q, dq * scale, BLOCK_M, HEAD_DIM, BLOCK_D)
    for i in tl.static_range(SUMS):
        rows_of = RowSums + i * (tl.num_programs(0) // n_tiles).to(tl.int64) * n_q
        tl.store(rows_of + at, sums[i], mask=rows < n_q)


@triton.jit(do_not_specialize=(*UNSPECIALIZED, "batch", "entries"))
def backward_batch(
    Q, K, V, DOut, LseLog2, Delta, row_ptr, row_mid, col_idx, tile_idx, bits,
    stride_qb, stride_qh, stride_qn, stride_kb, stride_kh, stride_kn,
    stride_vb, stride_vh, stride_vn, stride_gb, stride_gh, stride_gn,
    scale, scale_log2, seed_ptr, drop_threshold, keep_scale,
    n_q, n_k, n_tiles, heads, group, mask_stride_b, mask_stride_h, batch, entries, score_args,
    HEAD_DIM: tl.constexpr, HEAD_DIM_V: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr, DENSE: tl.constexpr, PARTIAL: tl.constexpr,
    DROPOUT: tl.constexpr, PRECISION: tl.constexpr, SCORE: tl.constexpr, NUMBERS: tl.constexpr,
    SLOPE: tl.constexpr, ADD: tl.constexpr, COUNT: tl.constexpr,
):  # fmt: skip
    """Gradients of tables that all batch entries share: a program sums those of a tile over
    `entries` batch entries and adds the sum. SLOPE sums COUNT values of each pair, ADD adds them.
    """
    tile, part = split_program(n_tiles)
    h = (part % heads).to(tl.int64)
    first_b = part // heads * entries
    q_start = tile * BLOCK_M
    rows = q_start + tl.arange(0, BLOCK_M)
    row = 0 if DENSE else h * mask_stride_h + tile // (BLOCK_Q // BLOCK_M)
    first, _middle, n_partial, n_full = block_list(
        row_ptr, row_mid, row, n_k, BLOCK_K, BLOCK_N, DENSE
    )
    for t in tl.range(0, n_partial + n_full):
        start = block_start(col_idx if DENSE else col_idx + first, t, BLOCK_K, BLOCK_N, DENSE)
        allowed = (start + tl.arange(0, BLOCK_N) < n_k)[None, :]
        if PARTIAL and not DENSE:
            block = tl.minimum(t, n_partial - 1) // (BLOCK_K // BLOCK_N)
            seen = tile_bits(
                bits, tl.load(tile_idx + first + block, mask=t < n_partial, other=0),
                q_start % BLOCK_Q, start % BLOCK_K, BLOCK_Q, BLOCK_K, BLOCK_M, BLOCK_N, False,
            )  # fmt: skip
            allowed = allowed & (seen | (t >= n_partial))
        sums = ()
        for _ in tl.static_range(COUNT):
            sums = sums + (tl.zeros([BLOCK_M, BLOCK_N], tl.float32),)  # noqa: RUF005
        for entry in range(first_b, tl.minimum(first_b + entries, batch)):
            b = tl.cast(entry, tl.int64)
            q_base, g_base = Q + b * stride_qb + h * stride_qh, DOut + b * stride_gb + h * stride_gh
            k_base = K + b * stride_kb + (h // group) * stride_kh
            v_base = V + b * stride_vb + (h // group) * stride_vh
            q = load_tile(q_base, q_start, stride_qn, n_q, BLOCK_M, HEAD_DIM, BLOCK_D, True)
            dout = load_tile(g_base, q_start, stride_gn, n_q, BLOCK_M, HEAD_DIM_V, BLOCK_DV, True)
            k = load_tile(k_base, start, stride_kn, n_k, BLOCK_N, HEAD_DIM, BLOCK_D, True)
            v = load_tile(v_base, start, stride_vn, n_k, BLOCK_N, HEAD_DIM_V, BLOCK_DV, True)
            of_head = b * heads + h
            at = of_head * n_q + rows
            lse_log2 = tl.load(LseLog2 + at, mask=rows < n_q, other=float("inf"))
            delta = tl.load(Delta + at, mask=rows < n_q, other=0.0)
            keep = True
            if DROPOUT:
                row_head, column_head = head_keys(seed_ptr, of_head.to(tl.int32))
                keep = keep_bits(
                    row_head, column_head, q_start, start, drop_threshold, BLOCK_M, BLOCK_N, False
                )
            numbers = NUMBERS(b.to(tl.int32), h.to(tl.int32), n_q, n_k, score_args)
            _dq, sums = q_step(
                0.0, sums, q, k, v, dout, lse_log2, delta, scale_log2, allowed, keep, keep_scale,
                scale, numbers, b, h, q_start, start, n_q, n_k, score_args,
                True, DROPOUT, PRECISION, SCORE, SLOPE, False,
            )  # fmt: skip
        sloped(
            sums[0], sums[0], (), scale, (), h * 0, h, q_start, start, n_q, n_k, score_args, sums,
            BLOCK_M, BLOCK_N, False, False, ADD,
        )  # fmt: skip
