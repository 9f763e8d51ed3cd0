"""Sinks and score functions by plain torch."""

import math
from functools import reduce

import torch
from torch import Tensor

from sparseflash.backends.protocol import Saved
from sparseflash.kernels.common.shapes import LN2, LOG2E
from sparseflash.problem import Problem
from sparseflash.schedule.blocks import Schedule
from sparseflash.score.by_torch import Scored, empty_totals
from sparseflash.score.rule import rule_of


def sink_gradient(dout: Tensor, dlse: Tensor | None, saved: Saved) -> Tensor | None:
    """(H,) like the sink: -sum exp(sink - lse) delta, with delta = rowsum(dout * out) - dlse.

    out and lse are those with the sink. None where there is no sink. The kernels of other backends
    sum it where they make delta. See docs/internals/kernels.md.
    """
    out, lse, sink = saved.out, saved.lse, saved.terms.sink
    if sink is None:
        return None
    delta = (dout.to(lse.dtype) * out).sum(-1)
    if dlse is not None:
        delta = delta - dlse
    p = (sink[:, None] - lse.masked_fill(lse == -math.inf, math.inf)).exp_()
    return -(p * delta).sum((0, 2))


class ScoredBlocks:
    """The score function of a problem, or none, in pairs of blocks of `BlockGroups`."""

    def __init__(
        self, problem: Problem, schedule: Schedule, tables: tuple[Tensor, ...], *, by_query: bool
    ):
        self.given = bool(problem.options.score)
        if self.given:
            self.rule, self.tables = rule_of(problem.options.score), tables
            self.heads = problem.heads
            sides = ("q", schedule.block_q, problem.n_q), ("k", schedule.block_k, problem.n_k)
            self.sides = sides if by_query else sides[::-1]
            self.extents = problem.n_q, problem.n_k
            self.totals: dict[int, list[Tensor | None]] = {}

    def apply(self, scores: Tensor, own: Tensor, other: Tensor) -> Scored | None:
        """Replace scores (lists, own block, others) in base 2 by the logits."""
        if not self.given:
            return None
        (side, block, n), (other_side, other_block, n_other) = self.sides
        pair = (own // -(-n // block))[:, None, None]
        number = {"b": pair // self.heads, "h": pair % self.heads}
        first = (own % -(-n // block) * block)[:, None] + torch.arange(block, device=own.device)
        second = (other % -(-n_other // other_block) * other_block)[..., None]
        second = (second + torch.arange(other_block, device=own.device)).flatten(1)[:, None]
        first = first[:, :, None]
        number |= {side: first.clamp(max=n - 1), other_side: second.clamp(max=n_other - 1)}
        scored = Scored(self.rule, self.tables, scores.mul(LN2), *self.extents, **number)
        torch.mul(scored.logits(), LOG2E, out=scores)
        if n % block or n_other % other_block:
            scores.masked_fill_((first >= n) | (second >= n_other), -math.inf)
        return scored

    def zeros(self, part: int, dtype: torch.dtype) -> list[Tensor | None]:
        """Return where a thread adds up gradients; part: the number of its share."""
        if self.given:
            self.totals[part] = empty_totals(self.rule, self.tables, dtype)
        return self.totals[part] if self.given else []

    def gradient(self) -> list[Tensor]:
        """Return the gradients of the tables that want one."""
        parts = [self.totals[part] for part in sorted(self.totals)] if self.given else []
        return [reduce(torch.add, ds) for ds in zip(*parts, strict=True) if ds[0] is not None]
