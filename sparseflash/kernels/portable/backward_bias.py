"""Gradient of a bias by distance, from the tiles near the diagonal.

Tiles whose distances all take the first entry of the bias, or all the last, add to one sum each:
`backward_q` has these. The other tiles are computed once more here, along diagonals: tiles that
follow each other on a diagonal have the same distances at the same places, so they are added as
they are, and only their sum is summed by distance. docs/internals/kernels.md has the mathematics.
"""

import triton
import triton.language as tl

from sparseflash.kernels.common.dropout import head_keys
from sparseflash.kernels.common.softmax import LOG2E, probabilities
from sparseflash.kernels.portable.common import UNSPECIALIZED, keep_bits, load_tile, tile_bits
from sparseflash.kernels.portable.terms import (
    band,
    is_high,
    is_low,
    near_entries,
    shift_with,
    spread,
    sums_by_distance,
    with_terms,
)


@triton.jit
def tiles_of(row_ptr, col_idx, tile_idx, row, block, there, SIZE: tl.constexpr):
    """Of a block in each of some rows [ROWS]: its bit tile, -1 if it is full, -2 if it is not in
    the list of its row. Rows are read where they are `there`, SIZE entries at once.
    """
    begin = tl.load(row_ptr + row, mask=there, other=0)
    n = tl.load(row_ptr + row + 1, mask=there, other=0) - begin
    place = tl.full(row.shape, -1, tl.int32)
    for start in tl.range(0, tl.max(n, 0).to(tl.int32), SIZE):
        at = start + tl.arange(0, SIZE)[None, :]  # [1, SIZE]
        idx = tl.load(col_idx + begin[:, None] + at, mask=at < n[:, None], other=-1)
        found = tl.where(idx == block[:, None], at, -1)  # [ROWS, SIZE]
        place = tl.maximum(place, tl.max(found, 1))
    return tl.load(tile_idx + begin + place, mask=place >= 0, other=-2)


@triton.jit(do_not_specialize=(*UNSPECIALIZED, "first_diagonal", "diagonals", "n_parts"))
def backward_bias(
    Q, K, V, DOut, LseLog2, Delta, Sums, Ends,
    row_ptr, row_mid, col_idx, tile_idx, bits,
    stride_qb, stride_qh, stride_qn, stride_kb, stride_kh, stride_kn,
    stride_vb, stride_vh, stride_vn, stride_gb, stride_gh, stride_gn,
    scale_log2, seed_ptr, drop_threshold, keep_scale,
    n_q, n_k, n_tiles, heads, group, mask_stride_b, mask_stride_h,
    cap, Slopes, Bias, radius, first_diagonal, diagonals, n_parts,
    HEAD_DIM: tl.constexpr, HEAD_DIM_V: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
    BLOCK: tl.constexpr, STEPS: tl.constexpr, FAR_M: tl.constexpr, FAR_N: tl.constexpr,
    BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr, DENSE: tl.constexpr, PARTIAL: tl.constexpr,
    DROPOUT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Add up, in a program, to STEPS tiles of one diagonal, those of a part of the queries.

    Sums, zeros (B * H_q, n_parts, 2, 2 radius + 1): of dS by distance. Neighbouring diagonals share
    distances, and write to places of their own. Ends (n_parts * diagonals, B * H_q, 2): sums of dS
    at and beyond the first entry, and the last.

    FAR_M, FAR_N: the tiles of backward_q, multiples of BLOCK. Those that are far are not summed
    here.

    q [BLOCK, BLOCK_D]; dout [BLOCK, BLOCK_DV]; lse_log2, delta [BLOCK]; k [BLOCK, BLOCK_D];
    v [BLOCK, BLOCK_DV]
    """
    own = tl.program_id(0) % (n_parts * diagonals)
    bh = tl.program_id(0) // (n_parts * diagonals)
    part, diagonal = own // diagonals, own % diagonals
    b = (bh // heads).to(tl.int64)
    h = (bh % heads).to(tl.int64)
    if Slopes is not None:
        Slopes += h
    q_base = Q + b * stride_qb + h * stride_qh
    g_base = DOut + b * stride_gb + h * stride_gh
    k_base = K + b * stride_kb + (h // group) * stride_kh
    v_base = V + b * stride_vb + (h // group) * stride_vh
    lse_row = LseLog2 + bh.to(tl.int64) * n_q
    delta_row = Delta + bh.to(tl.int64) * n_q
    if DROPOUT:
        row_head, column_head = head_keys(seed_ptr, bh)

    ahead = first_diagonal + diagonal  # tiles from the query's to the key's
    first_key = n_k - n_q  # at distance 0 from query 0
    first = ahead * BLOCK - first_key
    Bias += h * (2 * radius + 1) + radius
    entries = spread(near_entries(Bias, radius, first, BLOCK, BLOCK) * LOG2E, BLOCK, BLOCK, False)
    total = tl.zeros([BLOCK, BLOCK], tl.float32)
    begin = tl.maximum(part * STEPS, -ahead)
    end = tl.minimum(tl.minimum(part * STEPS + STEPS, n_tiles), tl.cdiv(n_k, BLOCK) - ahead)
    if not DENSE:
        tiles = part * STEPS + tl.arange(0, STEPS)
        row = b * mask_stride_b + h * mask_stride_h + tiles * BLOCK // BLOCK_Q
        block = (tiles + ahead) * BLOCK // BLOCK_K
        walked = (tiles >= begin) & (tiles < end)
        bit_tiles = tiles_of(row_ptr, col_idx, tile_idx, row, block, walked, 64)  # [STEPS]
    for tile in tl.range(begin, end):
        q_start = tile * BLOCK
        start = q_start + ahead * BLOCK
        far_first = start // FAR_N * FAR_N - q_start // FAR_M * FAR_M - first_key
        near = not (is_low(radius, far_first, FAR_N) | is_high(radius, far_first, FAR_M))
        bit_tile = -1
        if not DENSE:
            bit_tile = tl.max(tl.where(tiles == tile, bit_tiles, -2), 0)
        if DENSE or (near & (bit_tile > -2)):
            q = load_tile(q_base, q_start, stride_qn, n_q, BLOCK, HEAD_DIM, BLOCK_D, True)
            k = load_tile(k_base, start, stride_kn, n_k, BLOCK, HEAD_DIM, BLOCK_D, True)
            v = load_tile(v_base, start, stride_vn, n_k, BLOCK, HEAD_DIM_V, BLOCK_DV, True)
            dout = load_tile(g_base, q_start, stride_gn, n_q, BLOCK, HEAD_DIM_V, BLOCK_DV, True)
            rows = q_start + tl.arange(0, BLOCK)
            there = (rows < n_q) & near
            lse_log2 = tl.load(lse_row + rows, mask=there, other=float("inf"))
            delta = tl.load(delta_row + rows, mask=there, other=0.0)
            s = tl.dot(q, k.T, input_precision=PRECISION)  # [BLOCK, BLOCK]
            _, logits, unit, rest = with_terms(
                s, scale_log2, cap, Slopes, None, radius, first,
                BLOCK, BLOCK, False, True, q.dtype != tl.float32,
            )  # fmt: skip
            shift = shift_with(lse_log2, Slopes, None, rest, unit)[:, None] - entries
            p = probabilities(logits, unit, shift)
            p = tl.where((start + tl.arange(0, BLOCK) < n_k)[None, :], p, 0.0)
            if PARTIAL and not DENSE:
                if bit_tile >= 0:
                    allowed = tile_bits(
                        bits, bit_tile, q_start % BLOCK_Q, start % BLOCK_K,
                        BLOCK_Q, BLOCK_K, BLOCK, BLOCK, False,
                    )  # fmt: skip
                    p = tl.where(allowed, p, 0.0)
            dp = tl.dot(dout, v.T, input_precision=PRECISION)  # [BLOCK, BLOCK]
            if DROPOUT:
                keep = keep_bits(
                    row_head, column_head, q_start, start, drop_threshold, BLOCK, BLOCK, False
                )
                dp = tl.where(keep, dp * keep_scale, 0.0)
            total += p * (dp - delta[:, None])

    sums = sums_by_distance(total, BLOCK, BLOCK)
    d = band(first, BLOCK, BLOCK)
    Sums += ((bh.to(tl.int64) * n_parts + part) * 2 + diagonal % 2) * (2 * radius + 1) + radius
    tl.store(Sums + d, sums, mask=tl.abs(d) < radius)
    Ends += 2 * (own * (tl.num_programs(0) // (n_parts * diagonals)) + bh)
    tl.store(Ends, tl.sum(tl.where(d <= -radius, sums, 0.0), 0))
    tl.store(Ends + 1, tl.sum(tl.where(d >= radius, sums, 0.0), 0))
