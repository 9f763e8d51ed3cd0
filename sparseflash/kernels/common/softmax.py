"""How the softmax and its scale enter the kernels, those in Triton and those in Gluon.

Exponentials inside a kernel have base 2, as the hardware has them:

    p = exp2(scale_log2 * s - lse_log2)    scale_log2 = scale * log2(e), lse_log2 = lse * log2(e)

`lse` is the natural logarithm everywhere outside. docs/internals/kernels.md has the mathematics.
"""

import triton
import triton.language as tl

from sparseflash.kernels.common import shapes

LOG2E = tl.constexpr(shapes.LOG2E)
LN2 = tl.constexpr(shapes.LN2)
LAZY_STEP = tl.constexpr(8.0)  # base 2: P up to 256, which float16 holds with room to spare


# ------------------------------------------------------------------ forward
@triton.jit
def running_max(
    m, block_max, scale_log2, MASKED: tl.constexpr, LAZY: tl.constexpr = False, add=None
):
    """Return the maxima after a block, and what is subtracted in the exponents.

    add: to the scores of the block in base 2, or None.

    With LAZY a maximum stays until it is passed by more than LAZY_STEP, so that most factors of the
    sums are 1. P is up to 2^LAZY_STEP then. LSE and O come out the same: any m does for them.
    """
    top = block_max * scale_log2
    if add is not None:
        top += add
    if LAZY:
        # any score passes the -inf of a row that has seen no key; NaN stays out, as of a maximum
        m_new = tl.where(top > m + LAZY_STEP, top, m)
    else:
        m_new = tl.maximum(m, top)
    # a row that has seen only masked keys keeps the maximum -inf: shift by 0, as -inf - -inf is NaN
    shift = finite(m_new) if MASKED else m_new
    return m_new, shift


@triton.jit
def finite(m):
    """Return the row maxima, 0 for a row that has seen no key yet."""
    return tl.where(m == float("-inf"), 0.0, m)


@triton.jit
def rescale_factor(m, shift):
    """Return the factor of the sums of rows with maxima m when `shift` takes their place."""
    return tl.exp2(m - shift)


@triton.jit
def with_sink(m, total, sink):
    """Return the maxima and sums of rows after a key with the score `sink` (base e), and the factor
    of the sums of values.
    """
    m_new = tl.maximum(m, sink * LOG2E)
    alpha = rescale_factor(m, finite(m_new))
    return m_new, total * alpha + tl.exp2(sink * LOG2E - finite(m_new)), alpha


@triton.jit
def nonzero(total):
    """Return the sums of rows, 1 for a row that has seen no key: its output is 0 then and its LSE
    -inf.

    The sum of a row with a NaN is NaN, though its maximum is not: maxima ignore NaN.
    """
    return tl.where(total == 0.0, 1.0, total)


@triton.jit
def with_nan(m, total):
    """Return the maxima of rows, NaN where their sums are."""
    return tl.where(total == total, m, total)


@triton.jit
def natural_lse(m, total):
    """Return the LSE of rows with maxima m (base 2), sums `total` of exp2(scale_log2 * s - m)."""
    return (m + tl.log2(total)) * LN2


@triton.jit
def natural_max(m):
    """Return the largest logits of rows with maxima m (base 2)."""
    return m * LN2


# ------------------------------------------------------------------ forward and backward
@triton.jit
def probabilities(s, scale_log2, shift):
    """exp2(scale_log2 * s - shift); shift: the running maxima, or lse_log2."""
    return tl.exp2(s * scale_log2 - shift)


# ------------------------------------------------------------------ backward
@triton.jit
def sink_probabilities(sink, lse):
    """Those of a sink in rows with this LSE, both in base e. Meaningless for an empty row."""
    return tl.exp2((sink - lse) * LOG2E)


@triton.jit
def to_lse_log2(lse):
    """Return the LSE in base 2; +inf for an empty row, so that its probabilities are 0."""
    return tl.where(lse == float("-inf"), float("inf"), lse * LOG2E)


@triton.jit
def gradient_scale(scale_log2):
    """scale: what dS K and dS^T Q are multiplied by."""
    return scale_log2 * LN2
