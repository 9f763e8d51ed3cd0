"""Which blocks of a row to take, given their scores: by count, by probability mass, or by level."""

import torch
from torch import Tensor

from masks.block_lists import EMPTY
from sparseflash.kernels.device import kernels_of, on_nvidia
from sparseflash.select.rules import Candidates, Rule

LARGE = 3.0e38  # scores are clamped to it: forced blocks lie above, blocks not allowed below
MAX_COLS = 16384  # blocks of a row that the kernel holds


def choose(
    scores: Tensor, candidates: Candidates, rule: Rule, *, probabilities: bool = False
) -> Tensor:
    """Return the codes of the blocks that are taken, (B, H, rows, cols) in the dtype of the
    candidates.

    scores: (B, H, rows, cols). Among equal scores the first block wins.
    probabilities: the scores are probabilities already, up to a factor. Otherwise a softmax over
        the candidates of a row makes them so.
    """
    scores = scores.to(torch.promote_types(scores.dtype, torch.float32))  # float16 ends at 65504
    if on_nvidia(scores) and scores.shape[-1] <= MAX_COLS:
        return kernels_of("select").choose_blocks(scores, candidates, rule, probabilities)
    return choose_torch(scores, candidates, rule, probabilities)


def choose_torch(scores: Tensor, candidates: Candidates, rule: Rule, probabilities: bool) -> Tensor:
    """`choose` in plain torch."""
    candidate = candidates.codes != EMPTY
    scores = scores.nan_to_num(-LARGE).clamp(-LARGE, LARGE)
    order = scores.masked_fill(~candidate, -torch.inf)
    if candidates.forced is not None:
        order = order.masked_fill(candidate & (candidates.forced != 0), torch.inf)
    order = order.argsort(dim=-1, descending=True, stable=True)
    count = candidates.low
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
        count = count.clamp(candidates.low, candidates.high)
    place = torch.arange(order.shape[-1], device=order.device).expand_as(order)
    rank = torch.empty_like(order).scatter_(-1, order, place)
    return torch.where(rank < count[..., None], candidates.codes, EMPTY)
