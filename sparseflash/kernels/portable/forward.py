"""Forward kernel: one program computes BLOCK_M rows of the output of one head.

It walks the key blocks of its row: partial blocks first (masked by their bit tile), then full
blocks (nothing inside is masked). Several programs share a multiprocessor, and while one computes
exponentials another has the matrix units. docs/internals/kernels.md has the mathematics.
"""

import triton
import triton.language as tl
from triton.language.target_info import cuda_capability_geq

from sparseflash.kernels.common.dropout import head_keys
from sparseflash.kernels.common.softmax import (
    LN2,
    natural_lse,
    natural_max,
    nonzero,
    probabilities,
    rescale_factor,
    running_max,
    with_nan,
    with_sink,
)
from sparseflash.kernels.portable.common import (
    UNSPECIALIZED,
    block_list,
    block_start,
    finished,
    keep_bits,
    load_rows,
    load_tile,
    matrix_origin,
    split_program,
    store_tile,
    tile_bits,
)
from sparseflash.kernels.portable.score import scored


@triton.jit
def online_softmax(
    s, m, l, scale_log2, MASKED: tl.constexpr, BOUNDED: tl.constexpr = False, add=None
):
    """One step of the running softmax in base 2, with scores [BLOCK_M, BLOCK_N].

    Returns the probabilities, the factor of the old sums, the new maxima and the new sums.
    add: to the scores in base 2, or None.
    BOUNDED: the exponentials of all scores are far from the ends of float32. The maxima stay as
    they are, and the sums need no factor.
    """
    if BOUNDED:
        p = tl.exp2(s * scale_log2 + add)  # [BLOCK_M, BLOCK_N]
        return p, m, m, l + tl.sum(p, 1)
    else:
        m_new, shift = running_max(m, tl.max(s, 1), scale_log2, MASKED, False, add)  # [BLOCK_M]
        p = probabilities(s, scale_log2, (shift if add is None else shift - add)[:, None])
        alpha = rescale_factor(m, shift)  # [BLOCK_M]
        return p, alpha, m_new, l * alpha + tl.sum(p, 1)


@triton.jit(do_not_specialize=UNSPECIALIZED)
def attention_forward(
    Q, K, V, K_desc, V_desc, Out, Lse,
    row_ptr, row_mid, col_idx, tile_idx, bits,
    stride_qb, stride_qh, stride_qn, stride_kb, stride_kh, stride_kn,
    stride_vb, stride_vh, stride_vn, stride_ob, stride_oh, stride_on,
    scale_log2, seed_ptr, drop_threshold, keep_scale,
    n_q, n_k, n_tiles, heads, group, mask_stride_b, mask_stride_h,
    Sink, MaxScores,
    HEAD_DIM: tl.constexpr, HEAD_DIM_V: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr, DENSE: tl.constexpr, PARTIAL: tl.constexpr,
    TMA: tl.constexpr, DROPOUT: tl.constexpr, PRECISION: tl.constexpr, BOUNDED: tl.constexpr,
    score_args=None, SCORE: tl.constexpr = None, NUMBERS: tl.constexpr = None,
    PAIRED: tl.constexpr = False,
):  # fmt: skip
    """q (B, H_q, n_q, HEAD_DIM), k (B, H_kv, n_k, HEAD_DIM), v (B, H_kv, n_k, HEAD_DIM_V) -> Out
    (B, H_q, n_q, HEAD_DIM_V), Lse (B, H_q, n_q) and, unless it is None, MaxScores like Lse.

    q [BLOCK_M, BLOCK_D]; k [BLOCK_N, BLOCK_D]; v [BLOCK_N, BLOCK_DV]; acc [BLOCK_M, BLOCK_DV];
    m, l [BLOCK_M]. BLOCK_D and BLOCK_DV are the head dims, padded.
    """
    tile, bh = split_program(n_tiles)
    b = (bh // heads).to(tl.int64)
    h = (bh % heads).to(tl.int64)
    q_start = tile * BLOCK_M
    k_offset = b * stride_kb + (h // group) * stride_kh
    v_offset = b * stride_vb + (h // group) * stride_vh
    k_row, k_col = matrix_origin(k_offset, stride_kn, TMA)
    v_row, v_col = matrix_origin(v_offset, stride_vn, TMA)
    k_base = K + k_offset
    v_base = V + v_offset

    row = 0 if DENSE else b * mask_stride_b + h * mask_stride_h + tile // (BLOCK_Q // BLOCK_M)
    first, middle, n_partial, n_full = block_list(
        row_ptr, row_mid, row, n_k, BLOCK_K, BLOCK_N, DENSE
    )
    partial_idx = col_idx if DENSE else col_idx + first
    full_idx = col_idx if DENSE else col_idx + middle
    partial_tile = tile_idx if DENSE else tile_idx + first

    q_base = Q + b * stride_qb + h * stride_qh
    q = load_tile(q_base, q_start, stride_qn, n_q, BLOCK_M, HEAD_DIM, BLOCK_D, True)
    if DROPOUT:
        row_head, column_head = head_keys(seed_ptr, bh)
    FAST: tl.constexpr = q.dtype != tl.float32
    numbers = ()
    if SCORE is not None:
        numbers = NUMBERS(b.to(tl.int32), h.to(tl.int32), n_q, n_k, score_args)
    m = tl.full([BLOCK_M], 0.0 if BOUNDED else float("-inf"), tl.float32)
    l = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_DV], tl.float32)

    # On Hopper, where a wide P V is in flight while the next scores begin, beside code that masks,
    # ptxas makes every wgmma wait for the one before it, and PAIRED, where a score loads a number
    # for each pair. Invariants are computed again to save
    # registers.
    HOPPER: tl.constexpr = cuda_capability_geq(9) and not cuda_capability_geq(10)
    WIDE: tl.constexpr = HOPPER and PARTIAL and BLOCK_D >= 128
    for phase in tl.static_range(0 if PARTIAL else 1, 2):  # partial blocks, then full ones
        for t in tl.range(0, n_full if phase == 1 else n_partial, disable_licm=WIDE):
            if phase == 1:
                start = block_start(full_idx, t, BLOCK_K, BLOCK_N, DENSE)
            elif DENSE:
                start = n_full * BLOCK_N
                allowed = (start + tl.arange(0, BLOCK_N) < n_k)[None, :]  # [1, BLOCK_N]
            else:
                start = block_start(partial_idx, t, BLOCK_K, BLOCK_N, False)
                allowed = tile_bits(
                    bits, tl.load(partial_tile + t // (BLOCK_K // BLOCK_N)),
                    q_start % BLOCK_Q, start % BLOCK_K, BLOCK_Q, BLOCK_K, BLOCK_M, BLOCK_N, False,
                )  # fmt: skip
            k = load_rows(
                k_base, K_desc, k_row, k_col, start, stride_kn, n_k,
                BLOCK_N, HEAD_DIM, BLOCK_D, phase == 1, TMA,
            )  # fmt: skip
            s = tl.dot(q, k.T, input_precision=PRECISION)  # [BLOCK_M, BLOCK_N]
            unit, add = scale_log2, None
            if SCORE is not None:  # which may be -inf
                s, unit, add, _kept = scored(
                    s, scale_log2 * LN2, numbers, b, h, q_start, start, n_q, n_k, score_args,
                    BLOCK_M, BLOCK_N, False, FAST, SCORE,
                )  # fmt: skip
            if phase == 0:
                s = tl.where(allowed, s, float("-inf"))
            p, alpha, m, l = online_softmax(
                s, m, l, unit, phase == 0 or SCORE is not None, BOUNDED, add
            )
            if DROPOUT:
                keep = keep_bits(
                    row_head, column_head, q_start, start, drop_threshold, BLOCK_M, BLOCK_N, False
                )
                p = tl.where(keep, p, 0.0)
            v = load_rows(
                v_base, V_desc, v_row, v_col, start, stride_vn, n_k,
                BLOCK_N, HEAD_DIM_V, BLOCK_DV, phase == 1, TMA,
            )  # fmt: skip
            acc = tl.dot(
                p.to(v.dtype), v, acc if BOUNDED else acc * alpha[:, None],
                input_precision=PRECISION,
            )  # fmt: skip
            if WIDE or PAIRED:
                acc = finished(acc, t)

    if BOUNDED:
        m = tl.where(l == 0, float("-inf"), m)
    rows = q_start + tl.arange(0, BLOCK_M)
    if MaxScores is not None:
        tl.store(
            MaxScores + bh.to(tl.int64) * n_q + rows, natural_max(with_nan(m, l)), mask=rows < n_q
        )
    if Sink is not None:  # one more key, whose value is 0
        m, l, alpha = with_sink(m, l, tl.load(Sink + h))
        acc *= alpha[:, None]
    total = nonzero(l)
    acc = acc * (keep_scale / total)[:, None] if DROPOUT else acc / total[:, None]
    o_base = Out + b * stride_ob + h * stride_oh
    store_tile(o_base, q_start, stride_on, n_q, acc, BLOCK_M, HEAD_DIM_V, BLOCK_DV)
    tl.store(Lse + bh.to(tl.int64) * n_q + rows, natural_lse(m, total), mask=rows < n_q)
