"""What the kernels share: the order of floats as integers, and the best of a row."""

import triton
import triton.language as tl
from torch import Tensor

INF = tl.constexpr(float("inf"))
LARGE = tl.constexpr(3.0e38)
EMPTY = tl.constexpr(-2)


def shared_strides(x: Tensor, dims: tuple[int, ...] = (0, 1)) -> tuple[int, ...]:
    """Strides of some dimensions, 0 where the extent is 1, that is the same for all."""
    return tuple(x.stride(i) if x.shape[i] > 1 else 0 for i in dims)


@triton.jit
def clamped(score):
    """Return finite scores; NaN becomes the lowest."""
    score = tl.where(score == score, score, -LARGE)
    score = tl.where(score == 0.0, 0.0, score)  # -0.0 counts as 0.0
    return tl.minimum(tl.maximum(score, -LARGE), LARGE)


@triton.jit
def sortable(x):
    """float32 as uint32 in the same order; 0 is less than all of them."""
    bits = x.to(tl.uint32, bitcast=True)
    return tl.where(bits >> 31 == 1, bits ^ 0xFFFFFFFF, bits | 0x80000000)


@triton.jit
def best(key, candidate, count, WIDTH: tl.constexpr):
    """Return the `count` highest candidates of every row, all where there are fewer, and none for 0
    or less; among equals the first come first. key: uint32 (rows, WIDTH), 0 where there is no
    candidate.

    Halves an interval of thresholds until one leaves `count` above it, or none is left to try.
    """
    candidates = tl.sum(candidate.to(tl.int32), 1)
    count = tl.minimum(count, candidates)
    nothing = tl.full(count.shape, 0xFFFFFFFF, tl.uint32)
    low = tl.min(tl.where(candidate, key, 0xFFFFFFFF), 1)  # at least `count` keys reach this
    high = tl.max(key, 1)  # and a higher threshold cannot be
    low = tl.where(count > 0, low, nothing)
    high = tl.where(count > 0, tl.where(count == candidates, low, high), nothing)
    wide = tl.max((low < high).to(tl.int32), 0)
    while wide != 0:
        middle = low + ((high - low) >> 1) + ((high - low) & 1)
        reached = tl.sum((key >= middle[:, None]).to(tl.int32), 1)
        high = tl.where(reached == count, middle, tl.where(reached > count, high, middle - 1))
        low = tl.where(reached >= count, middle, low)
        wide = tl.max((low < high).to(tl.int32), 0)
    reached = tl.sum((key >= low[:, None]).to(tl.int32), 1)
    excess = tl.maximum(reached - tl.maximum(count, 0), 0)  # of those equal to the threshold
    end = tl.full(count.shape, WIDTH, tl.int32)
    column = tl.arange(0, WIDTH)[None, :]
    if tl.max(excess, 0) > 0:
        tie = key == low[:, None]
        kept = tl.sum(tie.to(tl.int32), 1) - excess
        end = tl.zeros_like(count)  # ties from this column on are left out
        step = WIDTH
        while step > 0:
            further = end + step
            enough = tl.sum((tie & (column < further[:, None])).to(tl.int32), 1) <= kept
            end = tl.where(enough & (further <= WIDTH), further, end)
            step = step // 2
    return (key > low[:, None]) | ((key == low[:, None]) & (column < end[:, None]))
