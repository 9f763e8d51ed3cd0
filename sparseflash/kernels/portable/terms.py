"""Terms of the scores in the portable kernels: a cap, and biases by distance.

All take the pointer or number None where there is no such term, and then leave nothing in the code.
Scores are in units of 1 / scale, as a product gives them. docs/internals/kernels.md has the
mathematics.
"""

import triton
import triton.language as tl

from sparseflash.kernels.common.softmax import LOG2E
from sparseflash.kernels.portable.capping import capped


@triton.jit
def arithmetic(start, step, N: tl.constexpr):
    """start + step * [0 .. N - 1], [N] float32: an instruction for each number that a thread has.

    In the layouts of products these differ by multiples of 8, which are constants.
    """
    eights = (8 * tl.arange(0, N // 8)).to(tl.float32)
    few = start + step * tl.arange(0, 8).to(tl.float32)
    eights, few = tl.broadcast(eights[:, None], few[None, :])  # [N // 8, 8]
    return tl.reshape(tl.fma(eights, tl.full([N // 8, 8], step, tl.float32), few), [N])


@triton.jit
def band(first, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """Return the distances in a tile and more, from the smallest less one on, for `spread`."""
    WIDTH: tl.constexpr = 2 * max(BLOCK_M, BLOCK_N)
    return first - BLOCK_M + tl.arange(0, WIDTH)


@triton.jit
def spread(values, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, T: tl.constexpr):
    """Values of the distances of a `band`, at the entries [BLOCK_M, BLOCK_N] of the tile, or its
    transpose.
    """
    query = BLOCK_M - tl.arange(0, BLOCK_M)
    key = tl.arange(0, BLOCK_N)
    at = key[:, None] + query[None, :] if T else query[:, None] + key[None, :]
    return tl.reshape(tl.gather(values, tl.reshape(at, [BLOCK_M * BLOCK_N]), 0), at.shape)


@triton.jit
def sums_by_distance(x, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """Return those of a tile [BLOCK_M, BLOCK_N], at the distances of its `band`."""
    WIDTH: tl.constexpr = 2 * max(BLOCK_M, BLOCK_N)
    key = tl.arange(0, WIDTH)[None, :] - BLOCK_M + tl.arange(0, BLOCK_M)[:, None]
    inside = (key >= 0) & (key < BLOCK_N)  # [BLOCK_M, WIDTH]
    skewed = tl.gather(x, tl.minimum(tl.maximum(key, 0), BLOCK_N - 1), 1)
    return tl.sum(tl.where(inside, skewed, 0.0), 0)  # [WIDTH]


@triton.jit
def add_exact_slopes(
    s, slope, first, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, T: tl.constexpr
):
    """Logits [BLOCK_M, BLOCK_N] less slope * |distance|, or their transpose."""
    key = first + tl.arange(0, BLOCK_N)
    query = tl.arange(0, BLOCK_M)
    d = key[:, None] - query[None, :] if T else key[None, :] - query[:, None]
    return s - slope * tl.abs(d).to(tl.float32)


@triton.jit
def add_slopes(s, slope, first, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, T: tl.constexpr):
    """`add_exact_slopes` in two terms: one for each entry, and one for each query [BLOCK_M].

    Near the diagonal large terms cancel, which leaves an error of 1e-5 where the slope is 2.
    """
    # where all distances have one sign, each is a number of the key less one of the query
    slope = tl.where(first >= 0, slope, -slope)
    start = slope * tl.cast(first, tl.float32)
    if T:
        key = start + tl.arange(0, BLOCK_N).to(tl.float32) * slope
        query = arithmetic(0.0, slope, BLOCK_M)
        s -= key[:, None]
    else:
        key = arithmetic(start, slope, BLOCK_N)
        query = tl.arange(0, BLOCK_M).to(tl.float32) * slope
        s -= key[None, :]
    if (first < BLOCK_M) & (first + BLOCK_N > 0):  # some have the other sign
        d = band(first, BLOCK_M, BLOCK_N)
        other = tl.where((d < 0) == (first >= 0), d, 0).to(tl.float32)
        s += spread(2.0 * slope * other, BLOCK_M, BLOCK_N, T)
    return s, query


@triton.jit
def is_low(radius, first, BLOCK_N: tl.constexpr):
    """Whether all distances in a tile take the first entry of the bias."""
    return first + BLOCK_N <= -radius


@triton.jit
def is_high(radius, first, BLOCK_M: tl.constexpr):
    """Whether all distances in a tile take the last entry of the bias."""
    return first - BLOCK_M >= radius


@triton.jit
def bias_of(Bias, h, radius):
    """Return the bias of a head: a pointer to its middle, its first entry and its last."""
    middle = Bias + h * (2 * radius + 1) + radius
    return middle, tl.load(middle - radius), tl.load(middle + radius)


@triton.jit
def near_entries(middle, radius, first, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """Return the entries of a `band`."""
    return tl.load(middle + tl.minimum(tl.maximum(band(first, BLOCK_M, BLOCK_N), -radius), radius))


@triton.jit
def add_bias(
    s, bias, radius, per_unit, first, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, T: tl.constexpr
):
    """Logits [BLOCK_M, BLOCK_N] with the entries of their distances, or their transpose, and what
    is left to add to all of them: the entry of a tile that takes one.

    bias: from `bias_of`.
    """
    middle, low_entry, high_entry = bias
    low, high = is_low(radius, first, BLOCK_N), is_high(radius, first, BLOCK_M)
    if not (low | high):
        entries = near_entries(middle, radius, first, BLOCK_M, BLOCK_N)
        s += spread(entries * per_unit, BLOCK_M, BLOCK_N, T)
    return s, tl.where(low, low_entry, tl.where(high, high_entry, 0.0)) * per_unit


@triton.jit
def with_terms(
    s, scale_log2, cap, Slopes, bias, radius, first,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, T: tl.constexpr, TANH: tl.constexpr,
    FAST: tl.constexpr,
):  # fmt: skip
    """Return the logits of scores [BLOCK_M, BLOCK_N], or their transpose.

    cap: softcap / scale. Slopes: those of the head; bias: from `bias_of`. first: distance of the
    first key from the first query. TANH: capped scores are tanh(s / cap), not logits in base 2.
    FAST: an error of 7e-6 of them is small, as where q and k have 16 bits.

    Returns the capped scores, the logits, their scale_log2, and what is left to add to the logits
    of each query: a number for each or for all, where there are slopes or a bias.
    """
    if cap is None:
        unit = scale_log2
    elif TANH:
        unit = cap * scale_log2
        s = capped(s, cap, 1.0, FAST)
    else:
        unit: tl.constexpr = 1.0
        s = capped(s, cap, cap * scale_log2, FAST)
    logits = s
    rest = 0.0
    if bias is not None:
        logits, rest = add_bias(logits, bias, radius, LOG2E / unit, first, BLOCK_M, BLOCK_N, T)
    if Slopes is not None:
        slope = tl.load(Slopes) * (LOG2E / unit)
        if FAST:
            logits, query = add_slopes(logits, slope, first, BLOCK_M, BLOCK_N, T)
            rest = query if bias is None else query + rest
        else:
            logits = add_exact_slopes(logits, slope, first, BLOCK_M, BLOCK_N, T)
    return s, logits, unit, rest


@triton.jit
def shift_with(shift, Slopes, bias, rest, unit):
    """Return what is subtracted in the exponents of queries [BLOCK_M], `rest` included."""
    return shift if Slopes is None and bias is None else shift - rest * unit
