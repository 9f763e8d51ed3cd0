"""The public function: validate, find the schedule of the mask, call the operator."""

import math
from typing import Any

import numpy as np
import torch
from torch import Tensor

from masks import BlockMask, Mask, mask_from
from masks.spec import find
from sparseflash import calls
from sparseflash.backends import NAMES, choose, reasons
from sparseflash.ops import attend, prepare, run
from sparseflash.schedule import (
    Schedule,
    as_tensors,
    check_extents,
    from_tensors,
    schedule_for,
)
from sparseflash.select.schedule import schedule_from_selection
from sparseflash.select.selection import Selection

BoolArray = np.ndarray | Tensor


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Mask | BlockMask | Selection | Schedule | BoolArray | None = None,
    *,
    scale: float | None = None,
    return_lse: bool = False,
    dropout_p: float = 0.0,
    seed: int | Tensor | None = None,
    deterministic: bool = False,
    backend: str = "auto",
) -> Tensor | tuple[Tensor, Tensor]:
    """softmax(scale q k^T, over the allowed keys) v: (B, H_q, N_q, D_v), with time and memory for
    the allowed blocks only.

    q: (B, H_q, N_q, D); k: (B, H_kv, N_k, D); v: (B, H_kv, N_k, D_v), H_q a multiple of H_kv;
        bfloat16, float16, float32 or float64. The head dim D_v of v may differ from D.
    mask: a `masks.Mask`, a `masks.BlockMask` of these lengths, a `select.Selection` made
        from q and k or its `plan`, a bool array that broadcasts over batch and heads ((N_q, N_k),
        (H_q, N_q, N_k) or (B, H_q, N_q, N_k); True = attend), or None for dense attention.
    scale: of the scores; D ** -0.5 by default.
    return_lse: also return the natural logarithm of the softmax's denominator, (B, H_q, N_q)
        float32, differentiable.
    dropout_p: probability that a probability is dropped; the choice is a function of
        (seed, b, h, q, k).
    seed: int or one-element int64 tensor for dropout; drawn from torch's generator by default.
    deterministic: gradients are the same bits from run to run.
    backend: "auto" picks the fastest that can run the call; see `explain`.

    A query with nothing to attend to gives output 0, LSE -inf and gradients 0.
    Raises ValueError for inputs that do not fit together or a backend that cannot run them.
    """
    q, k, v = _autocast(q, k, v)
    deterministic = bool(deterministic)
    key = calls.key_of(q, k, v, mask, scale, dropout_p, deterministic, backend)
    call = None if key is None else calls.known.get(key)
    if call is None:
        q, k, v, schedule, scale, dropout_p, seed = _prepare(
            q, k, v, mask, scale, dropout_p, seed, backend
        )
        if key is None:
            out, lse = attend(q, k, v, schedule, scale, dropout_p, seed, deterministic, backend)
            return (out, lse) if return_lse else out
        call = prepare(q, k, v, schedule, scale, dropout_p, deterministic, backend)
        calls.remember(key, call)
    out, lse = run(call, q, k, v, None)
    return (out, lse) if return_lse else out


def explain(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Mask | BlockMask | Selection | Schedule | BoolArray | None = None,
    *,
    scale: float | None = None,
    return_lse: bool = False,
    dropout_p: float = 0.0,
    seed: int | Tensor | None = None,
    deterministic: bool = False,
    backend: str = "auto",
) -> str:
    """Which backend `attention` takes for these arguments, and why not the others, line by line."""
    q, k, v = _autocast(q, k, v)
    q, k, v, schedule, *_ = _prepare(q, k, v, mask, scale, dropout_p, seed, backend)
    why_not = reasons(q, k, v, schedule, dropout_p)
    wanted = why_not if backend == "auto" else [backend]
    chosen = next((name for name in wanted if why_not[name] is None), None)
    lines = [
        f"{name}: {'chosen' if name == chosen else reason or 'could run this'}"
        for name, reason in why_not.items()
    ]
    return "\n".join(lines)


def plan(
    selection: Selection,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    dropout_p: float = 0.0,
    deterministic: bool = False,
    backend: str = "auto",
) -> Schedule:
    """The lists of blocks that `attention` makes of a selection at every call, made once: several
    calls, as of the layers of a model, take the result for their mask.

    Of q, k and v count device, dtype, shapes and strides alone. Calls with others are right too,
    but may make lists again. Those for the backward are made where gradients are enabled.

    The result is a snapshot, with the lifetime of ordinary tensors: it belongs to the stream that
    it was made on, and one made while a CUDA graph is captured is made again by every replay.
    """
    q, k, v = _autocast(q, k, v)
    q, k, v, schedule, *_ = _prepare(q, k, v, selection, None, 0.0, None, backend)
    assert schedule is not None
    module = choose(backend, q, k, v, schedule, dropout_p)
    if not hasattr(module, "lists"):
        return schedule
    backward = torch.is_grad_enabled()
    lists = module.lists(q, k, v, schedule, dropout_p, deterministic, backward=backward)
    return schedule._replace(lists=lists)


def _prepare(
    q, k, v, mask, scale, dropout_p, seed, backend
) -> tuple[Tensor, Tensor, Tensor, Schedule | None, float, float, Tensor | None]:
    """Check everything, and bring the arguments into the form that `attend` takes."""
    _check_tensors(q, k, v)
    if backend != "auto" and backend not in NAMES:
        raise ValueError(f"backend is {backend!r}; choose one of {', '.join(('auto', *NAMES))}")
    scale = q.shape[-1] ** -0.5 if scale is None else float(scale)
    if not (math.isfinite(scale) and scale > 0):
        raise ValueError(
            f"scale is {scale}; it must be positive and finite (negate q for a negative scale)"
        )
    if not 0 <= dropout_p < 1:
        raise ValueError(f"dropout_p is {dropout_p}; it must lie in [0, 1)")
    q, k, v = (t if t.stride(-1) == 1 else t.contiguous() for t in (q, k, v))
    schedule = _schedule(mask, q, k)
    seed = _seed_tensor(seed, q.device) if dropout_p > 0 else None
    return q, k, v, schedule, scale, float(dropout_p), seed


def _autocast(*tensors: Any) -> Any:
    """What autocast does to the inputs of a matrix product: all but float64 take its dtype."""
    if torch.is_autocast_enabled("cpu") or torch.is_autocast_enabled("cuda"):
        return [_cast(t) for t in tensors]
    return tensors


def _cast(t: Any) -> Any:
    if not isinstance(t, Tensor) or t.device.type not in ("cpu", "cuda"):
        return t
    if t.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        return t
    enabled = torch.is_autocast_enabled(t.device.type)
    return t.to(torch.get_autocast_dtype(t.device.type)) if enabled else t


def _check_tensors(q: Tensor, k: Tensor, v: Tensor) -> None:
    for name, t in (("q", q), ("k", k), ("v", v)):
        if not isinstance(t, Tensor):
            raise ValueError(f"{name} is a {type(t).__name__}; pass a torch tensor")
        if t.ndim != 4:
            raise ValueError(
                f"{name} has shape {tuple(t.shape)}; it must be (batch, heads, length, head dim)"
            )
        if 0 in t.shape:
            raise ValueError(
                f"{name} has shape {tuple(t.shape)}, no elements; every extent must be at least 1"
            )
        if t.dtype != q.dtype or t.device != q.device:
            raise ValueError(
                f"q is {q.dtype} on {q.device}, {name} is {t.dtype} on {t.device};"
                " bring them to one dtype and device"
            )
    if q.device.type not in ("cpu", "cuda"):
        raise ValueError(f"q, k and v are on {q.device}; move them to cpu or cuda")
    if not q.dtype.is_floating_point or q.dtype.itemsize < 2:
        raise ValueError(
            f"q, k and v are {q.dtype}; cast them to bfloat16, float16, float32 or float64"
        )
    if k.shape[:3] != v.shape[:3]:
        raise ValueError(
            f"k has shape {tuple(k.shape)}, v {tuple(v.shape)}; all but the head dim must be equal"
        )
    if k.shape[0] != q.shape[0] or k.shape[3] != q.shape[3]:
        raise ValueError(
            f"q has shape {tuple(q.shape)}, k {tuple(k.shape)};"
            " batch and head dim must be those of q"
        )
    if q.shape[1] % k.shape[1]:
        raise ValueError(
            f"q has {q.shape[1]} heads, k and v {k.shape[1]};"
            " the first must be a multiple of the second"
        )


def _schedule(mask, q: Tensor, k: Tensor) -> Schedule | None:
    """The schedule of a mask; None for dense attention."""
    if mask is None:
        return None
    extents = (q.shape[2], k.shape[2], q.shape[0], q.shape[1])
    if isinstance(mask, Schedule):
        check_extents(mask, *extents)
        if mask.bits.device != q.device:
            raise ValueError(f"the plan is on {mask.bits.device}, q on {q.device}: plan from q")
        return mask
    if isinstance(mask, Tensor | np.ndarray) and torch.compiler.is_compiling():
        raise ValueError(
            f"mask is a {type(mask).__name__} inside torch.compile; build it outside with mask_from"
        )
    if isinstance(mask, Tensor):
        if mask.dtype != torch.bool:
            raise ValueError(f"mask is {mask.dtype}: give booleans, True where allowed")
        mask = mask.detach().cpu().numpy()
    if isinstance(mask, np.ndarray):
        mask = mask_from(mask)
    if not isinstance(mask, Mask | BlockMask | Selection):
        raise ValueError(
            f"mask is a {type(mask).__name__}; pass a masks.Mask, a masks.BlockMask, a bool array"
            " or None (masks.parse turns text into a Mask), or a selection of sparseflash.select"
        )
    if isinstance(mask, Selection):
        return schedule_from_selection(mask, *extents, q.device)
    if torch.compiler.is_compiling():
        # a graph belongs to one schedule: its key and these extents become guards
        n_q, n_k, batch, heads = (range(n).stop for n in extents)  # range() makes a length an int
        return from_tensors(*_compiled_schedule(mask.key, n_q, n_k, batch, heads, str(q.device)))
    return schedule_for(mask, *extents, q.device)


def _compiled_schedule(key: str, n_q: int, n_k: int, batch: int, heads: int, device: str):
    schedule: Schedule = schedule_for(find(key), n_q, n_k, batch, heads, device)
    tensors, ints = as_tensors(schedule)
    return tuple(tensors), tuple(ints)


# the mark of torch.compiler.assume_constant_result, which would import torch._dynamo and triton
vars(_compiled_schedule)["_dynamo_marked_constant"] = True


def _seed_tensor(seed: int | Tensor | None, device: torch.device) -> Tensor:
    if seed is None:
        return torch.randint(2**63 - 1, (1,), device=device)
    if isinstance(seed, Tensor):
        if seed.numel() != 1 or seed.dtype != torch.int64 or seed.device != device:
            raise ValueError(
                f"seed is a {seed.dtype} tensor of shape {tuple(seed.shape)} on {seed.device};"
                f" pass one int64 element on {device}, or an int"
            )
        return seed.reshape(1)
    if isinstance(seed, bool) or not isinstance(seed, int) or not 0 <= seed < 2**63:
        raise ValueError(f"seed is {seed!r}; pass an int in [0, 2**63), an int64 tensor or None")
    return torch.full((1,), seed, dtype=torch.int64, device=device)
