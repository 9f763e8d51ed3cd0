"""The operators sparseflash::forward and sparseflash::backward, which torch.compile, autograd and
opcheck see.

A schedule crosses the operator as its tensors and ints (none of either: dense attention). The
backend is chosen inside, where the tensors are real.
"""

import torch
from torch import Tensor

from sparseflash.backends import choose
from sparseflash.schedule import Schedule, from_tensors

torch.library.define(
    "sparseflash::forward",
    "(Tensor q, Tensor k, Tensor v, Tensor[] schedule, int[] extents, float scale,"
    " float dropout_p, Tensor? seed, bool deterministic, str backend) -> (Tensor out, Tensor lse)",
)
torch.library.define(
    "sparseflash::backward",
    "(Tensor dout, Tensor? dlse, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse,"
    " Tensor[] schedule, int[] extents, float scale, float dropout_p, Tensor? seed,"
    " bool deterministic, str backend) -> (Tensor dq, Tensor dk, Tensor dv)",
)


def _schedule(tensors: list[Tensor], extents: list[int]) -> Schedule | None:
    return from_tensors(tensors, extents) if tensors else None


@torch.library.impl("sparseflash::forward", ("CPU", "CUDA"))
def _forward(q, k, v, schedule, extents, scale, dropout_p, seed, deterministic, backend):
    blocks = _schedule(schedule, extents)
    module = choose(backend, q, k, v, blocks, dropout_p)
    with torch.autocast(q.device.type, enabled=False):  # a backend picks its own precisions
        return module.forward(q, k, v, blocks, scale, dropout_p, seed)


@torch.library.impl("sparseflash::backward", ("CPU", "CUDA"))
def _backward(
    dout, dlse, q, k, v, out, lse, schedule, extents, scale, dropout_p, seed, deterministic, backend
):
    blocks = _schedule(schedule, extents)
    module = choose(backend, q, k, v, blocks, dropout_p)
    if dout.stride(-1) != 1:
        dout = dout.contiguous()
    with torch.autocast(q.device.type, enabled=False):
        return module.backward(
            dout, dlse, q, k, v, out, lse, blocks, scale, dropout_p, seed, deterministic
        )


@torch.library.register_fake("sparseflash::forward")
def _forward_fake(q, k, v, schedule, extents, scale, dropout_p, seed, deterministic, backend):
    dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
    return torch.empty_like(q), q.new_empty(q.shape[:3], dtype=dtype)


@torch.library.register_fake("sparseflash::backward")
def _backward_fake(
    dout, dlse, q, k, v, out, lse, schedule, extents, scale, dropout_p, seed, deterministic, backend
):
    return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)


def _save(ctx, inputs, output):
    q, k, v, schedule, extents, scale, dropout_p, seed, deterministic, backend = inputs
    ctx.save_for_backward(q, k, v, *output, seed, *schedule)
    ctx.set_materialize_grads(False)
    ctx.constants = extents, scale, dropout_p, deterministic, backend


def _differentiate(ctx, dout, dlse):
    q, k, v, out, lse, seed, *schedule = ctx.saved_tensors
    extents, scale, dropout_p, deterministic, backend = ctx.constants
    if dout is None:
        dout = torch.zeros_like(out)
    dq, dk, dv = torch.ops.sparseflash.backward(
        dout, dlse, q, k, v, out, lse, schedule, extents,
        scale, dropout_p, seed, deterministic, backend,
    )  # fmt: skip
    # torch takes any empty list for a list of tensors, which wants a list of gradients
    return dq, dk, dv, [None] * len(schedule), None if extents else [], None, None, None, None, None


def _refuse(ctx, *gradients):
    raise RuntimeError(
        "sparseflash has no second derivatives; take its gradients without create_graph=True"
    )


torch.library.register_autograd("sparseflash::forward", _differentiate, setup_context=_save)
torch.library.register_autograd("sparseflash::backward", _refuse)
