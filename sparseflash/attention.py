"""The public functions: check the arguments, find the plan of the call, run it."""

from typing import Any, Literal, NamedTuple, TypedDict, Unpack, overload

import numpy as np
import torch
from torch import Tensor

from masks import BlockMask, Mask
from sparseflash.arguments import (
    as_float,
    as_mask,
    autocast,
    contiguous,
    extents_of,
    refuse_unknown,
    schedule_of,
    unless_empty,
    wants_grad,
)
from sparseflash.backends.protocol import DIRECTIONS, NO_TERMS, Results, TermTensors
from sparseflash.backends.registry import NAMES, reasons
from sparseflash.cache import cache
from sparseflash.checks import (
    check_extents,
    check_options,
    check_tensors,
    check_transforms,
    is_empty,
    seed_tensor,
)
from sparseflash.distributed.plan import ContextParallel
from sparseflash.dynamic.lengths import (
    Lengths,
    attend_within,
    check_bounds,
    keep_within,
    padding_for,
)
from sparseflash.dynamic.selection import Selection
from sparseflash.operators.attention import call_operator, plain, run
from sparseflash.picks import operator as picked
from sparseflash.picks.picks import Picks
from sparseflash.plan import Plan, plan_for, prepared, traced_plan
from sparseflash.problem import Problem, describe, key_of
from sparseflash.schedule.blocks import Schedule, schedule_for
from sparseflash.shards import is_sharded, on_shards
from sparseflash.terms import Terms, term_options, term_tensors

BoolArray = np.ndarray | Tensor
AnyMask = Mask | BlockMask | Selection | Picks | Schedule | ContextParallel | BoolArray | None


class Keywords(TypedDict, total=False):
    """Arguments of `attention` that do not change what it returns."""

    lengths: Lengths | None
    starts: Lengths | None
    scale: float | None
    terms: Terms | None
    dropout_p: float
    seed: int | Tensor | None
    deterministic: bool
    backend: str


@overload
def attention(
    q: Tensor, k: Tensor, v: Tensor, mask: AnyMask = None, *, return_lse: Literal[False] = False,
    return_max_scores: Literal[False] = False, **options: Unpack[Keywords],
) -> Tensor: ...  # fmt: skip
@overload
def attention(
    q: Tensor, k: Tensor, v: Tensor, mask: AnyMask = None, *, return_lse: Literal[True],
    return_max_scores: Literal[False] = False, **options: Unpack[Keywords],
) -> tuple[Tensor, Tensor]: ...  # fmt: skip
@overload
def attention(
    q: Tensor, k: Tensor, v: Tensor, mask: AnyMask = None, *, return_lse: Literal[False] = False,
    return_max_scores: Literal[True], **options: Unpack[Keywords],
) -> tuple[Tensor, Tensor]: ...  # fmt: skip
@overload
def attention(
    q: Tensor, k: Tensor, v: Tensor, mask: AnyMask = None, *, return_lse: Literal[True],
    return_max_scores: Literal[True], **options: Unpack[Keywords],
) -> tuple[Tensor, Tensor, Tensor]: ...  # fmt: skip
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: AnyMask = None,
    *,
    lengths: Lengths | None = None,
    starts: Lengths | None = None,
    scale: float | None = None,
    terms: Terms | None = None,
    return_lse: bool = False,
    return_max_scores: bool = False,
    dropout_p: float = 0.0,
    seed: int | Tensor | None = None,
    deterministic: bool = False,
    backend: str = "auto",
    **unknown: Any,
) -> Tensor | tuple[Tensor, ...]:
    """softmax(scale q k^T, over the allowed keys) v: (B, H_q, N_q, D_v), with time and memory for
    the allowed blocks only.

    A query with nothing to attend to gives output 0, LSE and largest logit -inf, and gradients 0.
    So do an empty batch, no queries and no keys.

    Args:
        q: (B, H_q, N_q, D), bfloat16, float16, float32 or float64; H_q is a multiple of H_kv.
        k: (B, H_kv, N_k, D).
        v: (B, H_kv, N_k, D_v); its head dim D_v may differ from D.
        mask: a `masks.Mask`, a `masks.BlockMask` of these lengths, a `select.Selection` made from q
            and k or its `plan`, the `select.Picks` of each query, a bool array that broadcasts over
            batch and heads ((N_q, N_k), (H_q, N_q, N_k) or (B, H_q, N_q, N_k); True = attend), or
            None for dense attention. A mask with a head for each key head is shared by its query
            heads. Of a Mask that differs from layer to layer: `mask.layer(i)`.
        lengths: (B,) ints, a tensor or a list: keys from number lengths[b] on are not attended to.
            With N_q = N_k they are the lengths of the sequences: the output of later queries is 0,
            their LSE -inf. With N_q != N_k they count keys only. A tensor on a GPU is not read:
            values above N_k then mean N_k, and negative values 0.
        starts: (B,) ints likewise: keys before number starts[b] are not attended to, as where
            sequences are padded on the left. With N_q = N_k the output of earlier queries is 0,
            their LSE -inf. The mask counts tokens from 0, not from the start.
        scale: of the scores; D ** -0.5 by default.
        terms: what the softmax has beside scale q k^T, such as attention sinks; see `Terms`.
        return_lse: also return the natural logarithm of the softmax's denominator, (B, H_q, N_q)
            float32, or float64 like q, differentiable.
        return_max_scores: also return the largest logit of each query's allowed keys, of the shape
            and dtype of the LSE, without a gradient: scale q k^T with the terms of the scores,
            before dropout. A sink is not part of it. It comes last.
        dropout_p: probability that a probability is dropped; the choice is a function of
            (seed, b, h, q, k).
        seed: int or one-element int64 tensor for dropout; drawn from torch's generator by default.
        deterministic: gradients are the same bits from run to run. Also on where
            `torch.use_deterministic_algorithms` is.
        backend: "auto" picks the fastest that can run the forward, and the fastest that can run the
            backward; a named backend runs both. See `explain`.

    DTensors keep a sharding of the batch and of the heads where the mask does not differ along it;
    any other sharding, or one with dropout, is gathered first. The results are DTensors.

    Raises:
        ValueError: inputs that do not fit together, or a backend that cannot run them.
        RuntimeError: a forward-mode derivative, a second derivative where it is taken, or a first
            call with a mask while a CUDA graph is captured.
    """
    if unknown:
        refuse_unknown("attention", unknown)
    flags = {"return_lse": return_lse, "return_max_scores": return_max_scores}
    check_options(scale, dropout_p, backend, NAMES, deterministic=deterministic, **flags)
    deterministic = _deterministic(deterministic)
    if type(q) is not Tensor and is_sharded(q):
        options = {"dropout_p": dropout_p, "seed": seed, "deterministic": deterministic}
        options |= {"backend": backend, "scale": scale, **flags}
        return on_shards(attention, q, k, v, mask, lengths, starts, terms, **options)
    q, k, v = autocast(q, k, v)
    if isinstance(mask, ContextParallel):
        options = {"scale": as_float(scale), "terms": terms, "return_lse": return_lse}
        options |= {"deterministic": deterministic, "backend": backend, "dropout_p": dropout_p}
        options |= {"lengths": lengths, "starts": starts, "return_max_scores": return_max_scores}
        options |= {"seed": seed}
        return mask.attend(q, k, v, attend=attention, **options)
    if isinstance(mask, Picks):
        given = lengths, starts, terms, dropout_p, return_max_scores, backend
        if picked.why_not(q, k, v, mask, *given) is None:
            q, k, v = contiguous(q, k, v)
            out, lse = picked.attend(q, k, v, mask, as_float(scale))
            return (out, lse) if return_lse else out
        mask = None if is_empty(q, k) else mask.selection(q.shape[1])
    if lengths is not None or starts is not None:
        options = {"dropout_p": dropout_p, "seed": seed, "deterministic": deterministic}
        options |= {"backend": backend, "scale": as_float(scale), "starts": starts, **flags}
        return attend_within(attention, q, k, v, mask, lengths, terms=terms, **options)
    options = *term_options(terms), return_max_scores
    call = as_float(scale), dropout_p, deterministic, backend, *options
    tensors = NO_TERMS if terms is None else term_tensors(terms, q, k, v)
    if plain(q, k, v, *filter(torch.is_tensor, tensors)):
        needs_grad = wants_grad(q, k, v, *tensors)
        plan, schedule = _known(q, k, v, mask, call, needs_grad), None
        if plan is None:
            found = _checked(q, k, v, mask, call, needs_grad)
            q, k, v, schedule = found.q, found.k, found.v, found.schedule
            plan = plan_for(found.problem, found.mask, schedule)
        seed = seed_tensor(seed, q.device) if dropout_p else None
        return run(plan, q, k, v, seed, tensors, schedule).asked(return_lse)
    return _through_operator(q, k, v, mask, seed, tensors, call).asked(return_lse)


def explain(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: AnyMask = None,
    *,
    lengths: Lengths | None = None,
    starts: Lengths | None = None,
    scale: float | None = None,
    terms: Terms | None = None,
    return_lse: bool = False,
    return_max_scores: bool = False,
    dropout_p: float = 0.0,
    seed: int | Tensor | None = None,
    deterministic: bool = False,
    backend: str = "auto",
    **unknown: Any,
) -> str:
    """Which backend `attention` takes for the forward and which for the backward of these
    arguments, and why not the others: a line for each direction, then one for each backend.
    """
    if unknown:
        refuse_unknown("explain", unknown)
    flags = {"return_lse": return_lse, "return_max_scores": return_max_scores}
    check_options(scale, dropout_p, backend, NAMES, deterministic=deterministic, **flags)
    deterministic = _deterministic(deterministic)
    q, k, v = autocast(q, k, v)
    check_tensors(q, k, v)
    if is_empty(q, k):
        return "forward, backward: there is no sequence, no query or no key, so nothing runs"
    lines = []
    if isinstance(mask, Picks):
        given = lengths, starts, terms, dropout_p, return_max_scores, backend
        reason = picked.why_not(q, k, v, mask, *given)
        if reason is None:
            return "forward, backward: triton, from the list of each query"
        mask = mask.selection(q.shape[1])
        lines.append(f"picks become a selection: {reason}")
    if lengths is not None or starts is not None:
        factor = as_float(scale) or q.shape[-1] ** -0.5
        lengths, starts = check_bounds(lengths, starts, q.shape[0], k.shape[2], q.device)
        padding = padding_for(terms, mask, q.shape[2], k.shape[2])
        q, k, v, mask, _ = keep_within(q, k, v, mask, lengths, factor, padding, starts)
    options = *term_options(terms), return_max_scores
    call = as_float(scale), dropout_p, deterministic, backend, *options
    found = _checked(q, k, v, mask, call, needs_grad=True)
    problem = found.problem
    if found.mask is not None:  # raises where it does not fit
        schedule_for(found.mask, *extents_of(q, k), problem.device, kv_heads=k.shape[1])
    if dropout_p:
        seed_tensor(seed, problem.device)
    if terms is not None:
        term_tensors(terms, q, k, v)
    for direction in DIRECTIONS:
        why_not = reasons(problem, direction)
        wanted = why_not if backend == "auto" else [backend]
        chosen = next((name for name in wanted if why_not[name] is None), None)
        lines.append(f"{direction}: {chosen or 'none can run it'}")
        for name, reason in why_not.items():
            answer = "chosen" if name == chosen else reason or "could run this"
            lines.append(f"  {name}: {answer}")
    return "\n".join(lines)


@overload
def plan(
    mask: Mask | BlockMask | BoolArray | Selection | Schedule, q: Tensor, k: Tensor, v: Tensor, *,
    scale: float | None = None, dropout_p: float = 0.0, deterministic: bool = False,
    backend: str = "auto",
) -> Schedule: ...  # fmt: skip
@overload
def plan(
    mask: None, q: Tensor, k: Tensor, v: Tensor, *, scale: float | None = None,
    dropout_p: float = 0.0, deterministic: bool = False, backend: str = "auto",
) -> None: ...  # fmt: skip
def plan(
    mask: AnyMask,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    scale: float | None = None,
    dropout_p: float = 0.0,
    deterministic: bool = False,
    backend: str = "auto",
) -> Schedule | None:
    """Prepare calls of `attention` with this mask and inputs like these; pass the result as `mask`.

    The result holds the block lists. It is a tuple of tensors and numbers, so torch.compile takes
    it as an input, and one graph serves the plans of many masks, such as a window that grows. A
    mask itself is a constant of its graph. None, dense attention, stays None.

    `attention` makes the lists of a selection at every call; several calls, such as those of the
    layers of a model, share those of its plan. Such a plan is a snapshot with the lifetime of
    ordinary tensors: it belongs to the stream that it was made on, and one made while a CUDA graph
    is captured is made again by every replay.

    Only device, dtype, shapes and strides of q, k and v count. Calls with others are right too, but
    prepare again. The backward is prepared where gradients are enabled.
    Raises ValueError as `attention` does, and for `select.Picks`, which have no plan.
    """
    check_options(scale, dropout_p, backend, NAMES, deterministic=deterministic)
    deterministic = _deterministic(deterministic)
    q, k, v = autocast(q, k, v)
    call = as_float(scale), dropout_p, deterministic, backend, *term_options(None), False
    if torch.compiler.is_compiling():
        check_tensors(q, k, v)
        mask = as_mask(mask)
        schedule = None if is_empty(q, k) else schedule_of(mask, q, k)
        return mask if schedule is None else traced_plan(schedule, q, k, v, call)  # pyright: ignore
    found = _checked(q, k, v, mask, call, needs_grad=torch.is_grad_enabled())
    problem, schedule = found.problem, found.schedule
    if found.mask is not None:
        schedule = schedule_for(found.mask, *extents_of(q, k), q.device, kv_heads=k.shape[1])
        problem = problem._replace(mask=schedule.facts)
    made = prepared(problem, schedule=schedule and schedule.with_lists(()))
    if schedule is None:  # dense attention, or nothing to attend to
        return mask  # pyright: ignore[reportReturnType]
    return schedule.with_lists(made.lists(schedule))


def _deterministic(asked: bool) -> bool:
    """Whether gradients are the same bits: where the call asks for it, or torch is set to it."""
    return asked or torch.are_deterministic_algorithms_enabled()


class _Checked(NamedTuple):
    """Arguments that passed the checks, with a mask or a schedule, or neither: dense attention."""

    q: Tensor
    k: Tensor
    v: Tensor
    mask: Mask | BlockMask | None
    schedule: Schedule | None  # of a selection
    problem: Problem


def _known(q: Tensor, k: Tensor, v: Tensor, mask: Any, call: Any, needs_grad: bool) -> Plan | None:
    """Return the plan of a call that came before, at little cost; nothing but what it needs is
    checked.
    """
    if mask is not None and not isinstance(mask, (Mask, BlockMask)):
        return None
    dtype, device = q.dtype, q.device
    if not (k.dtype is v.dtype is dtype and k.device == v.device == device):
        return None
    key = None if mask is None else mask.key
    try:
        return cache.get(key_of(q, k, v, key, call, needs_grad))
    except RuntimeError:  # of sparse and nested tensors, which `_checked` refuses
        return None


def _checked(q: Tensor, k: Tensor, v: Tensor, mask: Any, call: Any, needs_grad: bool) -> _Checked:
    """Check everything, and bring the arguments into the form that a plan takes."""
    check_tensors(q, k, v)
    q, k, v = contiguous(q, k, v)
    mask = as_mask(unless_empty(mask, q, k))
    schedule = schedule_of(mask, q, k)
    mask = mask if schedule is None else None
    identity = schedule.facts if schedule else None if mask is None else mask.key
    problem = describe(q, k, v, identity, call, needs_grad)
    return _Checked(q, k, v, mask, schedule, problem)


def _through_operator(
    q: Tensor, k: Tensor, v: Tensor, mask: Any, seed: int | Tensor | None, terms: TermTensors,
    call: Any,
) -> Results:  # fmt: skip
    """Run the call through the operator, for compilers, transforms, modes and subclasses."""
    check_tensors(q, k, v)
    compiling = torch.compiler.is_compiling()
    if not compiling:
        check_transforms(q, k, v, *(t for t in terms if t is not None))
    needs_grad = wants_grad(q, k, v, *terms)
    q, k, v = contiguous(q, k, v)
    mask = unless_empty(mask, q, k)
    if compiling and isinstance(mask, np.ndarray | Tensor):
        raise ValueError(
            f"mask is a {type(mask).__name__} inside torch.compile; build it outside with mask_from"
        )
    mask = as_mask(mask)
    schedule = schedule_of(mask, q, k)
    if isinstance(mask, BlockMask):
        check_extents(mask, *extents_of(q, k), k.shape[1])
    key = mask.key if isinstance(mask, Mask | BlockMask) else ""
    seed = seed_tensor(seed, q.device) if call[1] else None
    return call_operator(q, k, v, key, schedule, seed, terms, call, needs_grad)
