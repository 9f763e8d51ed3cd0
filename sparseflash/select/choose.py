"""Which blocks of a row to take, given their scores: by count, by probability mass, or by level."""

from dataclasses import dataclass
from functools import lru_cache
from typing import Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

from masks.algebra import Mask
from masks.block_lists import EMPTY, FULL
from masks.block_mask import BlockMask
from sparseflash.select.static import built, grid_codes, heads_of, static_codes, to_device

LARGE = 3.0e38  # scores are clamped to it: forced blocks are above, blocks out of question below
WIDEST = 16384  # blocks in a row that the kernel holds


@dataclass(frozen=True)
class Rule:
    """How many blocks of a row are taken, the best first.

    count: `value` of them;
    share: that share of the candidates, rounded up;
    mass: the fewest whose probabilities sum to `value`;
    level: those of a probability of at least `value`.
    Never fewer than `least` or more than `most`, but as many as there are candidates at the most.
    """

    kind: Literal["count", "share", "mass", "level"]
    value: float
    least: int = 1
    most: int | None = None

    @property
    def fixed(self) -> bool:
        """Whether the scores have no say in the number."""
        return self.kind in ("count", "share")


class Frame(NamedTuple):
    """What a selection has to keep to, on the device. Extents of 1 are the same for all."""

    codes: Tensor  # int32 (B, H, rows, cols): what a block is once taken; EMPTY: it may not be
    bits: Tensor  # int32 (T, block_q, words)
    forced: Tensor | None  # int8 (B, H, rows, cols): taken before all others
    low: Tensor  # int32 (B, H, rows): the fewest blocks of a row
    high: Tensor  # and the most
    most: int  # sum of `high`, for each (b, h) of its extents


def frame(
    rule: Rule,
    within: Mask | BlockMask | None,
    always: Mask | BlockMask | None,
    n_q: int,
    n_k: int,
    block_size: tuple[int, int],
    heads: int,
    device: torch.device,
) -> Frame:
    """The frame of two static masks; remembered, so that only the first call copies."""
    needed = [heads_of(mask, heads) for mask in (within, always) if mask is not None]
    heads = heads if any(needed) else 1
    return _frame(rule, within, always, n_q, n_k, block_size, heads, device)


@lru_cache(maxsize=16)
def _frame(rule, within, always, n_q, n_k, block_size, heads, device) -> Frame:
    shape = (1, 1, -(-n_q // block_size[0]), -(-n_k // block_size[1]))
    if within is None:
        host = np.full(shape, FULL, np.int32)
        codes = to_device(host, device)
        bits = codes.new_empty((0, block_size[0], -(-block_size[1] // 32)))
    else:
        host = grid_codes(built(within, n_q, n_k, block_size, heads_of(within, heads)))
        codes, bits, _ = static_codes(within, n_q, n_k, block_size, heads, device)
    taken, forced = np.zeros((1, 1, 1, 1), bool), None
    if always is not None:
        taken = grid_codes(built(always, n_q, n_k, block_size, heads_of(always, heads))) != EMPTY
        forced = to_device(taken.astype(np.int8), device)
    low, high = bounds(rule, host != EMPTY, taken)
    on_device = (to_device(low, device), to_device(high, device))
    return Frame(codes, bits, forced, *on_device, int(high.sum()))


def bounds(rule: Rule, candidate: np.ndarray, forced: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The fewest and the most blocks of every row, int32 (B, H, rows), forced ones included."""
    candidates, forced = candidate.sum(-1), (candidate & forced).sum(-1)
    if rule.kind == "count":
        low = high = int(rule.value)
    elif rule.kind == "share":
        low = high = np.ceil(rule.value * candidates - 1e-9)
    else:
        low, high = rule.least, candidates if rule.most is None else rule.most
    low = np.minimum(np.maximum(low, forced), candidates)
    high = np.minimum(np.maximum(high, low), candidates)
    return low.astype(np.int32), high.astype(np.int32)


def choose(scores: Tensor, frame: Frame, rule: Rule, *, probabilities: bool = False) -> Tensor:
    """The codes of the blocks that are taken, (B, H, rows, cols) in the dtype of `frame.codes`.

    scores: (B, H, rows, cols); softmax over the candidates of a row makes them probabilities,
        unless they are such already, up to a factor. Among equals the first comes first.
    """
    if scores.is_cuda and scores.shape[-1] <= WIDEST:
        from sparseflash.select.kernels import choose_kernel

        return choose_kernel(scores, frame, rule, probabilities)
    return choose_torch(scores, frame, rule, probabilities)


def choose_torch(scores: Tensor, frame: Frame, rule: Rule, probabilities: bool) -> Tensor:
    """`choose` in plain torch."""
    candidate = frame.codes != EMPTY
    scores = scores.nan_to_num(-LARGE).clamp(-LARGE, LARGE)
    order = scores.masked_fill(~candidate, -torch.inf)
    if frame.forced is not None:
        order = order.masked_fill(candidate & (frame.forced != 0), torch.inf)
    order = order.argsort(dim=-1, descending=True, stable=True)
    count = frame.low
    if not rule.fixed:
        if probabilities:
            weight = scores.clamp(min=0).masked_fill(~candidate, 0)
        else:
            top = scores.masked_fill(~candidate, -LARGE).amax(-1, keepdim=True)
            weight = (scores - top).exp().masked_fill(~candidate, 0)
        p = weight / weight.sum(-1, keepdim=True).clamp(min=1e-30)
        if rule.kind == "mass":
            count = 1 + (p.gather(-1, order).cumsum(-1) < rule.value).sum(-1, dtype=torch.int32)
        else:
            count = (p >= rule.value).sum(-1, dtype=torch.int32)
        count = count.clamp(frame.low, frame.high)
    place = torch.arange(order.shape[-1], device=order.device).expand_as(order)
    rank = torch.empty_like(order).scatter_(-1, order, place)
    return torch.where(rank < count[..., None], frame.codes, EMPTY)
