"""The public functions: check the arguments, find the plan of the call, run it."""

from typing import Any, Literal, TypedDict, Unpack, overload

import numpy as np
import torch
from torch import Tensor

from masks import BlockMask, Mask
from sparseflash.backends.protocol import DIRECTIONS, NO_TERMS
from sparseflash.backends.registry import reasons
from sparseflash.cache import are_fake
from sparseflash.checks import check_table, check_tensors, is_empty, seed_tensor
from sparseflash.distributed.plan import ContextParallel
from sparseflash.dropout import is_table
from sparseflash.dynamic.lengths import (
    Lengths,
    attend_within,
    check_bounds,
    keep_within,
)
from sparseflash.dynamic.selection import Selection
from sparseflash.operators.attention import call_operator, plain, run
from sparseflash.picks import operator as picked
from sparseflash.picks.picks import Picks
from sparseflash.plan import plan_of_call, prepared, problem_of, traced_plan
from sparseflash.problem import scale_or_default
from sparseflash.request import (
    autocast,
    contiguous,
    extents_of,
    options_of,
    refuse_unknown,
    request_of,
    term_tensors,
)
from sparseflash.schedule.blocks import Schedule, schedule_for
from sparseflash.score.function import Bound, Score
from sparseflash.shards import is_sharded, on_shards

BoolArray = np.ndarray | Tensor
AnyMask = Mask | BlockMask | Selection | Picks | Schedule | ContextParallel | BoolArray | None


class Keywords(TypedDict, total=False):
    """Arguments of `attention` that do not change what it returns."""

    lengths: Lengths | None
    starts: Lengths | None
    scale: float | None
    sink: Tensor | None
    score: Score | Bound | None
    dropout_p: float
    seed: int | Tensor | None
    deterministic: bool
    backend: str


class Call(Keywords, total=False):
    """All arguments of `attention` after the mask."""

    return_lse: bool
    return_max_scores: bool


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
    sink: Tensor | None = None,
    score: Score | Bound | None = None,
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
        sink: (H_q,), a logit of each query head that joins the denominator of all its queries and
            has no value, as in gpt-oss. It has a gradient. A query with nothing to attend to has
            the LSE `sink`. See Xiao et al., arXiv 2309.17453.
        score: a function that changes the scores, with its tensors; see `sparseflash.score`.
        return_lse: also return the natural logarithm of the softmax's denominator, (B, H_q, N_q)
            float32, or float64 like q, differentiable.
        return_max_scores: also return the largest logit of each query's allowed keys, of the shape
            and dtype of the LSE, without a gradient: scale q k^T after `score`, before
            dropout. A sink is not part of it. It comes last.
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
    options = options_of(
        scale, dropout_p, deterministic, backend, score=score, max_scores=return_max_scores,
        return_lse=return_lse,
    )  # fmt: skip
    if seed is not None and is_table(seed):
        check_table(seed, q, k)
        options = options._replace(keyed=True)
    q, k, v = autocast(q, k, v)
    special = isinstance(mask, (Picks, ContextParallel))
    if special or lengths is not None or starts is not None or type(q) is not Tensor:
        call: dict[str, Any] = {
            "scale": options.scale, "sink": sink, "score": score, "dropout_p": dropout_p,
            "seed": seed, "deterministic": options.deterministic, "backend": backend,
            "lengths": lengths, "starts": starts, "return_lse": return_lse,
            "return_max_scores": return_max_scores,
        }  # fmt: skip
        if type(q) is not Tensor and is_sharded(q):
            return on_shards(attention, q, k, v, mask, **call)
        if special or lengths is not None or starts is not None:
            return _reduced(q, k, v, mask, call)
    tensors, eager = NO_TERMS, plain(q, k, v)
    if sink is not None or score is not None:
        tensors = term_tensors(sink, score, q, k, v)
        eager = eager and plain(*filter(torch.is_tensor, tensors.flat))
    if not eager:
        request = request_of(q, k, v, mask, options, tensors)
        return call_operator(request, seed).asked(return_lse)
    plan, q, k, v, schedule = plan_of_call(q, k, v, mask, options, tensors)
    seed = seed_tensor(seed, q.device) if dropout_p else None
    return run(plan, q, k, v, seed, tensors, schedule).asked(return_lse)


def _reduced(q: Tensor, k: Tensor, v: Tensor, mask: Any, call: dict[str, Any]) -> Any:
    """Run a call with a share of the sequence, with picks or with lengths by calls without."""
    if isinstance(mask, ContextParallel):
        return mask.attend(q, k, v, attend=attention, **call)
    if isinstance(mask, Picks):
        if picked.why_not(q, k, v, mask, call) is None:
            q, k, v = contiguous(q, k, v)
            out, lse = picked.attend(q, k, v, mask, call["scale"])
            return (out, lse) if call["return_lse"] else out
        mask = None if is_empty(q, k) else mask.selection(q.shape[1])
    return attend_within(attention, q, k, v, mask, call.pop("lengths"), **call)


def explain(q: Tensor, k: Tensor, v: Tensor, mask: AnyMask = None, **call: Unpack[Call]) -> str:
    """Return which backend `attention` takes for the forward and which for the backward of these
    arguments, and why not the others: a line for each direction, then one for each backend.
    """
    if unknown := {name: x for name, x in call.items() if name not in Call.__annotations__}:
        refuse_unknown("explain", unknown)
    score = call.get("score")
    dropout_p, backend = call.get("dropout_p", 0.0), call.get("backend", "auto")
    options = options_of(
        call.get("scale"), dropout_p, call.get("deterministic", False), backend, score=score,
        max_scores=call.get("return_max_scores", False), return_lse=call.get("return_lse", False),
    )  # fmt: skip
    q, k, v = autocast(q, k, v)
    check_tensors(q, k, v)
    if is_empty(q, k):
        return "forward, backward: there is no sequence, no query or no key, so nothing runs"
    lines = []
    if isinstance(mask, Picks):
        reason = picked.why_not(q, k, v, mask, call)
        if reason is None:
            return "forward, backward: triton, from the list of each query"
        mask = mask.selection(q.shape[1])
        lines.append(f"picks become a selection: {reason}")
    lengths, starts = call.get("lengths"), call.get("starts")
    if lengths is not None or starts is not None:
        factor = scale_or_default(options.scale, q.shape[-1])
        lengths, starts = check_bounds(lengths, starts, q.shape[0], k.shape[2], q.device)
        q, k, v, mask, _ = keep_within(q, k, v, mask, lengths, starts, factor, score)
    request = request_of(q, k, v, mask, options, needs_grad=True)
    problem = problem_of(request)
    if request.mask is not None:  # raises where it does not fit
        schedule_for(request.mask, *extents_of(q, k), problem.device, kv_heads=k.shape[1])
    if dropout_p:
        seed = seed_tensor(call.get("seed"), problem.device)
        if is_table(seed):
            check_table(seed, q, k)
    term_tensors(call.get("sink"), score, q, k, v)
    for direction in DIRECTIONS:
        why_not = reasons(problem, direction)
        wanted = why_not if backend == "auto" else [backend]
        chosen = next((name for name in wanted if why_not[name] is None), None)
        lines.append(f"{direction}: {chosen or 'none can run it'}")
        for name, reason in why_not.items():
            answer = "chosen" if name == chosen else reason or "could run this"
            lines.append(f"  {name}: {answer}")
    return "\n".join(lines)


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
    options = options_of(scale, dropout_p, deterministic, backend)
    q, k, v = autocast(q, k, v)
    request = request_of(q, k, v, mask, options, needs_grad=torch.is_grad_enabled())
    schedule, compiling = request.schedule, torch.compiler.is_compiling()
    if are_fake() or (not compiling and torch._C._are_functorch_transforms_active()):
        # these hold addresses back
        return mask if schedule is None else schedule  # pyright: ignore[reportReturnType]
    if schedule is None and request.mask is None:  # dense attention, or nothing to attend to
        if not compiling:
            prepared(problem_of(request))
        return mask  # pyright: ignore[reportReturnType]
    if compiling:
        return mask if schedule is None else traced_plan(request)  # pyright: ignore
    problem = problem_of(request)
    if schedule is None:
        assert request.mask is not None
        extents = extents_of(request.q, request.k)
        schedule = schedule_for(request.mask, *extents, q.device, kv_heads=k.shape[1])
        problem = problem._replace(mask=schedule.facts)
    made = prepared(problem, schedule=schedule.with_lists(()))
    return schedule.with_lists(made.lists(schedule))
