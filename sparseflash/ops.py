"""The operators sparseflash::forward and sparseflash::backward, which torch.compile, autograd and
opcheck see, and `attend`, which goes past them where nothing looks on.

A schedule crosses an operator as its tensors and ints (none of either: dense attention). The
backend is chosen inside, where the tensors are real.
"""

from collections.abc import Callable
from contextlib import nullcontext
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from sparseflash.backends import choose, empty_out, prepared
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


class Call(NamedTuple):
    """What eager calls share whose tensors have the same device, dtype, shapes and strides."""

    module: ModuleType  # the backend
    forward: Callable[[Tensor, Tensor, Tensor, Tensor | None], tuple[Tensor, Tensor]]  # and seed
    schedule: Schedule | None
    scale: float
    dropout_p: float
    deterministic: bool
    backend: str


def attend(
    q: Tensor, k: Tensor, v: Tensor, schedule: Schedule | None, scale: float,
    dropout_p: float, seed: Tensor | None, deterministic: bool, backend: str,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """out (B, H_q, N_q, D_v) and lse (B, H_q, N_q), differentiable.

    The layers of torch.library cost as much as a short kernel takes: an eager call leaves them out.
    """
    if not only_autograd_looks_on(q, k, v):
        options = scale, dropout_p, seed, deterministic, backend
        return torch.ops.sparseflash.forward(q, k, v, *_flat(schedule), *options)
    call = prepare(q, k, v, schedule, scale, dropout_p, deterministic, backend)
    return run(call, q, k, v, seed)


def prepare(
    q: Tensor, k: Tensor, v: Tensor, schedule: Schedule | None, scale: float,
    dropout_p: float, deterministic: bool, backend: str,
) -> Call:  # fmt: skip
    """ValueError where the backend, or none, can run it."""
    module = choose(backend, q, k, v, schedule, dropout_p)
    forward = prepared(module, q, k, v, schedule, scale, dropout_p)
    return Call(module, forward, schedule, scale, dropout_p, deterministic, backend)


def run(call: Call, q: Tensor, k: Tensor, v: Tensor, seed: Tensor | None) -> tuple[Tensor, Tensor]:
    """The eager call itself, where only autograd looks on."""
    if torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad):
        return _Attention.apply(q, k, v, seed, call)
    with _no_autocast(q):
        return call.forward(q, k, v, seed)


def only_autograd_looks_on(*tensors: Any) -> bool:
    """Whether no compiler, tracer, transform, dispatch mode or subclass has to see an operator."""
    for t in tensors:
        if type(t) is not Tensor and type(t) is not torch.nn.Parameter:
            return False
    return not (
        torch.compiler.is_compiling()
        or torch._C._are_functorch_transforms_active()
        or torch._C._len_torch_dispatch_stack()
        or torch._C._is_tracing()
    )


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
    def forward(ctx, q, k, v, seed, call):  # type: ignore[override]
        with _no_autocast(q):
            out, lse = call.forward(q, k, v, seed)
        ctx.save_for_backward(q, k, v, out, lse, seed)
        ctx.set_materialize_grads(False)
        ctx.call = call
        return out, lse

    @staticmethod
    def backward(ctx, dout, dlse):  # type: ignore[override]
        q, k, v, out, lse, seed = ctx.saved_tensors
        call: Call = ctx.call
        options = call.scale, call.dropout_p, seed, call.deterministic
        if dout is None:
            dout = torch.zeros_like(out)
        saved = q, k, v, out, lse
        if torch.is_grad_enabled() or not only_autograd_looks_on(dout, q, k, v):
            # create_graph=True: the operator refuses a second derivative when one is taken
            gradients = torch.ops.sparseflash.backward(
                dout, dlse, *saved, *_flat(call.schedule), *options, call.backend
            )
        else:
            gradients = _run_backward(call.module, dout, dlse, *saved, call.schedule, *options)
        return *gradients, None, None


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
