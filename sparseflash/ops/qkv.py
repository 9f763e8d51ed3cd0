"""The operators sparseflash::forward_qkv and sparseflash::backward_qkv: attention of q, k and v
that are parts of one tensor, for layers that torch.compile sees.

Their gradient is one tensor too, and the kernels write its parts. Of the gradients of three views,
autograd makes one by a copy of them all.
"""

from typing import Any

import torch
from torch import Tensor

from sparseflash.backends.protocol import NO_TERMS, Results, Saved, TermTensors
from sparseflash.ops.attention import (
    CALL,
    N_TERMS,
    find_plan,
    forward_operator,
    forward_shapes,
    refuse_second_derivative,
    run_backward,
)
from sparseflash.schedule import Schedule, as_tensors

torch.library.define(
    "sparseflash::forward_qkv",
    f"(Tensor qkv, int kv_heads, {CALL}, bool needs_grad)"
    " -> (Tensor out, Tensor lse, Tensor max_scores)",
)
torch.library.define(
    "sparseflash::backward_qkv",
    "(Tensor dout, Tensor? dlse, Tensor qkv, int kv_heads, Tensor out, Tensor lse,"
    f" {CALL}) -> Tensor",
)


def call_qkv(
    qkv: Tensor, kv_heads: int, mask: str, schedule: Schedule | None, seed: Tensor | None,
    options: tuple[Any, ...],
) -> Results:  # fmt: skip
    """`ops.call_operator` of the parts of qkv, for a call without terms that needs a gradient."""
    flat = as_tensors(schedule) if schedule is not None else ([], [])
    call = mask, *flat, seed, *NO_TERMS, *options, True
    out, lse, max_scores = torch.ops.sparseflash.forward_qkv(qkv, kv_heads, *call)
    return Results(out, lse, max_scores if options[-1] else None)


def parts(qkv: Tensor, kv_heads: int) -> tuple[Tensor, Tensor, Tensor]:
    """q (B, H, N, D), k and v (B, kv_heads, N, D): views of qkv (B, N, H + 2 kv_heads, D)."""
    heads = qkv.shape[2] - 2 * kv_heads
    q, k, v = qkv.transpose(1, 2).split([heads, kv_heads, kv_heads], dim=1)
    return q, k, v


@torch.library.impl("sparseflash::forward_qkv", ("CPU", "CUDA"))
def _forward(qkv, kv_heads, *call):
    return forward_operator(*parts(qkv, kv_heads), *call)


@torch.library.impl("sparseflash::backward_qkv", ("CPU", "CUDA"))
def _backward(dout, dlse, qkv, kv_heads, out, lse, mask, schedule, numbers, seed, *call):
    inputs, gradient = parts(qkv, kv_heads), torch.empty_like(qkv)
    room = parts(gradient, kv_heads)
    plan, made = find_plan(inputs, mask, schedule, numbers, call[N_TERMS:], True)
    saved = Saved(*inputs, out, lse, seed, TermTensors(*call[:N_TERMS]), room)
    found = run_backward(plan, dout, dlse, saved, made)
    for place, part in zip(room, found[:3], strict=True):
        if part is not place:  # of a backend that has tensors of its own
            place.copy_(part)
    return gradient


@torch.library.register_fake("sparseflash::forward_qkv")
def _forward_fake(qkv, kv_heads, *call):
    return forward_shapes(*parts(qkv, kv_heads), *call)


@torch.library.register_fake("sparseflash::backward_qkv")
def _backward_fake(dout, dlse, qkv, *call):
    return torch.empty_like(qkv)


def _save(ctx, inputs, output):
    qkv, kv_heads, mask, schedule, numbers, seed, *rest, _needs_grad = inputs
    out, lse, max_scores = output
    ctx.mark_non_differentiable(max_scores)
    ctx.save_for_backward(qkv, out, lse, seed, *schedule)
    ctx.set_materialize_grads(False)
    ctx.constants = kv_heads, mask, numbers, rest


def _differentiate(ctx, dout, dlse, _):
    qkv, out, lse, seed, *schedule = ctx.saved_tensors
    kv_heads, mask, numbers, rest = ctx.constants
    if dout is None:
        dout = torch.zeros_like(out)
    gradient = torch.ops.sparseflash.backward_qkv(
        dout, dlse, qkv, kv_heads, out, lse, mask, schedule, numbers, seed, *rest
    )
    # torch takes any empty list for a list of tensors, which wants a list of gradients
    no_list = None if numbers else []
    return gradient, None, None, [None] * len(schedule), no_list, None, *(None for _ in rest), None


torch.library.register_autograd("sparseflash::forward_qkv", _differentiate, setup_context=_save)
torch.library.register_autograd("sparseflash::backward_qkv", refuse_second_derivative)
