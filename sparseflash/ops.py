"""The operators sparseflash::forward and sparseflash::backward, which torch.compile, autograd and
opcheck see, and `attend`, which goes past them where nothing looks on.

A schedule crosses an operator as its tensors and ints (none of either: dense attention). The
backend is chosen inside, where the tensors are real.
"""

from contextlib import nullcontext

import torch
from torch import Tensor

from sparseflash.backends import choose, empty_out
from sparseflash.schedule import Schedule, as_tensors, from_tensors

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


def attend(
    q: Tensor, k: Tensor, v: Tensor, schedule: Schedule | None, scale: float,
    dropout_p: float, seed: Tensor | None, deterministic: bool, backend: str,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """out (B, H_q, N_q, D_v) and lse (B, H_q, N_q), differentiable.

    The layers of torch.library cost as much as a short kernel takes: an eager call leaves them out.
    """
    options = scale, dropout_p, seed, deterministic, backend
    if not _only_autograd_looks_on(q, k, v):
        return torch.ops.sparseflash.forward(q, k, v, *_flat(schedule), *options)
    if torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad):
        return _Attention.apply(q, k, v, schedule, *options)
    module = choose(backend, q, k, v, schedule, dropout_p)
    return _run_forward(module, q, k, v, schedule, scale, dropout_p, seed)


def _only_autograd_looks_on(*tensors: Tensor) -> bool:
    """Whether no compiler, tracer, transform, dispatch mode or subclass has to see an operator."""
    return not (
        torch.compiler.is_compiling()
        or torch._C._are_functorch_transforms_active()
        or torch._C._len_torch_dispatch_stack()
        or torch._C._is_tracing()
    ) and all(type(t) is Tensor or type(t) is torch.nn.Parameter for t in tensors)


def _run_forward(module, q, k, v, schedule, scale, dropout_p, seed):
    with _no_autocast(q):
        return module.forward(q, k, v, schedule, scale, dropout_p, seed)


def _run_backward(
    module, dout, dlse, q, k, v, out, lse, schedule, scale, dropout_p, seed, deterministic
):
    if dout.stride(-1) != 1:
        dout = dout.contiguous()
    with _no_autocast(q):
        return module.backward(
            dout, dlse, q, k, v, out, lse, schedule, scale, dropout_p, seed, deterministic
        )


def _no_autocast(q: Tensor):
    """A backend picks its own precisions."""
    device = q.device.type
    return torch.autocast(device, enabled=False) if torch.is_autocast_enabled(device) else _NOTHING


_NOTHING = nullcontext()


class _Attention(torch.autograd.Function):
    """The two operators under autograd alone."""

    @staticmethod
    def forward(ctx, q, k, v, schedule, scale, dropout_p, seed, deterministic, backend):  # type: ignore[override]
        module = choose(backend, q, k, v, schedule, dropout_p)
        out, lse = _run_forward(module, q, k, v, schedule, scale, dropout_p, seed)
        ctx.save_for_backward(q, k, v, out, lse, seed)
        ctx.set_materialize_grads(False)
        ctx.call = module, schedule, scale, dropout_p, deterministic, backend
        return out, lse

    @staticmethod
    def backward(ctx, dout, dlse):  # type: ignore[override]
        q, k, v, out, lse, seed = ctx.saved_tensors
        module, schedule, scale, dropout_p, deterministic, backend = ctx.call
        options = scale, dropout_p, seed, deterministic
        if dout is None:
            dout = torch.zeros_like(out)
        if torch.is_grad_enabled() or not _only_autograd_looks_on(dout, q, k, v):
            # create_graph=True: the operator refuses a second derivative when one is taken
            gradients = torch.ops.sparseflash.backward(
                dout, dlse, q, k, v, out, lse, *_flat(schedule), *options, backend
            )
        else:
            gradients = _run_backward(module, dout, dlse, q, k, v, out, lse, schedule, *options)
        return *gradients, None, None, None, None, None, None


def _flat(schedule: Schedule | None) -> tuple[list[Tensor], list[int]]:
    return as_tensors(schedule) if schedule is not None else ([], [])


def _schedule(tensors: list[Tensor], extents: list[int]) -> Schedule | None:
    return from_tensors(tensors, extents) if tensors else None


@torch.library.impl("sparseflash::forward", ("CPU", "CUDA"))
def _forward(q, k, v, schedule, extents, scale, dropout_p, seed, deterministic, backend):
    blocks = _schedule(schedule, extents)
    module = choose(backend, q, k, v, blocks, dropout_p)
    return _run_forward(module, q, k, v, blocks, scale, dropout_p, seed)


@torch.library.impl("sparseflash::backward", ("CPU", "CUDA"))
def _backward(
    dout, dlse, q, k, v, out, lse, schedule, extents, scale, dropout_p, seed, deterministic, backend
):
    blocks = _schedule(schedule, extents)
    module = choose(backend, q, k, v, blocks, dropout_p)
    options = scale, dropout_p, seed, deterministic
    return _run_backward(module, dout, dlse, q, k, v, out, lse, blocks, *options)


@torch.library.register_fake("sparseflash::forward")
def _forward_fake(q, k, v, schedule, extents, scale, dropout_p, seed, deterministic, backend):
    dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
    return empty_out(q, v), q.new_empty(q.shape[:3], dtype=dtype)


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
