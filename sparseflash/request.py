"""How a call enters: its options, and its arguments in the forms that a plan takes.

`attention`, `plan`, `explain` and `decode` begin with `options_of`. A call whose plan is not known
becomes a `Request`, whether it is eager, compiled, transformed, planned or explained.
"""

import inspect
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from masks import BlockMask, Mask, mask_from, parse
from masks.transforms.base import Transform
from sparseflash.backends.protocol import NO_TERMS, TermTensors
from sparseflash.backends.registry import NAMES
from sparseflash.checks import (
    check_extents,
    check_options,
    check_tensors,
    check_transforms,
    is_empty,
    is_wrapped,
    without_gradients,
)
from sparseflash.dynamic.lists import schedule_from_selection
from sparseflash.dynamic.selection import Selection
from sparseflash.picks.picks import Picks
from sparseflash.problem import Options
from sparseflash.schedule.blocks import Schedule
from sparseflash.score.function import bound, check_fit
from sparseflash.select.base import Selector

REMEDIES = {  # what other functions call it: what to write here
    "attn_mask": "pass mask=, a masks.Mask or a bool tensor, True where allowed",
    "is_causal": "pass mask=masks.causal()",
    "causal": 'pass mask=masks.causal(), or masks.causal(align="bottom_right") for flash_attn\'s',
    "window_size": 'pass mask=masks.local(left, right), or with align="bottom_right" flash_attn\'s',
    "block_mask": "pass mask=masks.interop.from_flex(block_mask)",
    "key_padding_mask": "pass lengths=, the number of keys of each sequence",
    "cache_seqlens": "pass lengths=",
    "page_table": "pass block_table=",
    "cu_seqlens": "pass mask=sparseflash.packed.documents(cu_seqlens, n)",
    "enable_gqa": "leave it out: k and v may have fewer heads than q",
    "softmax_scale": "pass scale=",
    "dropout": "pass dropout_p=",
    "softcap": "pass score=sparseflash.score_rules.softcap(cap)",
    "alibi_slopes": "pass score=sparseflash.score_rules.alibi(slopes=...)",
    "score_mod": "pass score=sparseflash.score(fn)",
    "s_aux": "pass sink=",
    "return_softmax_lse": "pass return_lse=True",
    "embed_dim": "pass dim=",
    "num_heads": "pass heads=",
    "batch_first": "leave it out: x is (batch, N, dim)",
}
SAME = {
    "attention_mask": "attn_mask", "sm_scale": "softmax_scale", "dropout_prob": "dropout",
    "return_attn_probs": "return_softmax_lse", "cu_seqlens_q": "cu_seqlens",
    "cu_seqlens_k": "cu_seqlens", "block_tables": "page_table", "num_kv_heads": "num_heads",
}  # fmt: skip

ABSENT = {
    "decode": ("sink", "dropout_p"),
    "BlockSparseAttention": ("sink", "scale", "return_lse"),
}  # fmt: skip


def refuse_unknown(function: str, given: dict[str, Any]) -> None:
    """Raise TypeError for arguments that a function does not have, with the remedy if known."""
    for name, value in given.items():
        shown = type(value).__name__ if isinstance(value, Tensor) else repr(value)
        text = f"{function}() has no argument {name}, which is {shown[:60]}"
        own = f"pass {name}=" if name in ("sink", "score") else None
        how = REMEDIES.get(SAME.get(name, name), own)
        if how and any(f"pass {other}=" in how for other in ABSENT.get(function, ())):
            how = "take sparseflash.attention, which has it"
        raise TypeError(f"{text}: {how}" if how else f"{text}; see help(sparseflash.{function})")


def options_of(
    scale: Any,
    dropout_p: Any,
    deterministic: Any,
    backend: Any,
    *,
    score: Any = None,
    max_scores: Any = False,
    names: tuple[str, ...] = NAMES,
    **flags: Any,
) -> Options:
    """Return the options of a call; ValueError for a wrong type or value.

    names: the backends to choose from; flags: further booleans that are checked.
    """
    flags["deterministic"], flags["return_max_scores"] = deterministic, max_scores
    check_options(scale, dropout_p, backend, names, flags)
    if scale is not None and type(scale) is not float:
        scale = float(scale)
    deterministic = deterministic or torch.are_deterministic_algorithms_enabled()
    key = "" if score is None else bound(score).key()
    return Options(scale, dropout_p, deterministic, backend, key, False, max_scores)


def term_tensors(sink: Any, score: Any, q: Tensor, k: Tensor, v: Tensor) -> TermTensors:
    """Return the sink of a call in float32, or float64 like q, and the tables of its score.

    Raises ValueError for those that do not fit q and k.
    """
    check_tensors(q, k, v)
    tables = ()
    if score is not None:
        score = bound(score)
        check_fit(score, q.device, (q.shape[0], q.shape[1], q.shape[2], k.shape[2]))
        tables = tuple(t.contiguous() for t in score.tables)
    if sink is None:
        return TermTensors(None, tables)
    if not isinstance(sink, Tensor) or not sink.is_floating_point():
        kind = sink.dtype if isinstance(sink, Tensor) else type(sink).__name__
        raise ValueError(f"sink is {kind}; pass a tensor of floating-point numbers")
    if tuple(sink.shape) != (heads := q.shape[1:2]):
        raise ValueError(f"sink has shape {tuple(sink.shape)}; it must be {tuple(heads)}")
    if sink.device != q.device:
        raise ValueError(f"sink is on {sink.device}, q on {q.device}; move it there")
    return TermTensors(sink.to(torch.promote_types(q.dtype, torch.float32)).contiguous(), tables)


class Request(NamedTuple):
    """A call whose arguments are checked, in the forms that a plan takes.

    Neither a mask nor a schedule means dense attention, or nothing to attend to.
    """

    q: Tensor  # the elements of the head dim lie side by side, as in k and v
    k: Tensor
    v: Tensor
    mask: Mask | BlockMask | None
    schedule: Schedule | None  # of a selection, or a plan
    options: Options
    terms: TermTensors
    needs_grad: bool


def request_of(
    q: Any,
    k: Any,
    v: Any,
    mask: Any,
    options: Options,
    terms: TermTensors = NO_TERMS,
    *,
    needs_grad: bool | None = None,
) -> Request:
    """Return the checked call; ValueError for arguments that do not fit together.

    needs_grad: whether a backward is prepared; by default where a gradient may be asked for.
    """
    check_tensors(q, k, v)
    compiling = torch.compiler.is_compiling()
    if not compiling:
        check_transforms(q, k, v, *(t for t in terms.flat if t is not None))
    if needs_grad is None:
        needs_grad = wants_grad(q, k, v, terms)
    q, k, v = contiguous(q, k, v)
    mask = unless_empty(mask, q, k)
    if compiling and isinstance(mask, np.ndarray | Tensor):
        raise ValueError(
            f"mask is a {type(mask).__name__} inside torch.compile; build it outside with mask_from"
        )
    mask = as_mask(mask)
    schedule = schedule_of(mask, q, k)
    return Request(
        q, k, v, mask if schedule is None else None, schedule, options, terms, needs_grad
    )


def wants_grad(q: Tensor, k: Tensor, v: Tensor, terms: TermTensors) -> bool:
    if not torch.is_grad_enabled():
        return False
    if q.requires_grad or k.requires_grad or v.requires_grad:
        return True
    return terms is not NO_TERMS and any(t.requires_grad for t in terms.flat if t is not None)


def extents_of(q: Tensor, k: Tensor) -> tuple[int, int, int, int]:
    """n_q, n_k, batch, heads."""
    return q.shape[2], k.shape[2], q.shape[0], q.shape[1]


def contiguous(*tensors: Tensor) -> list[Tensor]:
    """Return the tensors, with elements of the head dim side by side."""
    return [t if t.stride(-1) == 1 else t.contiguous() for t in tensors]


def autocast(*tensors: Any) -> Any:
    """Return the inputs as autocast casts them: all but float64 take its dtype."""
    return [_cast(t) for t in tensors] if torch._C._is_any_autocast_enabled() else tensors


def _cast(t: Any) -> Any:
    if not isinstance(t, Tensor) or t.device.type not in ("cpu", "cuda"):
        return t
    if t.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        return t
    enabled = torch.is_autocast_enabled(t.device.type)
    return t.to(torch.get_autocast_dtype(t.device.type)) if enabled else t


def as_mask(mask: Any) -> Mask | BlockMask | Selection | Schedule | None:
    """Return the mask, that of a bool array made of it; ValueError for anything else."""
    if isinstance(mask, Tensor):
        if mask.dtype != torch.bool:
            how = " (mask == 0 where 0 allows and -inf hides)" if mask.is_floating_point() else ""
            raise ValueError(f"mask is {mask.dtype}: give booleans, True where allowed{how}")
        if not torch.compiler.is_compiling():
            mask = without_gradients(mask)
            if is_wrapped(mask):
                raise ValueError(
                    "mask is a tensor that torch.func or torch.vmap maps over, which has no values;"
                    " put the masks into the batch of one call, (B, 1, N_q, N_k)"
                )
        with torch._C._DisableFuncTorch():  # pyright: ignore[reportAttributeAccessIssue]
            mask = mask.detach().cpu().numpy()
    if isinstance(mask, np.ndarray):
        return mask_from(mask)
    if isinstance(mask, Mask | BlockMask | Selection | Schedule | None):
        return mask
    if isinstance(mask, Picks):
        raise ValueError("picks have no plan: pass them to attention, or plan picks.selection(H)")
    raise ValueError(
        f"mask is a {type(mask).__name__}; pass a masks.Mask, a masks.BlockMask, a bool array"
        f" or None, or a selection of sparseflash.select{remedy(mask)}"
    )


def as_mask_or_selector(mask: Any) -> Mask | BlockMask | Selector | None:
    """Return the mask of a module, which has it before q and k: `as_mask`, and of a text or a
    selector.
    """
    if isinstance(mask, str):
        return parse(mask)
    if isinstance(mask, Selector | Mask | BlockMask | None):
        return mask
    if isinstance(mask, np.ndarray | Tensor):
        return as_mask(mask)  # pyright: ignore[reportReturnType]
    raise ValueError(
        f"mask is a {type(mask).__name__}; pass a masks.Mask, its text, a masks.BlockMask, a bool"
        f" array, a selector of sparseflash.select or None{remedy(mask)}"
    )


def remedy(mask: Any) -> str:
    """Return how to make a mask of an object that is not one, as the end of an error."""
    if isinstance(mask, bool):
        return " (masks.causal() is the mask that is_causal=True means)"
    if isinstance(mask, str):
        return " (masks.parse turns text into a Mask)"
    if isinstance(mask, Selector):
        return " (the selector makes one of q and k: selector(q, k))"
    if type(mask).__module__ == "torch.nn.attention.flex_attention":
        return " (masks.interop.from_flex converts torch's BlockMask)"
    if isinstance(mask, Transform):
        return " (it makes one mask of another: mask >> transform)"
    ours = ("masks.", "sparseflash.select.")
    if inspect.isfunction(mask) and mask.__module__.startswith(ours):  # of a pattern, a selector
        return f" (call it: {mask.__name__}(...))"
    if callable(mask):
        return " (masks.where turns a function of q and k into a Mask)"
    if isinstance(mask, list | tuple) and mask and all(isinstance(m, Mask) for m in mask):
        return " (masks.heads makes one mask of those of the heads)"
    if isinstance(mask, list | tuple):
        return " (np.array makes an array of lists)"
    return ""


def unless_empty(mask: Any, q: Tensor, k: Tensor) -> Any:
    """Return the mask, or None if q and k leave nothing to compute; ValueError if it misfits."""
    if not is_empty(q, k):
        return mask
    if isinstance(mask, np.ndarray | Tensor):
        shape, wanted = tuple(mask.shape), (*q.shape[:3], k.shape[2])
        outer = zip(shape[-3::-1], wanted[1::-1], strict=False)
        if shape[-2:] != wanted[2:] or len(shape) > 4 or any(m not in (1, n) for m, n in outer):
            raise ValueError(f"mask has shape {shape}; it must broadcast to {wanted}")
    elif isinstance(as_mask(mask), BlockMask | Selection | Schedule):
        check_extents(mask, *extents_of(q, k), k.shape[1])
    return None


def schedule_of(mask: Any, q: Tensor, k: Tensor) -> Schedule | None:
    """Return the schedule of a selection or of its plan; None for other masks."""
    if isinstance(mask, Selection):
        return schedule_from_selection(mask, *extents_of(q, k), q.device, k.shape[1])
    if not isinstance(mask, Schedule):
        return None
    check_extents(mask, *extents_of(q, k))
    if mask.bits.device != q.device:
        raise ValueError(f"the plan is on {mask.bits.device}, q on {q.device}: plan from q")
    return mask
