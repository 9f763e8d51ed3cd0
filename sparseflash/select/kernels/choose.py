"""The Triton kernel that chooses blocks by their scores."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from sparseflash.kernels.common.device import on
from sparseflash.kernels.common.launch import launch
from sparseflash.select.kernels.common import (
    EMPTY,
    INF,
    LARGE,
    best,
    clamped,
    shared_strides,
    sortable,
)
from sparseflash.select.rules import Candidates, Rule


def choose_blocks(
    scores: Tensor, candidates: Candidates, rule: Rule, probabilities: bool
) -> Tensor:
    """`choose.choose_torch`, one program a row."""
    scores = scores.float().contiguous()
    batch, heads, rows, cols = scores.shape
    codes, forced, low = candidates.codes, candidates.forced, candidates.low
    out = torch.empty_like(scores, dtype=codes.dtype)
    width = triton.next_power_of_2(cols)
    with on(scores.device):
        launch(
            _choose, (batch * heads * rows,),
            scores, codes, forced, low, candidates.high, out, *shared_strides(codes),
            *((0, 0) if forced is None else shared_strides(forced)), *shared_strides(low),
            heads, rows, cols, float(rule.value),
            WIDTH=width, KIND="count" if rule.fixed else rule.kind, SOFTMAX=not probabilities,
            FORCED=forced is not None, num_warps=max(1, min(8, width // 256)),
        )  # fmt: skip
    return out


@triton.jit(do_not_specialize=("heads", "rows", "cols", "value"))
def _choose(
    Scores, Codes, Forced, Low, High, Out, codes_b, codes_h, forced_b, forced_h, low_b, low_h,
    heads, rows, cols, value,
    WIDTH: tl.constexpr, KIND: tl.constexpr, SOFTMAX: tl.constexpr, FORCED: tl.constexpr,
):  # fmt: skip
    """Choose the best of a row: those from a threshold upwards, which is found by halving."""
    pid = tl.program_id(0).to(tl.int64)
    b, h, row = pid // rows // heads, pid // rows % heads, pid % rows
    col = tl.arange(0, WIDTH)
    there = col < cols
    code = tl.load(Codes + b * codes_b + h * codes_h + row * cols + col, mask=there, other=EMPTY)
    candidate = code != EMPTY
    score = tl.load(Scores + pid * cols + col, mask=there, other=0.0)
    score = clamped(score)
    order = score
    if FORCED:
        forced = tl.load(
            Forced + b * forced_b + h * forced_h + row * cols + col, mask=there, other=0
        )
        order = tl.where(candidate & (forced != 0), INF, order)
    key = tl.where(candidate, sortable(order), 0)

    low = tl.load(Low + b * low_b + h * low_h + row)
    count = low
    if KIND != "count":
        if SOFTMAX:
            top = tl.max(tl.where(candidate, score, -LARGE), 0)
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
    tl.store(Out + pid * cols + col, tl.where(taken & candidate, code, EMPTY), mask=there)
