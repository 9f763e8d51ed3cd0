"""The CPU backend: batched matrix products over the non-empty blocks only.

Lists of equal length are computed together: their blocks are gathered into one work buffer, so a
few calls of torch cover many blocks. Long lists go chunk by chunk (forward: online softmax), so
the memory besides inputs and outputs is that of the buffers, whatever the sequence lengths.
float32 and float64 are computed as they are, half inputs in float32. Dense calls without terms and
dropout go through torch's fused operator.
"""

import math
from functools import partial
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

import masks
from sparseflash.backends.cpu_blocks import (
    BlockGroups,
    ByHeads,
    Dropout,
    Tiles,
    Work,
    from_blocks,
    threads_by_head,
    to_blocks,
)
from sparseflash.backends.cpu_choices import fused_backward_of, fused_forward
from sparseflash.backends.cpu_nonfinite import all_finite, mark_keys, mark_rows
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
from sparseflash.backends.terms import ScoredBlocks, sink_gradient
from sparseflash.kernels.common.shapes import LN2, LOG2E
from sparseflash.problem import Problem
from sparseflash.schedule.blocks import Schedule, schedule_for
from sparseflash.score.by_torch import as_tables
from sparseflash.score.rule import kinds_of

name = "cpu"


def unsupported(problem: Problem, direction: Direction) -> str | None:
    if problem.device.type != "cpu":
        return f"it runs on CPU tensors, not on {problem.device}"
    return None


def plan_forward(problem: Problem, schedule: Schedule | None) -> "Forward":
    return Forward(problem, None if schedule else _dense_schedule(problem))


def plan_backward(problem: Problem, schedule: Schedule | None) -> "Backward":
    return Backward(problem, None if schedule else _dense_schedule(problem))


class Forward(NamedTuple):
    problem: Problem
    dense: Schedule | None  # all blocks, where there is no mask
    specs = ()

    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, seed: Tensor | None, walk: Walk,
        terms: TermTensors = NO_TERMS,
    ) -> Results:  # fmt: skip
        found = fused_forward(self.problem, walk.schedule, q, k, v, seed, terms)
        if found is not None:
            return found
        schedule = walk.schedule or self.dense
        assert schedule is not None

        def run(
            problem: Problem, q: Tensor, k: Tensor, v: Tensor, seed: Tensor | None,
            terms: TermTensors, careful: bool,
        ) -> Results:  # fmt: skip
            with threads_by_head(k) as by_heads:
                return _forward(by_heads, q, k, v, seed, terms, schedule, problem, careful)

        found = run(self.problem, q, k, v, seed, terms, careful=False)
        if all_finite(found.out):
            return found
        found = run(self.problem, q, k, v, seed, terms, careful=True)
        return mark_rows(partial(run, _unscored(self.problem), careful=False), q, k, v, found)


class Backward(NamedTuple):
    """Its results are always the same bits from run to run."""

    problem: Problem
    dense: Schedule | None
    specs = ()

    def __call__(self, dout: Tensor, dlse: Tensor | None, saved: Saved, walk: Walk) -> Gradients:
        found = fused_backward_of(self.problem, walk.schedule, dout, dlse, saved)
        if found is not None:
            return Gradients(*found)
        schedule = walk.schedule or self.dense
        assert schedule is not None

        def run(
            problem: Problem, dout: Tensor, dlse: Tensor | None, saved: Saved, careful: bool
        ) -> tuple[Tensor, ...]:
            with threads_by_head(saved.k) as by_heads:
                return _backward(by_heads, dout, dlse, saved, schedule, problem, careful)

        found = run(self.problem, dout, dlse, saved, careful=False)
        if not all_finite(*found):
            found = run(self.problem, dout, dlse, saved, careful=True)
            mark_keys(partial(run, _unscored(self.problem), careful=False), dout, saved, found[2])
        dq, dk, dv, *others = found
        dsink = sink_gradient(dout, dlse, saved)
        made, kinds = iter(others), kinds_of(self.problem.options.score)
        totals = [next(made) if kind.wanted else None for kind in kinds]
        return Gradients(dq, dk, dv, dsink, as_tables(totals, saved.terms.tables))


def _forward(
    by_heads: ByHeads, q: Tensor, k: Tensor, v: Tensor, seed: Tensor | None, terms: TermTensors,
    schedule: Schedule, problem: Problem, careful: bool,
) -> Results:  # fmt: skip
    """careful: what is hidden is overwritten, as it may not be finite; see `mark_rows`."""
    block_q, block_k = schedule.block_q, schedule.block_k
    dtype = torch.promote_types(q.dtype, torch.float32)
    width = max(q.shape[3], v.shape[3])
    q_blocks = to_blocks(q, block_q, dtype)
    k_blocks, v_blocks = to_blocks(k, block_k, dtype), to_blocks(v, block_k, dtype)
    out_blocks = q_blocks.new_zeros((*q_blocks.shape[:2], v.shape[3]))
    lse_blocks = q_blocks.new_full(q_blocks.shape[:2], -math.inf)
    max_blocks = lse_blocks.clone() if problem.options.max_scores else None
    if terms.sink is not None:  # by query block; rows without a list keep it
        sink = terms.sink.repeat(len(q)).repeat_interleave(len(q_blocks) // q.shape[:2].numel())
        lse_blocks[:] = sink[:, None] * LOG2E
        out_blocks[sink.isnan()] = math.nan
    rule = ScoredBlocks(problem, schedule, terms.tables, by_query=True)
    tiles = Tiles(schedule, dtype, by_query=True, careful=careful or rule.given)
    dropout = Dropout(schedule, q, problem.options.dropout_p, seed, by_query=True)

    def attend(kv_heads: range) -> None:
        groups, work = BlockGroups(schedule, q, k, kv_heads, by_query=True), Work(dtype)
        for own, chunks in groups.chunked(block_q * block_k + block_k * width):
            q_g = work.gather("q", q_blocks, own).mul_(problem.scale * LOG2E)
            softmax = None
            if terms.sink is not None:  # one more key, whose value is 0
                top = lse_blocks[own].unsqueeze(-1)
                acc = work.zeros("acc", (*q_g.shape[:2], v.shape[3]))
                softmax = _Softmax(top, torch.ones_like(top), acc)
            for chunk in chunks:
                kv = groups.kv_blocks(chunk.other)
                k_g = work.gather("kv", k_blocks, kv)
                scores = work.bmm("scores", q_g, k_g.mT)
                rule.apply(scores, own, chunk.other)
                tiles.hide(scores, chunk.tile)
                if max_blocks is not None:
                    max_blocks[own] = torch.maximum(max_blocks[own], scores.amax(-1))
                top, total = _exponentiate(scores, softmax)
                if (keep := dropout.keep(own, chunk.other)) is not None:
                    scores.mul_(keep)
                v_g = work.gather("kv", v_blocks, kv)  # in the place of k_g, which is still cached
                if careful:
                    v_g.nan_to_num_(0.0, 0.0, 0.0)
                if softmax is None:
                    acc = work.bmm("acc", scores, v_g)
                else:
                    acc = softmax.acc.mul_(torch.exp2(softmax.top - top)).baddbmm_(scores, v_g)
                softmax = _Softmax(top, total, acc)
            if softmax is not None:
                top, total, acc = softmax
                acc.mul_((dropout.rescale / total).masked_fill_(total == 0, 0.0))  # empty rows
                out_blocks.index_add_(0, own, acc)
                lse_blocks[own] = total.log2_().add_(top).squeeze(-1)  # times log2(e)

    by_heads(attend)
    lse, max_scores = (
        None if x is None else x.mul_(LN2).view(*q.shape[:2], -1)[..., : q.shape[2]].contiguous()
        for x in (lse_blocks, max_blocks)
    )
    assert lse is not None
    return Results(from_blocks(out_blocks, empty_out(q, v)), lse, max_scores)


def _backward(
    by_heads: ByHeads, dout: Tensor, dlse: Tensor | None, saved: Saved, schedule: Schedule,
    problem: Problem, careful: bool,
) -> tuple[Tensor, ...]:  # fmt: skip
    """By key block, with the scores transposed: only dq is scattered, and always in one order.

    careful: as in `_forward`; see `mark_keys`.
    """
    q, k, v, out, lse, seed, terms = saved
    block_q, block_k = schedule.block_q, schedule.block_k
    dtype = torch.promote_types(q.dtype, torch.float32)
    width = max(q.shape[3], v.shape[3])
    q_blocks, dout_blocks = to_blocks(q, block_q, dtype), to_blocks(dout, block_q, dtype)
    k_blocks, v_blocks = to_blocks(k, block_k, dtype), to_blocks(v, block_k, dtype)
    lse_blocks, delta_blocks = _row_terms(dout, dlse, out, lse, block_q, dtype)
    dq_blocks, dk_blocks, dv_blocks = map(torch.zeros_like, (q_blocks, k_blocks, v_blocks))
    rule = ScoredBlocks(problem, schedule, terms.tables, by_query=False)
    tiles = Tiles(schedule, dtype, by_query=False, careful=careful or rule.given)
    dropout = Dropout(schedule, q, problem.options.dropout_p, seed, by_query=False)
    if dropout.rescale != 1.0:
        dout_blocks = dout_blocks * dropout.rescale  # serves dv and dp

    def differentiate(kv_heads: range) -> None:
        groups, work = BlockGroups(schedule, q, k, kv_heads, by_query=False), Work(dtype)
        totals = rule.zeros(kv_heads.start, dtype)
        for own, chunks in groups.chunked(2 * block_q * block_k + 3 * block_q * width):
            kv = groups.kv_blocks(own)
            k_g = work.gather("k", k_blocks, kv).mul_(problem.scale * LOG2E)
            v_g = work.gather("v", v_blocks, kv)
            dk_g, dv_g = work.zeros("dk", k_g.shape), work.zeros("dv", v_g.shape)
            for chunk in chunks:
                rows = chunk.other
                q_g = work.gather("q", q_blocks, rows)
                dout_g = work.gather("dout", dout_blocks, rows)
                p = work.bmm("p", k_g, q_g.mT)
                scored = rule.apply(p, own, rows)
                p.sub_(lse_blocks[rows].view(len(own), 1, -1))
                tiles.hide(p, chunk.tile)
                hidden = p == -math.inf if scored is not None else None
                p.exp2_()
                ds = work.bmm("ds", v_g, dout_g.mT)
                if (keep := dropout.keep(own, rows)) is not None:
                    ds.mul_(keep)
                ds.sub_(delta_blocks[rows].view(len(own), 1, -1)).mul_(p)
                tiles.clear(ds, chunk.tile)
                if scored is not None and hidden is not None:
                    ds = scored.differentiate(ds, hidden, totals)
                if careful:
                    q_g.nan_to_num_(0.0, 0.0, 0.0)
                    dout_g.nan_to_num_(0.0, 0.0, 0.0)
                dk_g.baddbmm_(ds, q_g)
                if keep is not None:
                    p.mul_(keep)
                dv_g.baddbmm_(p, dout_g)
                dq_g = work.bmm("dq", ds.mT, k_g.nan_to_num(0.0, 0.0, 0.0) if careful else k_g)
                dq_blocks.index_add_(0, rows.flatten(), dq_g.view(-1, *dq_blocks.shape[1:]))
            dk_blocks.index_add_(0, kv, dk_g)
            dv_blocks.index_add_(0, kv, dv_g)

    by_heads(differentiate)
    dq_blocks.mul_(LN2)  # k_g has the factor scale * log2(e)
    dk_blocks.mul_(problem.scale)
    dq, dk, dv = (
        from_blocks(blocks, torch.empty_like(x))
        for blocks, x in ((dq_blocks, q), (dk_blocks, k), (dv_blocks, v))
    )
    return dq, dk, dv, *rule.gradient()


class _Softmax(NamedTuple):
    """The online softmax so far, with exponents of 2."""

    top: Tensor  # (lists, block_q, 1)  row maximum
    total: Tensor  # (lists, block_q, 1)  row sum of 2 ** (score - top)
    acc: Tensor  # (lists, block_q, D_v)  those powers times v


def _exponentiate(scores: Tensor, softmax: _Softmax | None) -> tuple[Tensor, Tensor]:
    """Replace scores by 2 ** (score - row maximum); the row maximum and the row sum so far."""
    # The maximum of an empty row is made finite, because -inf minus -inf is NaN.
    top = scores.amax(-1, keepdim=True).clamp_(min=torch.finfo(scores.dtype).min)
    if softmax is not None:
        top = torch.maximum(top, softmax.top)
    total = scores.sub_(top).exp2_().sum(-1, keepdim=True)
    if softmax is not None:
        total += softmax.total * torch.exp2(softmax.top - top)
    return top, total


def _row_terms(
    dout: Tensor, dlse: Tensor | None, out: Tensor, lse: Tensor, block_q: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """By query block: the lse in powers of 2, and delta = rowsum(dout * out) - dlse."""
    empty = lse == -math.inf
    delta = (dout.to(dtype) * out.to(dtype)).sum(-1)
    if dlse is not None:
        delta = (delta - dlse).masked_fill_(empty, 0.0)
    # With lse +inf the probabilities of an empty row, or one beyond the end, come out as 0.
    lse = F.pad(
        (lse * LOG2E).masked_fill_(empty, math.inf), (0, -lse.shape[2] % block_q), value=math.inf
    )
    lse, delta = (to_blocks(x.unsqueeze(-1), block_q, dtype).squeeze(-1) for x in (lse, delta))
    return lse, delta


def _unscored(problem: Problem) -> Problem:
    """Return the problem without a function of the scores."""
    return problem._replace(options=problem.options._replace(score=""))


def _dense_schedule(problem: Problem) -> Schedule:
    """All blocks, as large as a mask may have them, and no larger than the inputs."""
    n_q, n_k = problem.n_q, problem.n_k
    block_size = (min(256, -(-n_q // 16) * 16), min(256, -(-n_k // 16) * 16))
    extents = n_q, n_k, problem.batch, problem.heads
    return schedule_for(masks.dense(), *extents, problem.device, block_size)
