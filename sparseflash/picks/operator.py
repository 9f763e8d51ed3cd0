"""Attention to the key blocks that each query picked: the operators sparseflash::picked_forward
and sparseflash::picked_backward, and what they take.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from sparseflash.backends import triton as portable
from sparseflash.backends.protocol import DIRECTIONS, empty_out
from sparseflash.checks import check_tensors, check_transforms, is_empty
from sparseflash.kernels.common.device import kernels_of
from sparseflash.operators.attention import refuse_second_derivative
from sparseflash.picks.picks import Picks
from sparseflash.problem import Options, Problem, scale_or_default

_MOST_LISTS = 2**16 - 1  # batch entries x heads that pick: CUDA has no more programs in a row
_LIST = "Tensor blocks, int block, bool causal, float scale"
torch.library.define(
    "sparseflash::picked_forward",
    # places and ptr are the inverse lists, empty where the forward does not need them
    f"(Tensor q, Tensor k, Tensor v, {_LIST})"
    " -> (Tensor out, Tensor lse, Tensor places, Tensor ptr)",
)
torch.library.define(
    "sparseflash::picked_backward",
    "(Tensor dout, Tensor? dlse, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse,"
    f" Tensor places, Tensor ptr, {_LIST}) -> (Tensor dq, Tensor dk, Tensor dv)",
)


def _check(picks: Picks, q: Tensor, k: Tensor) -> None:
    """ValueError for picks that do not fit q and k."""
    batch, heads, n_q = picks.blocks.shape[:3]
    if (n_q, picks.n_k) != (q.shape[2], k.shape[2]) or batch not in (1, q.shape[0]):
        raise ValueError(
            f"picks of batch {batch}, {n_q} queries and {picks.n_k} keys do not fit q of batch"
            f" {q.shape[0]}, {q.shape[2]} queries and {k.shape[2]} keys"
        )
    if q.shape[1] % heads or heads % k.shape[1]:
        raise ValueError(
            f"{heads} heads picked: give a multiple of the {k.shape[1]} of k that divides the"
            f" {q.shape[1]} of q"
        )
    if picks.blocks.device != q.device:
        raise ValueError(f"the picks are on {picks.blocks.device}, q on {q.device}: pick from q")


def why_not(q: Tensor, k: Tensor, v: Tensor, picks: Picks, call: Mapping[str, Any]) -> str | None:
    """Return why a call with picks becomes one with a selection, or None.

    call: the arguments of `attention` after the mask. Raises ValueError for picks that misfit.
    """
    check_tensors(q, k, v)
    _check(picks, q, k)
    if is_empty(q, k):
        return "there is no sequence, no query or no key"
    backend = call.get("backend", "auto")
    if backend not in ("auto", "triton"):
        return f"backend={backend!r} has no lists for each query"
    for name in ("lengths", "starts", "sink", "score"):
        if call.get(name) is not None:
            return f"there is no {name} with lists for each query"
    for name in ("dropout_p", "return_max_scores"):
        if call.get(name):
            return f"there is no {name} with lists for each query"
    if not torch.compiler.is_compiling():
        check_transforms(q, k, v)
        if torch._C._are_functorch_transforms_active():
            return "there are no transforms of torch.func with lists for each query"
    lists = q.shape[0] * picks.heads
    if lists > _MOST_LISTS:
        return f"there are at most {_MOST_LISTS} lists for each query, not {lists}"
    if backend == "auto" and q.device.type == "cpu":
        return "lists for each query are for a GPU"
    widest = max(q.shape[3], v.shape[3])
    apart = any(t.stride(2) >= portable.MOST_APART for t in (q, k, v))
    # torch.compile knows these numbers, though extents may change from call to call
    dim = widest if widest > portable.WIDEST else portable.WIDEST
    stride = portable.MOST_APART if apart else 0
    return _unsupported(dim, stride, q.dtype, q.device)


def _unsupported(dim: int, stride: int, dtype: torch.dtype, device: torch.device) -> str | None:
    """Why the kernels cannot run; dim: the widest of a head, stride: that of tokens.

    torch.compile takes the answer for a constant.
    """
    shape, strides = (1, 1, 1, dim), (0, 0, stride, 1)
    options = Options(None, 0.0, False, "triton")
    layouts = shape, shape, shape, strides, strides, strides
    problem = Problem(*layouts, dtype, device, None, options, misaligned="", needs_grad=True)
    reasons = (portable.unsupported(problem, direction) for direction in DIRECTIONS)
    return next(filter(None, reasons), None)


# what torch.compiler.assume_constant_result does, which takes seconds to import the compiler
_unsupported._dynamo_marked_constant = True  # pyright: ignore[reportFunctionMemberAccess]


def attend(
    q: Tensor, k: Tensor, v: Tensor, picks: Picks, scale: float | None
) -> tuple[Tensor, Tensor]:
    """out and lse, differentiable. In q, k and v the elements of the head dim are side by side."""
    blocks = picks.blocks.expand(q.shape[0], -1, -1, -1).contiguous()
    call = blocks, picks.block, picks.causal, scale_or_default(scale, q.shape[-1])
    return torch.ops.sparseflash.picked_forward(q, k, v, *call)[:2]


@torch.library.impl("sparseflash::picked_forward", ("CPU", "CUDA"))
def _forward(*call):
    return kernels_of("picks").picked_forward(*call)


@torch.library.impl("sparseflash::picked_backward", ("CPU", "CUDA"))
def _backward(*call):
    return kernels_of("picks").picked_backward(*call)


@torch.library.register_fake("sparseflash::picked_forward")
def _forward_fake(q, k, v, blocks, block, *_):
    sizes = kernels_of("picks").inverse_sizes(q, k, v, blocks, block)
    lse = q.new_empty(q.shape[:3], dtype=torch.float32)
    return empty_out(q, v), lse, *(blocks.new_empty(size) for size in sizes)


@torch.library.register_fake("sparseflash::picked_backward")
def _backward_fake(dout, dlse, q, k, v, *call):
    return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)


def _save(ctx, inputs, output):
    q, k, v, blocks, *ctx.call = inputs
    ctx.mark_non_differentiable(*output[2:])
    ctx.save_for_backward(q, k, v, *output, blocks)
    ctx.set_materialize_grads(False)


def _differentiate(ctx, dout, dlse, *_):
    *saved, blocks = ctx.saved_tensors
    if dout is None:
        dout = torch.zeros_like(saved[3])
    gradients = torch.ops.sparseflash.picked_backward(dout, dlse, *saved, blocks, *ctx.call)
    return *gradients, None, None, None, None


torch.library.register_autograd("sparseflash::picked_forward", _differentiate, setup_context=_save)
torch.library.register_autograd("sparseflash::picked_backward", refuse_second_derivative)
