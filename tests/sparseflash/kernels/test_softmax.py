"""The running maxima of the softmax, exact and lazy, in Triton's interpreter."""

import pytest
import torch
import triton
import triton.language as tl

from sparseflash.kernels.common.shapes import LOG2E
from sparseflash.kernels.common.softmax import (
    LAZY_STEP,
    natural_lse,
    probabilities,
    rescale_factor,
    running_max,
)
from sparseflash.kernels.common.versions import release

pytestmark = pytest.mark.skipif(
    torch.cuda.is_available(), reason="tests/gpu runs the kernels that use it"
)

ROWS, BLOCK, BLOCKS = 16, 32, 12
INF, NAN = float("inf"), float("nan")


@triton.jit
def _rows(
    s_ptr, lse_ptr, largest_ptr, rescaled_ptr, scale_log2,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, BLOCKS: tl.constexpr, LAZY: tl.constexpr,
):  # fmt: skip
    """Of scores [ROWS, BLOCKS, BLOCK], for each row: LSE, largest P, number of factors not 1."""
    r, c = tl.arange(0, ROWS), tl.arange(0, BLOCK)
    m = tl.full([ROWS], float("-inf"), tl.float32)
    l = tl.zeros([ROWS], tl.float32)
    largest = tl.zeros([ROWS], tl.float32)
    rescaled = tl.zeros([ROWS], tl.int32)
    for j in tl.static_range(BLOCKS):
        s = tl.load(s_ptr + (r[:, None] * BLOCKS + j) * BLOCK + c[None, :])
        m_new, shift = running_max(m, tl.max(s, 1), scale_log2, True, LAZY)
        p = probabilities(s, scale_log2, shift[:, None])
        alpha = rescale_factor(m, shift)
        l = l * alpha + tl.sum(p, 1)
        largest = tl.maximum(largest, tl.max(p, 1))
        rescaled += (alpha != 1.0).to(tl.int32)
        m = m_new
    tl.store(lse_ptr + r, natural_lse(m, l))
    tl.store(largest_ptr + r, largest)
    tl.store(rescaled_ptr + r, rescaled)


@triton.jit
def _new_maxima(m_ptr, top_ptr, new_ptr, N: tl.constexpr, LAZY: tl.constexpr):
    i = tl.arange(0, N)
    m_new, _ = running_max(tl.load(m_ptr + i), tl.load(top_ptr + i), 1.0, True, LAZY)
    tl.store(new_ptr + i, m_new)


def of_rows(s, lazy, scale=0.5):
    lse, largest = torch.empty(ROWS), torch.empty(ROWS)
    rescaled = torch.empty(ROWS, dtype=torch.int32)
    _rows[(1,)](s, lse, largest, rescaled, scale * LOG2E, ROWS, BLOCK, BLOCKS, lazy)
    expected = torch.logsumexp(s.double().flatten(1) * scale, 1)
    torch.testing.assert_close(lse.double(), expected, rtol=1e-5, atol=1e-5)
    return largest, rescaled


@pytest.mark.parametrize("spread", [1.0, 30.0])
def test_lse_of_lazy_maxima(spread):
    s = spread * torch.randn(ROWS, BLOCKS, BLOCK)
    s[:4, :3] = -INF  # rows that meet only masked keys at first
    largest, rescaled = of_rows(s, True)
    exact, more = of_rows(s, False)
    assert (largest <= 2.0**LAZY_STEP.value).all() and (exact <= 1).all()
    assert (rescaled <= more).all()
    if spread == 1.0:  # only up to the first block with a key: -inf has no factor of 1
        assert rescaled[4:].tolist() == [1] * 12 and rescaled[:4].tolist() == [4] * 4


def test_rising_maxima():
    """Every block passes the maximum by less than the step; only their sum is a step."""
    rise = 0.7 * LAZY_STEP.value / LOG2E / 0.5
    s = torch.randn(ROWS, BLOCKS, BLOCK) * 0.01 + torch.arange(BLOCKS)[:, None] * rise
    largest, rescaled = of_rows(s, True)
    assert (largest > 2.0 ** (0.6 * LAZY_STEP.value)).all()
    assert (largest <= 2.0**LAZY_STEP.value).all()
    assert (rescaled == BLOCKS // 2).all() and (of_rows(s, False)[1] == BLOCKS).all()


@pytest.mark.parametrize("lazy", [True, False])
def test_what_is_not_finite(lazy):
    """A NaN stays out of the maxima; -inf gives way to any score."""
    if not lazy and release(triton.__version__) < (3, 8):
        pytest.skip("the maximum of an interpreter before Triton 3.8 takes a NaN, unlike a GPU's")
    step = LAZY_STEP.value
    m = torch.tensor([-INF, -INF, -INF, 0.0, 0.0, 0.0, INF, 0.0])
    top = torch.tensor([-INF, -1e30, NAN, NAN, -INF, INF, 0.0, step])
    new = torch.empty(8)
    _new_maxima[(1,)](m, top, new, 8, lazy)
    assert new.tolist() == [-INF, new[1], -INF, 0.0, 0.0, INF, INF, 0.0 if lazy else step]
    assert new[1] == top[1]
