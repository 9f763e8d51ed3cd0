"""The reference backend: dense attention with explicit formulas, on any device, in float64 too.

It holds the whole score matrix. Half inputs are computed in float32.
"""

import math
from typing import NamedTuple

import torch
from einops import rearrange, reduce, repeat
from torch import Tensor

from sparseflash.backends.protocol import (
    NO_TERMS,
    Direction,
    Gradients,
    Results,
    Saved,
    TermTensors,
    Walk,
    empty_out,
)
from sparseflash.backends.terms import sink_gradient
from sparseflash.dropout import keep_mask, keep_scale
from sparseflash.problem import Problem
from sparseflash.schedule.blocks import Schedule, unpack_bits
from sparseflash.score.by_torch import Scored, as_tables, empty_totals
from sparseflash.score.rule import rule_of

name = "reference"
MAX_SCORES = 2**31  # entries of the score matrix: 8 GiB in float32


def unsupported(problem: Problem, direction: Direction) -> str | None:
    scores = problem.batch * problem.heads * problem.n_q * problem.n_k
    if scores > MAX_SCORES:
        return (
            f"it holds all {scores} scores, above its limit of {MAX_SCORES};"
            " take a backend that goes block by block, or shorter inputs"
        )
    return None


def plan_forward(problem: Problem, schedule: Schedule | None) -> "Forward":
    return Forward(problem)


def plan_backward(problem: Problem, schedule: Schedule | None) -> "Backward":
    return Backward(problem)


class Forward(NamedTuple):
    problem: Problem
    specs = ()

    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, seed: Tensor | None, walk: Walk,
        terms: TermTensors = NO_TERMS,
    ) -> Results:  # fmt: skip
        options = self.problem.options
        scores, _, v_wide = _scores(q, k, v, self.problem.scale)
        if options.score:
            scores = _scored(options.score, scores, terms.tables).logits()
        scores = _masked(scores, walk.schedule)
        lse = scores.logsumexp(-1)
        if terms.sink is not None:
            lse = torch.logaddexp(lse, terms.sink[:, None])
        p = _probabilities(scores, lse)
        p = p * _dropout_factor(p, options.dropout_p, seed)
        max_scores = scores.amax(-1) if options.max_scores else None
        return Results(empty_out(q, v).copy_(p @ v_wide), lse, max_scores)


class Backward(NamedTuple):
    problem: Problem
    specs = ()

    def __call__(self, dout: Tensor, dlse: Tensor | None, saved: Saved, walk: Walk) -> Gradients:
        q, k, v, out, lse, seed, terms = saved
        scale = self.problem.scale
        scores, k_wide, v_wide = _scores(q, k, v, scale)
        scored = None
        if score := self.problem.options.score:
            scored = _scored(score, scores, terms.tables)
            scores = scored.logits()
        dsink = sink_gradient(dout, dlse, saved)
        dout = dout.to(scores.dtype)
        logits = _masked(scores, walk.schedule)
        p = _probabilities(logits, lse)
        factor = _dropout_factor(p, self.problem.options.dropout_p, seed)

        # out = (p * factor) v and lse = logsumexp(scores), with p = softmax(scores):
        # dscores = p * (dp - delta), where delta = rowsum(p * dp) - dlse and
        # rowsum(p * dp) = dout . out
        dv = (p * factor).transpose(-1, -2) @ dout
        dp = (dout @ v_wide.transpose(-1, -2)) * factor
        delta = (dout * out).sum(-1)
        if dlse is not None:
            delta = delta - dlse.masked_fill(lse == -math.inf, 0.0)
        dscores = p * (dp - delta.unsqueeze(-1))
        dtables = ()
        if scored is not None:
            totals = empty_totals(scored.rule, terms.tables, scores.dtype)
            dscores = scored.differentiate(dscores, logits == -math.inf, totals)
            dtables = as_tables(totals, terms.tables)
        dq = dscores @ k_wide * scale
        dk = dscores.transpose(-1, -2) @ q.to(dscores.dtype) * scale

        # Query heads that share a key head add up.
        heads_kv = k.shape[1]
        dk, dv = (reduce(x, "b (h g) n d -> b h n d", "sum", h=heads_kv) for x in (dk, dv))
        dq, dk, dv = (torch.empty_like(x).copy_(dx) for x, dx in ((q, dq), (k, dk), (v, dv)))
        return Gradients(dq, dk, dv, dsink, dtables)


def dense_mask(schedule: Schedule) -> Tensor:
    """Bool (batch, heads, n_q, n_k) of the schedule: True where a query may attend to a key."""
    lists = schedule.rows
    n_cols = -(-schedule.n_k // schedule.block_k)
    grid = torch.full((len(lists.mid), n_cols), -2, dtype=torch.int64, device=lists.ptr.device)
    row = torch.repeat_interleave(lists.ptr.diff())
    grid[row, lists.idx[: len(row)].long()] = lists.tile[: len(row)].long()

    # The codes -2 (empty) and -1 (full) count from the end of the tiles, as Python's indices do.
    tiles = unpack_bits(schedule.bits, schedule.block_k)
    empty = tiles.new_zeros((1, *tiles.shape[1:]))
    tiles = torch.cat([tiles, empty, ~empty])
    layout = "(b h i) j q k -> b h (i q) (j k)"
    mask = rearrange(tiles[grid], layout, b=schedule.batch, h=schedule.heads)
    return mask[..., : schedule.n_q, : schedule.n_k]


def _scores(q: Tensor, k: Tensor, v: Tensor, scale: float) -> tuple[Tensor, Tensor, Tensor]:
    """Return the scores, and k and v for every query head, in float32 or float64."""
    dtype = torch.promote_types(q.dtype, torch.float32)
    group = q.shape[1] // k.shape[1]
    k, v = (repeat(x.to(dtype), "b h n d -> b (h g) n d", g=group) for x in (k, v))
    return q.to(dtype) @ k.transpose(-1, -2) * scale, k, v


def _masked(scores: Tensor, schedule: Schedule | None) -> Tensor:
    """Return the scores, -inf where the mask forbids them."""
    return scores if schedule is None else scores.masked_fill(~dense_mask(schedule), -math.inf)


def _scored(score: str, scores: Tensor, tables: tuple[Tensor, ...]) -> Scored:
    """Return the scores (B, H, N_q, N_k) with their numbers."""
    shape = scores.shape
    b, h, q, k = (
        torch.arange(n, device=scores.device).view(-1, *[1] * (3 - i)) for i, n in enumerate(shape)
    )
    return Scored(rule_of(score), tables, scores, *shape[2:], b=b, h=h, q=q, k=k)


def _probabilities(scores: Tensor, lse: Tensor) -> Tensor:
    # An empty row has lse -inf, and -inf minus -inf would be NaN.
    return (scores - lse.masked_fill(lse == -math.inf, 0.0).unsqueeze(-1)).exp()


def _dropout_factor(p: Tensor, dropout_p: float, seed: Tensor | None) -> Tensor | float:
    if seed is None or dropout_p == 0.0:
        return 1.0
    batch, heads, n_q, n_k = p.shape
    keep = keep_mask(seed, batch, heads, n_q, n_k, dropout_p)
    return keep.to(p.dtype) * keep_scale(dropout_p)
