"""Terms of the scores in the portable kernels: soft-capping, and biases by distance.

All take the pointer or number None where there is no such term, and then leave nothing in the code.
Scores are in units of 1 / scale, as a product gives them. docs/internals/kernels.md has the
mathematics.
"""

import triton
import triton.language as tl

from sparseflash.kernels.softmax import LOG2E


@triton.jit
def tanh_of_ratio(s, cap):
    """tanh(s / cap). tl.exp2 takes any s here: at its ends 0 and inf give -1 and 1."""
    return 1.0 - 2.0 / (tl.exp2(s * (2.0 * LOG2E / cap)) + 1.0)


@triton.jit
def with_terms(
    s, cap, per_scale, Slopes, Bias, radius, first,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, TRANSPOSED: tl.constexpr,
):  # fmt: skip
    """The logits of scores [BLOCK_M, BLOCK_N], or their transpose.

    cap: softcap / scale. per_scale: 1 / scale. Slopes, Bias: those of the head; Bias points to its
    middle. first: distance of the first key from the first query.
    """
    if cap is not None:
        s = cap * tanh_of_ratio(s, cap)
    if per_scale is not None:
        row = tl.arange(0, BLOCK_M)
        key = first + tl.arange(0, BLOCK_N)
        d = key[:, None] - row[None, :] if TRANSPOSED else key[None, :] - row[:, None]
        if Slopes is not None:
            s -= tl.load(Slopes) * per_scale * tl.abs(d).to(tl.float32)
        if Bias is not None:
            s += tl.load(Bias + tl.minimum(tl.maximum(d, -radius), radius)) * per_scale
    return s


@triton.jit
def cap_slope(s, cap):
    """The derivative of soft-capping at scores that are not capped."""
    t = tanh_of_ratio(s, cap)
    return 1.0 - t * t


@triton.jit
def add_bias_gradient(DBias, ds, radius, first, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """Add ds [BLOCK_M, BLOCK_N] by distance to sums that are this program's own.

    DBias points to their middle. A tile within the radius is skewed: a distance is a column.
    """
    tl.debug_barrier()  # the sums of the tile before are stored
    if first - BLOCK_M >= radius:
        tl.store(DBias + radius, tl.load(DBias + radius) + tl.sum(tl.sum(ds, 1), 0))
    elif first + BLOCK_N <= -radius:
        tl.store(DBias - radius, tl.load(DBias - radius) + tl.sum(tl.sum(ds, 1), 0))
    else:
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
