"""Triton kernels of the selectors; the plain torch of each stands in pool.py and choose.py."""

from collections.abc import Sequence
from contextlib import nullcontext
from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl
from torch import Tensor

if TYPE_CHECKING:
    from sparseflash.select.choose import Frame, Rule

_INF = tl.constexpr(float("inf"))
_LARGE = tl.constexpr(3.0e38)
_EMPTY = tl.constexpr(-2)


_PLACES = ("mean", "max", "min", "positive", "negative", "high", "middle", "low")


def pool_kernel(*inputs: tuple[Tensor, int, Sequence[str]]) -> tuple[Tensor, ...]:
    """`pool.pool_torch` of one or two (x, block, kinds), in one launch that reads every x once.

    The kinds "high", "middle" and "low" are bfloat16 parts whose sum is the mean in float32.
    """
    arguments, codes, out, programs = [], [], [], []
    for x, block, kinds in inputs:
        x = x.detach()
        x = x if x.stride(-1) == 1 else x.contiguous()
        batch, heads, n, dim = x.shape
        blocks = -(-n // block)
        dtype = torch.bfloat16 if "high" in kinds else torch.float32
        out.append(
            torch.empty(batch, heads, blocks, len(kinds) * dim, dtype=dtype, device=x.device)
        )
        arguments += [x, out[-1], *x.stride()[:3], n, blocks, heads]
        place = sum((i + 1) << 4 * _PLACES.index(kind) for i, kind in enumerate(kinds))
        codes += [place, len(kinds), block]
        programs.append(blocks * batch * heads)
    if len(inputs) == 1:
        arguments, codes = 2 * arguments, 2 * codes
    dim = inputs[0][0].shape[-1]
    # tokens at a time, and times unrolled: three reductions take registers
    step, unroll = (4, 16) if max(len(kinds) for _, _, kinds in inputs) > 2 else (8, 8)
    with _on(inputs[0][0].device):
        _pool[(sum(programs),)](
            *arguments, programs[0], *codes, HEAD_DIM=dim, BLOCK_D=triton.next_power_of_2(dim),
            BOTH=len(inputs) == 2, MOST=step,
            UNROLL=unroll, num_warps=2,
        )  # fmt: skip
    return tuple(out)


@triton.jit(do_not_specialize=("n", "blocks", "heads", "n2", "blocks2", "heads2", "first"))
def _pool(
    X, Out, stride_b, stride_h, stride_n, n, blocks, heads,
    X2, Out2, stride_b2, stride_h2, stride_n2, n2, blocks2, heads2, first,
    PLACES: tl.constexpr, KINDS: tl.constexpr, BLOCK: tl.constexpr,
    PLACES2: tl.constexpr, KINDS2: tl.constexpr, BLOCK2: tl.constexpr,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BOTH: tl.constexpr, MOST: tl.constexpr,
    UNROLL: tl.constexpr,
):  # fmt: skip
    """The first programs take the blocks of one tensor, the others those of the second."""
    pid = tl.program_id(0)
    if BOTH:
        if pid < first:
            _pool_block(
                X, Out, stride_b, stride_h, stride_n, n, blocks, heads, pid,
                PLACES, KINDS, BLOCK, HEAD_DIM, BLOCK_D, MOST, UNROLL,
            )  # fmt: skip
        else:
            _pool_block(
                X2, Out2, stride_b2, stride_h2, stride_n2, n2, blocks2, heads2, pid - first,
                PLACES2, KINDS2, BLOCK2, HEAD_DIM, BLOCK_D, MOST, UNROLL,
            )  # fmt: skip
    else:
        _pool_block(
            X, Out, stride_b, stride_h, stride_n, n, blocks, heads, pid,
            PLACES, KINDS, BLOCK, HEAD_DIM, BLOCK_D, MOST, UNROLL,
        )  # fmt: skip


@triton.jit
def _pool_block(
    X, Out, stride_b, stride_h, stride_n, n, blocks, heads, pid,
    PLACES: tl.constexpr, KINDS: tl.constexpr, BLOCK: tl.constexpr,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, MOST: tl.constexpr, UNROLL: tl.constexpr,
):  # fmt: skip
    """One block, STEP tokens at a time, reduced to one vector in the end."""
    MAX: tl.constexpr = PLACES // 16 % 16 > 0
    MIN: tl.constexpr = PLACES // 256 % 16 > 0
    MEAN: tl.constexpr = PLACES % 16 > 0 or PLACES // 4096 > 0
    LOWEST: tl.constexpr = BLOCK & -BLOCK
    STEP: tl.constexpr = LOWEST if LOWEST < MOST else MOST
    block, bh = pid % blocks, (pid // blocks).to(tl.int64)
    first = block * BLOCK
    dim = tl.arange(0, BLOCK_D)
    base = X + bh // heads * stride_b + bh % heads * stride_h + dim[None, :]
    total = tl.zeros([STEP, BLOCK_D], tl.float32)
    most = tl.full([STEP, BLOCK_D], float("-inf"), tl.float32)
    least = tl.full([STEP, BLOCK_D], float("inf"), tl.float32)
    for step in tl.range(0, BLOCK, STEP, loop_unroll_factor=UNROLL):
        token = first + step + tl.arange(0, STEP)
        there = (token < n)[:, None] & (dim < HEAD_DIM)[None, :]
        x = tl.load(base + token[:, None].to(tl.int64) * stride_n, mask=there, other=0.0)
        x = x.to(tl.float32)
        if MEAN:
            total += x
        if MAX:
            most = tl.maximum(most, tl.where(there, x, float("-inf")))
        if MIN:
            least = tl.minimum(least, tl.where(there, x, float("inf")))
    out = Out + (bh * blocks + block) * (KINDS * HEAD_DIM) - HEAD_DIM + dim
    kept = dim < HEAD_DIM
    if MAX:
        tl.store(out + PLACES // 16 % 16 * HEAD_DIM, tl.max(most, 0), mask=kept)
    if MIN:
        tl.store(out + PLACES // 256 % 16 * HEAD_DIM, tl.min(least, 0), mask=kept)
    if MEAN:
        mean = tl.sum(total, 0) / tl.minimum(n - first, BLOCK)
        if PLACES % 16 > 0:
            tl.store(out + PLACES % 16 * HEAD_DIM, mean, mask=kept)
        if PLACES // 4096 % 16 > 0:
            tl.store(out + PLACES // 4096 % 16 * HEAD_DIM, tl.maximum(mean, 0.0), mask=kept)
        if PLACES // 65536 % 16 > 0:
            tl.store(out + PLACES // 65536 % 16 * HEAD_DIM, tl.minimum(mean, 0.0), mask=kept)
        if PLACES >> 20 > 0:  # all three, in their order
            high = mean.to(tl.bfloat16)
            rest = mean - high.to(tl.float32)
            middle = rest.to(tl.bfloat16)
            low = (rest - middle.to(tl.float32)).to(tl.bfloat16)
            tl.store(out + HEAD_DIM, high, mask=kept)
            tl.store(out + 2 * HEAD_DIM, middle, mask=kept)
            tl.store(out + 3 * HEAD_DIM, low, mask=kept)


def choose_kernel(scores: Tensor, frame: "Frame", rule: "Rule", probabilities: bool) -> Tensor:
    """`choose.choose_torch`, one program a row."""
    scores = scores.float().contiguous()
    batch, heads, rows, cols = scores.shape
    codes = torch.empty_like(scores, dtype=frame.codes.dtype)
    forced = frame.forced
    width = triton.next_power_of_2(cols)
    with _on(scores.device):
        _choose[(batch * heads * rows,)](
            scores, frame.codes, forced, frame.low, frame.high, codes,
            *_shared(frame.codes), *((0, 0) if forced is None else _shared(forced)),
            *_shared(frame.low), heads, rows, cols, float(rule.value),
            WIDTH=width, KIND="count" if rule.fixed else rule.kind, SOFTMAX=not probabilities,
            FORCED=forced is not None, num_warps=max(1, min(8, width // 256)),
        )  # fmt: skip
    return codes


def _shared(t: Tensor) -> tuple[int, ...]:
    """Strides of batch and head in a contiguous tensor, 0 where the extent is shared."""
    return tuple(t.stride(i) if t.shape[i] > 1 else 0 for i in (0, 1))


@triton.jit
def clamped(score):
    """Finite scores: what is no number is the lowest."""
    score = tl.where(score == score, score, -_LARGE)
    score = tl.where(score == 0.0, 0.0, score)  # -0.0 is no less
    return tl.minimum(tl.maximum(score, -_LARGE), _LARGE)


@triton.jit
def sortable(x):
    """float32 as uint32 in the same order; 0 is less than all of them."""
    bits = x.to(tl.uint32, bitcast=True)
    return tl.where(bits >> 31 == 1, bits ^ 0xFFFFFFFF, bits | 0x80000000)


@triton.jit
def best(key, candidate, count, WIDTH: tl.constexpr):
    """The `count` highest candidates of every row, all where there are fewer, and none for 0 or
    less; among equals the first come first. key: uint32 (rows, WIDTH), 0 for what is no candidate.

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


@triton.jit(do_not_specialize=("heads", "rows", "cols", "value"))
def _choose(
    Scores, Codes, Forced, Low, High, Out, codes_b, codes_h, forced_b, forced_h, low_b, low_h,
    heads, rows, cols, value,
    WIDTH: tl.constexpr, KIND: tl.constexpr, SOFTMAX: tl.constexpr, FORCED: tl.constexpr,
):  # fmt: skip
    """The best of a row are those from a threshold upwards, which is found by halving."""
    pid = tl.program_id(0).to(tl.int64)
    b, h, row = pid // rows // heads, pid // rows % heads, pid % rows
    col = tl.arange(0, WIDTH)
    there = col < cols
    code = tl.load(Codes + b * codes_b + h * codes_h + row * cols + col, mask=there, other=_EMPTY)
    candidate = code != _EMPTY
    score = tl.load(Scores + pid * cols + col, mask=there, other=0.0)
    score = clamped(score)
    order = score
    if FORCED:
        forced = tl.load(
            Forced + b * forced_b + h * forced_h + row * cols + col, mask=there, other=0
        )
        order = tl.where(candidate & (forced != 0), _INF, order)
    key = tl.where(candidate, sortable(order), 0)

    low = tl.load(Low + b * low_b + h * low_h + row)
    count = low
    if KIND != "count":
        if SOFTMAX:
            top = tl.max(tl.where(candidate, score, -_LARGE), 0)
            weight = tl.where(candidate, tl.exp(score - top), 0.0)
        else:
            weight = tl.where(candidate, tl.maximum(score, 0.0), 0.0)
        p = weight / tl.maximum(tl.sum(weight, 0), 1e-30)
        if KIND == "mass":
            threshold = tl.min(tl.where(candidate, key, 0xFFFFFFFF), 0)
            highest = tl.max(key, 0)  # the threshold that leaves `value` lies from one to the other
            while threshold < highest:
                higher = threshold + ((highest - threshold) >> 1) + ((highest - threshold) & 1)
                enough = tl.sum(tl.where(key >= higher, p, 0.0), 0) >= value
                threshold = tl.where(enough, higher, threshold)
                highest = tl.where(enough, highest, higher - 1)
            above = key > threshold
            missing = value - tl.sum(tl.where(above, p, 0.0), 0)
            each = tl.max(tl.where(key == threshold, p, 0.0), 0)
            ties = tl.ceil(missing / tl.maximum(each, 1e-30))
            count = tl.sum(above.to(tl.int32), 0)
            count += tl.minimum(tl.maximum(ties, 1.0), 1.0 * cols).to(tl.int32)
        else:
            count = tl.sum((candidate & (p >= value)).to(tl.int32), 0)
        count = tl.minimum(tl.maximum(count, low), tl.load(High + b * low_b + h * low_h + row))

    counts = tl.zeros([1], tl.int32) + count
    taken = tl.reshape(best(key[None, :], candidate[None, :], counts, WIDTH), [WIDTH])
    tl.store(Out + pid * cols + col, tl.where(taken & candidate, code, _EMPTY), mask=there)


def _on(device: torch.device):
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()
