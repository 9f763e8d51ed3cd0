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


class Numbers:
    """Of the queries and keys in pairs of blocks of `BlockGroups`."""

    def __init__(self, schedule: Schedule, *, by_query: bool):
        of_q = schedule.block_q, -(-schedule.n_q // schedule.block_q)
        of_k = schedule.block_k, -(-schedule.n_k // schedule.block_k)
        self.own, self.other = (of_q, of_k) if by_query else (of_k, of_q)
        self.by_query = by_query

    def __call__(self, own: Tensor, other: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return b * H + h of every list (lists, 1, 1), and the queries and keys that broadcast to
        (lists, own block, others).
        """
        (block, n), (other_block, n_other) = self.own, self.other
        first = (own % n * block)[:, None] + torch.arange(block)
        second = (other % n_other * other_block)[..., None] + torch.arange(other_block)
        first, second = first[:, :, None], second.flatten(1)[:, None]
        return (own // n)[:, None, None], *((first, second) if self.by_query else (second, first))


class ScoredBlocks:
    """The score function of a problem, or none, in pairs of blocks."""

    def __init__(
        self, problem: Problem, schedule: Schedule, tables: tuple[Tensor, ...], *, by_query: bool
    ):
        self.given = bool(problem.options.score)
        if self.given:
            self.rule, self.tables = rule_of(problem.options.score), tables
            self.heads = problem.heads
            self.extents = problem.n_q, problem.n_k
            self.ragged = problem.n_q % schedule.block_q or problem.n_k % schedule.block_k
            self.numbers = Numbers(schedule, by_query=by_query)
            self.totals: dict[int, list[Tensor | None]] = {}

    def apply(self, scores: Tensor, own: Tensor, other: Tensor) -> Scored | None:
        """Replace scores in base 2 by the logits."""
        if not self.given:
            return None
        (pair, q, k), (n_q, n_k) = self.numbers(own, other), self.extents
        beyond = (q >= n_q) | (k >= n_k) if self.ragged else None
        q, k = q.clamp(max=n_q - 1), k.clamp(max=n_k - 1)
        number = {"b": pair // self.heads, "h": pair % self.heads, "q": q, "k": k}
        scored = Scored(self.rule, self.tables, scores.mul(LN2), n_q, n_k, **number)
        torch.mul(scored.logits(), LOG2E, out=scores)
        if beyond is not None:
            scores.masked_fill_(beyond, -math.inf)
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
