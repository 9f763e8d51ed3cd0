"""The operators sparseflash::forward and sparseflash::backward, which torch.compile, autograd and
opcheck see, and the eager path, which leaves them out where nothing has to see them.

A mask crosses an operator as its key, a schedule made at run time as its tensors and ints. Inside,
the plan of the call is found in the cache, as in an eager call.
"""

from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

from sparseflash.backends.protocol import Saved, empty_out
from sparseflash.cache import cache
from sparseflash.plan import Plan, plan_for
from sparseflash.problem import describe, key_of
from sparseflash.schedule import Schedule, as_tensors, from_tensors

# mask: a key, or "" with the tensors and ints of a schedule, or "" alone for dense attention
_CALL = (
    "str mask, Tensor[] schedule, int[] numbers, Tensor? seed, float? scale, float dropout_p,"
    " bool deterministic, str backend"
)
torch.library.define(
    "sparseflash::forward",
    f"(Tensor q, Tensor k, Tensor v, {_CALL}, bool needs_grad) -> (Tensor out, Tensor lse)",
)
torch.library.define(
    "sparseflash::backward",
    "(Tensor dout, Tensor? dlse, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse,"
    f" {_CALL}) -> (Tensor dq, Tensor dk, Tensor dv)",
)


def run(
    plan: Plan, q: Tensor, k: Tensor, v: Tensor, seed: Tensor | None, schedule: Schedule | None
) -> tuple[Tensor, Tensor]:
    """out and lse of an eager call, differentiable where the plan has a backward.

    The layers of torch.library cost as much as a short kernel takes: an eager call leaves them out.
    """
    if plan.run_backward is not None:
        return _Attention.apply(q, k, v, seed, schedule, plan)
    with no_autocast(q):
        return plan.forward(q, k, v, seed, schedule)


def call_operator(
    q: Tensor, k: Tensor, v: Tensor, mask: str, schedule: Schedule | None, seed: Tensor | None,
    options: tuple[Any, ...], needs_grad: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """The same through the operator."""
    flat = as_tensors(schedule) if schedule is not None else ([], [])
    if not torch.compiler.is_compiling() and torch._C._are_functorch_transforms_active():
        return _Functional.apply(q, k, v, seed, *flat[0], (mask, flat[1], options))
    return torch.ops.sparseflash.forward(q, k, v, mask, *flat, seed, *options, needs_grad)


def plain(*tensors: Any) -> bool:
    """Whether no compiler, tracer, transform, dispatch mode or subclass has to see an operator."""
    for t in tensors:
        if type(t) is not Tensor and type(t) is not torch.nn.Parameter:
            return False
    return not (
        torch.compiler.is_compiling()
        or torch._C._are_functorch_transforms_active()
        or torch._C._len_torch_dispatch_stack()
        or torch._C._is_tracing()
        or torch.autograd.forward_ad._current_level >= 0
    )


def no_autocast(q: Tensor):
    """A backend picks its own precisions."""
    device = q.device.type
    return torch.autocast(device, enabled=False) if torch.is_autocast_enabled(device) else _NOTHING


_NOTHING = nullcontext()


class _Attention(torch.autograd.Function):
    """The two directions of a plan under autograd alone."""

    @staticmethod
    def forward(ctx, q, k, v, seed, schedule, plan):  # type: ignore[override]
        with no_autocast(q):
            out, lse = plan.forward(q, k, v, seed, schedule)
        ctx.save_for_backward(q, k, v, out, lse, seed)
        ctx.set_materialize_grads(False)
        ctx.schedule, ctx.plan = schedule, plan
        return out, lse

    @staticmethod
    def backward(ctx, dout, dlse):  # type: ignore[override]
        saved = Saved(*ctx.saved_tensors)
        if dout is None:
            dout = torch.zeros_like(saved.out)
        if torch.is_grad_enabled() or not plain(dout, *saved[:3]):
            # create_graph=True: the operator refuses a second derivative when one is taken
            problem, schedule = ctx.plan.problem, ctx.schedule
            flat = as_tensors(schedule) if schedule is not None else ([], [])
            mask = problem.mask if isinstance(problem.mask, str) else ""
            gradients = torch.ops.sparseflash.backward(
                dout, dlse, *saved[:5], mask, *flat, saved.seed, *problem.options
            )
        else:
            gradients = _run_backward(ctx.plan, dout, dlse, saved, ctx.schedule)
        return *gradients, None, None, None


class _Functional(torch.autograd.Function):
    """The operators as the transforms of torch.func take them."""

    @staticmethod
    def forward(q, k, v, seed, *rest):  # type: ignore[override]
        *schedule, (mask, numbers, options) = rest
        return torch.ops.sparseflash.forward(q, k, v, mask, schedule, numbers, seed, *options, True)

    @staticmethod
    def setup_context(ctx, inputs, output):
        *tensors, ctx.call = inputs
        ctx.save_for_backward(*output, *tensors)
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx, dout, dlse):  # type: ignore[override]
        out, lse, q, k, v, *rest = ctx.saved_tensors
        if dout is None:
            dout = torch.zeros_like(out)
        gradients = _FunctionalBackward.apply(dout, dlse, q, k, v, out, lse, *rest, ctx.call)
        return *gradients, *(None for _ in rest), None

    @staticmethod
    def vmap(info, in_dims, *inputs):
        return _mapped(_Functional, info, in_dims, inputs)


class _FunctionalBackward(torch.autograd.Function):
    """Their gradients, which have none of their own."""

    @staticmethod
    def forward(dout, dlse, q, k, v, out, lse, seed, *rest):  # type: ignore[override]
        *schedule, (mask, numbers, options) = rest
        tensors = dout, dlse, q, k, v, out, lse
        return torch.ops.sparseflash.backward(*tensors, mask, schedule, numbers, seed, *options)

    @staticmethod
    def setup_context(ctx, inputs, output):
        pass

    @staticmethod
    def backward(ctx, *gradients):  # type: ignore[override]
        _refuse(ctx, *gradients)

    @staticmethod
    def vmap(info, in_dims, *inputs):
        return _mapped(_FunctionalBackward, info, in_dims, inputs)


def _mapped(function: Any, info: Any, in_dims: tuple[Any, ...], inputs: tuple[Any, ...]):
    """What torch.vmap makes of a function: its calls one by one, stacked."""
    results = []
    for i in range(info.batch_size):
        one = (
            x.select(dim, i).contiguous() if isinstance(dim, int) else x
            for x, dim in zip(inputs, in_dims, strict=True)
        )  # fmt: skip
        results.append(function.apply(*one))
    return tuple(map(torch.stack, zip(*results, strict=True))), (0,) * len(results[0])


def _run_backward(
    plan: Plan, dout: Tensor, dlse: Tensor | None, saved: Saved, schedule: Schedule | None
) -> tuple[Tensor, Tensor, Tensor]:
    if dout.stride(-1) != 1:
        dout = dout.contiguous()
    with no_autocast(saved.q):
        return plan.backward(dout, dlse, saved, schedule)


def _found(
    qkv: tuple[Tensor, Tensor, Tensor], mask: str, tensors: list[Tensor], numbers: list[int],
    options: tuple[Any, ...], needs_grad: bool,
) -> tuple[Plan, Schedule | None]:  # fmt: skip
    """The plan of an operator's call, and the schedule that it brings."""
    schedule = from_tensors(tensors, numbers) if tensors else None
    call = *qkv, schedule.facts if schedule else mask or None, options, needs_grad
    plan = cache.get(key_of(*call))
    return plan or plan_for(describe(*call), schedule=schedule), schedule


@torch.library.impl("sparseflash::forward", ("CPU", "CUDA"))
def _forward(q, k, v, mask, schedule, numbers, seed, *call):
    *options, needs_grad = call
    plan, made = _found((q, k, v), mask, schedule, numbers, tuple(options), needs_grad)
    with no_autocast(q):
        return plan.forward(q, k, v, seed, made)


@torch.library.impl("sparseflash::backward", ("CPU", "CUDA"))
def _backward(dout, dlse, q, k, v, out, lse, mask, schedule, numbers, seed, *options):
    plan, made = _found((q, k, v), mask, schedule, numbers, tuple(options), True)
    return _run_backward(plan, dout, dlse, Saved(q, k, v, out, lse, seed), made)


@torch.library.register_fake("sparseflash::forward")
def _forward_fake(q, k, v, *call):
    dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
    return empty_out(q, v), q.new_empty(q.shape[:3], dtype=dtype)


@torch.library.register_fake("sparseflash::backward")
def _backward_fake(dout, dlse, q, k, v, *call):
    return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)


def _save(ctx, inputs, output):
    q, k, v, mask, schedule, numbers, seed, *options, _needs_grad = inputs
    ctx.save_for_backward(q, k, v, *output, seed, *schedule)
    ctx.set_materialize_grads(False)
    ctx.constants = mask, numbers, options


def _differentiate(ctx, dout, dlse):
    q, k, v, out, lse, seed, *schedule = ctx.saved_tensors
    mask, numbers, options = ctx.constants
    if dout is None:
        dout = torch.zeros_like(out)
    dq, dk, dv = torch.ops.sparseflash.backward(
        dout, dlse, q, k, v, out, lse, mask, schedule, numbers, seed, *options
    )
    # torch takes any empty list for a list of tensors, which wants a list of gradients
    no_list = None if numbers else []
    return dq, dk, dv, None, [None] * len(schedule), no_list, *(None for _ in range(6))


def _refuse(ctx, *gradients):
    raise RuntimeError(
        "sparseflash has no second derivatives; take its gradients without create_graph=True"
    )


torch.library.register_autograd("sparseflash::forward", _differentiate, setup_context=_save)
torch.library.register_autograd("sparseflash::backward", _refuse)
