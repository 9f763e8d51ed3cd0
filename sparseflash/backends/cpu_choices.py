"""What is fastest on the CPU: torch's fused operator for dense calls, and the blocks of a mask."""

import torch
from torch import Tensor

from masks import BlockMask, Mask
from masks.segments import Segments, allowed_pairs
from sparseflash.backends.cpu_blocks import laid_out
from sparseflash.backends.cpu_nonfinite import all_finite
from sparseflash.backends.protocol import Results, Saved, TermTensors, empty_out
from sparseflash.problem import Problem
from sparseflash.schedule.blocks import Schedule

COSTS = {128: 1.0, 64: 1.3, 32: 1.69}  # time of a pair in blocks of these sizes

fused = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
fused_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


def block_size_for(mask: Mask | BlockMask, n_q: int, n_k: int, heads: int) -> int:
    """Return the size of the blocks of a `Mask` with which the least is to do: smaller for narrow
    ones.
    """
    if isinstance(mask, BlockMask):
        return 128  # it has its own
    heads_of_mask = heads if mask.per_head else None
    coarse = mask.build(n_q, n_k, 128, heads=heads_of_mask)
    pairs = allowed_pairs(Segments.of(coarse)) / (coarse.batch * coarse.heads * n_q * n_k)
    if coarse.density <= COSTS[64] * pairs:  # no blocks skip more than all that is masked
        return 128
    return min(COSTS, key=lambda b: COSTS[b] * mask.build(n_q, n_k, b, heads=heads_of_mask).density)


def fused_forward(
    problem: Problem, schedule: Schedule | None, q: Tensor, k: Tensor, v: Tensor,
    seed: Tensor | None, terms: TermTensors,
) -> Results | None:  # fmt: skip
    """Return the results of a dense call; None where the operator does not compute it, or its
    numbers are not finite.
    """
    if not _fits(problem, schedule, q, k, v, seed, terms):
        return None
    q_w, k_w, v_w = _prepared(q, k, v)
    out, lse = fused(q_w, k_w, v_w, scale=problem.scale)
    if not all_finite(out, lse) or (lse == 0).any():  # it gives 0 where all scores are -inf
        return None
    return Results(laid_out(out, empty_out(q, v)), laid_out(lse, lse.new_empty(lse.shape)))


def fused_backward_of(
    problem: Problem, schedule: Schedule | None, dout: Tensor, dlse: Tensor | None, saved: Saved
) -> tuple[Tensor, Tensor, Tensor] | None:
    """(dq, dk, dv), likewise; None as well where the LSE has a gradient."""
    q, k, v, out, lse, seed, terms = saved
    if dlse is not None or not _fits(problem, schedule, q, k, v, seed, terms):
        return None
    inputs = (x.to(lse.dtype) for x in (dout, *_prepared(q, k, v), out))
    found = fused_backward(*inputs, lse, 0.0, False, scale=problem.scale)
    if not all_finite(*found):
        return None
    dq, dk, dv = found
    if problem.group > 1:
        dk, dv = (x.unflatten(1, (-1, problem.group)).sum(2) for x in (dk, dv))
    return tuple(laid_out(d, torch.empty_like(x)) for d, x in ((dq, q), (dk, k), (dv, v)))  # type: ignore[return-value]


def _fits(
    problem: Problem, schedule: Schedule | None, q: Tensor, k: Tensor, v: Tensor,
    seed: Tensor | None, terms: TermTensors,
) -> bool:  # fmt: skip
    """Whether every query sees every key, with plain scores, and the operator takes the shapes."""
    options = problem.options
    if options.score or options.max_scores or (options.dropout_p and seed is not None):
        return False
    if terms.sink is not None or q.shape[3] != v.shape[3]:
        return False
    if schedule is None:
        return True
    lists = schedule.rows
    blocks = (len(lists.ptr) - 1) * -(-schedule.n_k // schedule.block_k)
    return not schedule.dynamic and schedule.n_partial == 0 and int(lists.ptr[-1]) == blocks


def _prepared(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """In float32 at least, with a key head for every query head."""
    if q.dtype.itemsize == 2:
        q, k, v = q.float(), k.float(), v.float()
    group = q.shape[1] // k.shape[1]
    if group > 1:
        k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    return q, k, v
