"""The operators sparseflash::forward, sparseflash::backward and, for calls without gradients,
sparseflash::inference, which torch.compile, autograd and opcheck see, and the eager path, which
leaves them out where nothing has to see them.

A mask crosses an operator as its key, a schedule made at run time as its tensors and ints. Inside,
the plan of the call is found in the cache, as in an eager call.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from masks import BlockMask
from sparseflash.backends.protocol import Gradients, Results, Saved, TermTensors, empty_out
from sparseflash.cache import cache
from sparseflash.checks import check_extents, seed_tensor
from sparseflash.operators import flops
from sparseflash.plan import Plan, plan_for
from sparseflash.problem import Options, describe, key_of
from sparseflash.request import Request, extents_of
from sparseflash.schedule.blocks import Schedule, as_tensors, from_tensors
from sparseflash.score.rule import kinds_of

# mask: a key, or "" with the tensors and ints of a schedule, or "" alone for dense attention.
# Without a schedule both are None, and so are tables: AOTInductor cannot pass an empty list.
CALL = (
    "str mask, Tensor[]? schedule, SymInt[]? numbers, Tensor? seed, Tensor? sink, Tensor[]? tables,"
    " float? scale, float dropout_p, bool deterministic, str backend, str score,"
    " bool keyed, bool max_scores"
)
# max_scores is empty where the call does not ask for it
FORWARD = f"(Tensor q, Tensor k, Tensor v, {CALL}) -> (Tensor out, Tensor lse, Tensor max_scores)"
torch.library.define("sparseflash::forward", FORWARD)
# autograd's layer in Python would take 10 us of every call
torch.library.define("sparseflash::inference", FORWARD)
torch.library.define(
    "sparseflash::backward",
    "(Tensor dout, Tensor? dlse, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse,"
    # those of a table that needs none are empty
    f" {CALL}) -> (Tensor dq, Tensor dk, Tensor dv, Tensor dsink, Tensor[] dtables)",
)
N_TERMS = len(TermTensors._fields)


def run(
    plan: Plan, q: Tensor, k: Tensor, v: Tensor, seed: Tensor | None, terms: TermTensors,
    schedule: Schedule | None,
) -> Results:  # fmt: skip
    """Return the results of an eager call, differentiable where the plan has a backward.

    The layers of torch.library cost as much as a short kernel takes: an eager call leaves them out.
    """
    if plan.run_backward is not None:
        return Results(*_apply(q, k, v, seed, schedule, plan, *terms.flat))
    return without_autocast(plan.forward, q, k, v, seed, terms, schedule)


def call_operator(request: Request, seed: int | Tensor | None) -> Results:
    """Run a call through the registered operator, for torch.compile, torch.func, tensor subclasses
    and dispatch modes.
    """
    q, k, v, mask, schedule, options, terms, needs_grad = request
    if isinstance(mask, BlockMask):  # that of a Mask fits; an eager call checks where it is built
        check_extents(mask, *extents_of(q, k), k.shape[1])
    seed = seed_tensor(seed, q.device) if options.dropout_p else None
    key = "" if mask is None else mask.key
    tensors, numbers = as_tensors(schedule) if schedule is not None else (None, None)
    if not torch.compiler.is_compiling() and torch._C._are_functorch_transforms_active():
        constants = Constants(key, numbers, options, len(terms.flat))
        found = _Functional.apply(q, k, v, seed, *terms.flat, *(tensors or ()), constants)
    else:
        operators = torch.ops.sparseflash
        run = operators.forward if needs_grad else operators.inference
        found = run(q, k, v, key, tensors, numbers, seed, *_listed(terms), *options)
    out, lse, max_scores = found
    if not torch.compiler.is_compiling() and out.grad_fn is not None:
        out.grad_fn.metadata["mask"] = mask  # which the backward finds by its key
    return Results(out, lse, max_scores if options.max_scores else None)


class Constants(NamedTuple):
    """Arguments of an operator that are no tensors."""

    mask: str
    numbers: list[int] | None  # of a schedule
    options: Options
    n_terms: int  # how many tensors of terms and tables there are


def plain(*tensors: Any) -> bool:
    """Whether no compiler, tracer, transform, dispatch mode or subclass has to see an operator."""
    for t in tensors:
        if type(t) is not Tensor and type(t) is not torch.nn.Parameter:
            return False
    if torch.compiler.is_compiling():
        return False
    if torch._C._len_torch_dispatch_stack():
        flops.register()
        return False
    return not (
        torch._C._are_functorch_transforms_active()
        or torch._C._is_tracing()
        or torch.autograd.forward_ad._current_level >= 0
    )


def without_autocast(run: Callable[..., Any], first: Tensor, *args: Any) -> Any:
    """Return run(first, *args) without autocast: a backend picks its own precisions."""
    if not torch._C._is_any_autocast_enabled():
        return run(first, *args)
    with torch.autocast(first.device.type, enabled=False):
        return run(first, *args)


class _Attention(torch.autograd.Function):
    """The two directions of a plan under autograd alone."""

    @staticmethod
    def forward(ctx, q, k, v, seed, schedule, plan, *terms):  # type: ignore[override]
        found = without_autocast(plan.forward, q, k, v, seed, TermTensors.of(terms), schedule)
        out, lse, max_scores = found
        ctx.save_for_backward(q, k, v, out, lse, seed, *terms)
        ctx.set_materialize_grads(False)
        if max_scores is not None:
            ctx.mark_non_differentiable(max_scores)
        ctx.schedule, ctx.plan = schedule, plan
        return out, lse, max_scores

    @staticmethod
    def backward(ctx, dout, dlse, _):  # type: ignore[override]
        q, k, v, out, lse, seed, *terms = ctx.saved_tensors
        layouts = ctx.plan.problem[3:6]
        if (q.stride(), k.stride(), v.stride()) != layouts:  # by hooks of saved tensors
            q, k, v = map(_with_strides, (q, k, v), layouts)
        saved = Saved(q, k, v, out, lse, seed, TermTensors.of(terms))
        if dout is None:
            dout = torch.zeros_like(saved.out)
        if torch.is_grad_enabled() or not plain(dout, *saved[:3]):
            # create_graph=True: the operator refuses a second derivative when one is taken
            problem, schedule = ctx.plan.problem, ctx.schedule
            flat = as_tensors(schedule) if schedule is not None else (None, None)
            mask = problem.mask if isinstance(problem.mask, str) else ""
            dq, dk, dv, *others = torch.ops.sparseflash.backward(
                dout, dlse, *saved[:5], mask, *flat, saved.seed, *_listed(saved.terms),
                *problem.options,
            )  # fmt: skip
            dsink, *dtables = _of_terms(others, problem.options, terms)
        else:
            dq, dk, dv, dsink, dtables = _run_backward(ctx.plan, dout, dlse, saved, ctx.schedule)
        return dq, dk, dv, None, None, None, dsink, *dtables


def _with_strides(t: Tensor, strides: tuple[int, ...]) -> Tensor:
    """Return a copy of t with these strides, 0 where it is expanded."""
    part = t[tuple(slice(None if stride else 1) for stride in strides)]
    return part.new_empty_strided(part.shape, strides).copy_(part).expand(t.shape)


def plain_apply(function: type[torch.autograd.Function]) -> Callable[..., Any]:
    """Return `apply` without what it does for torch.func, which `plain` excludes."""
    return super(torch.autograd.Function, function).apply  # pyright: ignore


_apply = plain_apply(_Attention)


class _Functional(torch.autograd.Function):
    """The operators as the transforms of torch.func take them."""

    @staticmethod
    def forward(q, k, v, *rest):  # type: ignore[override]
        return torch.ops.sparseflash.forward(q, k, v, *_call(*rest))

    @staticmethod
    def setup_context(ctx, inputs, output):
        *tensors, ctx.call = inputs
        out, lse, max_scores = output
        ctx.mark_non_differentiable(max_scores)
        ctx.save_for_backward(out, lse, *tensors)
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx, dout, dlse, _):  # type: ignore[override]
        out, lse, q, k, v, *rest = ctx.saved_tensors
        if dout is None:
            dout = torch.zeros_like(out)
        found = _FunctionalBackward.apply(dout, dlse, q, k, v, out, lse, *rest, ctx.call)
        dq, dk, dv, dsink, *dtables = found
        n = 1 + ctx.call.n_terms
        others = _of_terms((dsink, dtables), ctx.call.options, rest[1:n])
        return dq, dk, dv, None, *others, *(None for _ in rest[n:]), None

    @staticmethod
    def vmap(info, in_dims, *inputs):
        return _mapped(_Functional, info, in_dims, inputs)


class _FunctionalBackward(torch.autograd.Function):
    """Their gradients, which have none of their own."""

    @staticmethod
    def forward(dout, dlse, q, k, v, out, lse, *rest):  # type: ignore[override]
        *found, tables = torch.ops.sparseflash.backward(
            dout, dlse, q, k, v, out, lse, *_call(*rest)
        )
        return *found, *tables

    @staticmethod
    def setup_context(ctx, inputs, output):
        pass

    @staticmethod
    def backward(ctx, *gradients):  # type: ignore[override]
        refuse_second_derivative(ctx, *gradients)

    @staticmethod
    def vmap(info, in_dims, *inputs):
        return _mapped(_FunctionalBackward, info, in_dims, inputs)


def _call(seed: Tensor | None, *rest: Any) -> tuple[Any, ...]:
    """Return the arguments of an operator after q, k and v, or lse; rest: terms, schedule,
    constants.
    """
    *tensors, (mask, numbers, options, n_terms) = rest
    terms, schedule = TermTensors.of(tensors[:n_terms]), tensors[n_terms:]
    return mask, schedule or None, numbers, seed, *_listed(terms), *options


def _listed(terms: TermTensors) -> tuple[Any, ...]:
    """Return the terms as arguments of an operator."""
    return terms.sink, list(terms.tables) or None


def _of_terms(
    gradients: Sequence[Any], options: Options, terms: Sequence[Tensor | None]
) -> tuple[Tensor | None, ...]:
    """Return those of `TermTensors.flat`; `gradients`, of sink and tables, have some tensor where
    there is none.
    """
    dsink, dtables = gradients
    wanted = zip(dtables, kinds_of(options.score), strict=True)
    dtables = [d if kind.wanted else None for d, kind in wanted]
    return None if terms[0] is None else dsink, *dtables


def _mapped(function: Any, info: Any, in_dims: tuple[Any, ...], inputs: tuple[Any, ...]):
    """Return what torch.vmap makes of a function: its calls one by one, stacked."""
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
) -> Gradients:
    if dout.stride(-1) != 1:
        dout = dout.contiguous()
    return without_autocast(plan.backward, dout, dlse, saved, schedule)


def _find_plan(
    qkv: tuple[Tensor, Tensor, Tensor], mask: str, tensors: list[Tensor] | None,
    numbers: list[int] | None, options: Options, needs_grad: bool,
) -> tuple[Plan, Schedule | None]:  # fmt: skip
    """Return the plan of an operator's call, and the schedule that it brings."""
    schedule = from_tensors(tensors, numbers) if tensors and numbers else None
    call = *qkv, schedule.facts if schedule else mask or None, options, needs_grad
    plan = cache.get(key_of(*call))
    return plan or plan_for(describe(*call), schedule=schedule), schedule


def _unlisted(call: Sequence[Any]) -> TermTensors:
    """Return the terms at the head of an operator's arguments."""
    return TermTensors(call[0], tuple(call[1] or ()))


def _forward(needs_grad, q, k, v, mask, schedule, numbers, seed, *call):
    options = Options(*call[N_TERMS:])
    plan, made = _find_plan((q, k, v), mask, schedule, numbers, options, needs_grad)
    found = without_autocast(plan.forward, q, k, v, seed, _unlisted(call), made)
    return tuple(q.new_empty(0, dtype=found.lse.dtype) if t is None else t for t in found)


@torch.library.impl("sparseflash::backward", ("CPU", "CUDA"))
def _backward(dout, dlse, q, k, v, out, lse, *call):
    mask, schedule, numbers, seed, *rest = call
    terms, options = _unlisted(rest), Options(*rest[N_TERMS:])
    plan, made = _find_plan((q, k, v), mask, schedule, numbers, options, True)
    saved = Saved(q, k, v, out, lse, seed, terms)
    *gradients, tables = _run_backward(plan, dout, dlse, saved, made)
    none = [q.new_empty(0) if t is None else t for t in (*gradients, *tables)]
    return *none[:4], none[4:]


def _forward_fake(q, k, v, *call):
    dtype = torch.promote_types(q.dtype, torch.float32)
    *_, wanted = call  # the last of `Options` is max_scores
    lse = q.new_empty(q.shape[:3], dtype=dtype)
    return empty_out(q, v), lse, torch.empty_like(lse) if wanted else lse.new_empty(0)


@torch.library.register_fake("sparseflash::backward")
def _backward_fake(dout, dlse, q, k, v, out, lse, *call):
    _mask, _schedule, _numbers, _seed, *rest = call
    sink, tables, *_ = rest
    score = rest[N_TERMS:][Options._fields.index("score")]
    kinds = kinds_of(score)
    given = [t if kind.wanted else None for t, kind in zip(tables or (), kinds, strict=True)]
    made = [q.new_empty(0) if t is None else torch.empty_like(t) for t in (sink, *given)]
    return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v), made[0], made[1:]


def _save(ctx, inputs, output):
    q, k, v, mask, schedule, numbers, seed, *rest = inputs
    out, lse, max_scores = output
    ctx.mark_non_differentiable(max_scores)
    terms = _unlisted(rest).flat
    ctx.save_for_backward(q, k, v, out, lse, seed, *terms, *(schedule or ()))
    ctx.set_materialize_grads(False)
    ctx.constants = Constants(mask, numbers, Options(*rest[N_TERMS:]), len(terms))


def _differentiate(ctx, dout, dlse, _):
    q, k, v, out, lse, *rest = ctx.saved_tensors
    n = 1 + ctx.constants.n_terms
    terms, schedule = rest[1:n], rest[n:]
    if dout is None:
        dout = torch.zeros_like(out)
    dq, dk, dv, *others = torch.ops.sparseflash.backward(
        dout, dlse, q, k, v, out, lse, *_call(*rest, ctx.constants)
    )
    *others, tables = TermTensors.of(_of_terms(others, ctx.constants.options, terms))
    no_options = (None for _ in ctx.constants.options)
    no_schedule = [None] * len(schedule) or None
    return dq, dk, dv, None, no_schedule, None, None, *others, list(tables) or None, *no_options


def refuse_second_derivative(ctx, *gradients):
    raise RuntimeError(
        "sparseflash has no second derivatives; take its gradients without create_graph=True"
    )


for _name in ("forward", "inference"):
    _run = partial(_forward, _name == "forward")
    torch.library.impl(f"sparseflash::{_name}", ("CPU", "CUDA"))(_run)
    torch.library.register_fake(f"sparseflash::{_name}")(_forward_fake)
torch.library.register_autograd("sparseflash::forward", _differentiate, setup_context=_save)
torch.library.register_autograd("sparseflash::backward", refuse_second_derivative)
