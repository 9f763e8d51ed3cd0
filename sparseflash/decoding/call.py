"""The public function `decode`: check the arguments, find the plan of the call, run it."""

from collections.abc import Sequence
from typing import Any, Literal, TypedDict, Unpack, overload

import torch
from torch import Tensor

from masks import BlockMask, Mask
from masks.spec import find
from sparseflash.backends import triton as portable
from sparseflash.backends.protocol import empty_out
from sparseflash.backends.registry import nothing
from sparseflash.cache import cache
from sparseflash.checks import check_tensors, check_transforms, is_empty
from sparseflash.decoding import cpu, triton
from sparseflash.decoding.pattern import AnyMask, Bounds, pattern_of
from sparseflash.dynamic.lengths import Lengths, check_lengths
from sparseflash.dynamic.lists import schedule_from_selection
from sparseflash.dynamic.selection import Selection
from sparseflash.operators.attention import plain, without_autocast
from sparseflash.problem import Options, Problem, describe, key_of
from sparseflash.request import options_of, refuse_unknown, remedy
from sparseflash.schedule.blocks import Schedule, as_tensors, from_tensors
from sparseflash.score.function import Bound, Score, bound, check_fit

torch.library.define(
    "sparseflash::decode",
    "(Tensor q, Tensor k, Tensor v, Tensor? lengths, Tensor? starts, Tensor? table, str mask,"
    " Tensor[]? schedule, SymInt[]? numbers, float? scale, int? splits, str backend, str score,"
    " Tensor[]? tables)"
    " -> (Tensor out, Tensor lse)",
)


class Keywords(TypedDict, total=False):
    """Arguments of `decode` that do not change what it returns."""

    lengths: Lengths | None
    starts: Lengths | None
    block_table: Tensor | None
    score: Score | Bound | None
    scale: float | None
    splits: int | None
    backend: str


@overload
def decode(
    q: Tensor, k: Tensor, v: Tensor, mask: AnyMask | Selection = None, *,
    return_lse: Literal[False] = False, **options: Unpack[Keywords],
) -> Tensor: ...  # fmt: skip
@overload
def decode(
    q: Tensor, k: Tensor, v: Tensor, mask: AnyMask | Selection = None, *,
    return_lse: Literal[True], **options: Unpack[Keywords],
) -> tuple[Tensor, Tensor]: ...  # fmt: skip
def decode(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: AnyMask | Selection = None,
    *,
    lengths: Lengths | None = None,
    starts: Lengths | None = None,
    block_table: Tensor | None = None,
    score: Score | Bound | None = None,
    scale: float | None = None,
    return_lse: bool = False,
    splits: int | None = None,
    backend: str = "auto",
    **unknown: Any,
) -> Tensor | tuple[Tensor, Tensor]:
    """Attention of the last few tokens of each sequence against its cache: (B, H_q, N_q, D_v).

    Made for 1 to 16 queries and long caches: the keys are split among the multiprocessors. It has
    no gradients. On a GPU nothing waits for the device, so a CUDA graph serves growing lengths. A
    query with nothing to attend to gives output 0 and LSE -inf.

    Args:
        q: (B, H_q, N_q, D), bfloat16, float16, float32 or float64 (CPU); H_q is a multiple of H_kv.
            Query i of sequence b is its token lengths[b] - N_q + i.
        k: (B, H_kv, N, D), with room for N keys; with a block_table (pages, page size, H_kv, D).
            Any strides but that of the head dim: pass a cache with heads before tokens transposed.
        v: likewise, with the head dim D_v.
        mask: None for all keys, or a `masks.Mask`, of which a query takes the row of its token in
            the mask of N x N. Pass `masks.causal()` where several new tokens see each other. A
            `masks.BlockMask`, a `select.Selection` or its `plan` may also have N_q rows, one for
            each query; its heads are 1, H_kv or H_q.
        lengths: (B,) ints, the keys of each sequence with its new ones; N where None. A tensor on a
            GPU is not read: values above N then mean N, and negative values 0.
        starts: (B,) ints likewise: keys before number starts[b] are not attended to and not read,
            as where sequences are padded on the left. Positions still count from 0.
        block_table: int32 (B, pages of a sequence): the page of its keys number page size * j and
            following is block_table[b, j]. N is the page size times the columns. Entries beyond the
            length are not read; the others are not checked, because that would wait for a GPU.
        score: from `sparseflash.score`, called with its tensors. It gets the numbers of tokens in
            their sequence, for the query too, and the length of the sequence as n_q and n_k.
        scale: of the scores; D ** -0.5 by default.
        return_lse: also return the natural logarithm of the softmax's denominator, (B, H_q, N_q)
            float32, or float64 like q.
        splits: parts that the keys of a sequence are split into on `triton`, 1 to 256; by default
            they follow from the device, the shapes and the mask.
        backend: "triton", "cpu", or "auto", which takes the first of them that can run the call.

    Raises:
        ValueError: inputs that do not fit together, a gradient that is asked for, or a backend that
            cannot run them.
    """
    if unknown:
        refuse_unknown("decode", unknown)
    names = "triton", "cpu"
    options = options_of(
        scale, 0.0, True, backend, score=score, names=names, return_lse=return_lse
    )  # fmt: skip
    if splits is not None and (type(splits) is not int or not 1 <= splits <= 256):
        raise ValueError(f"splits is {splits!r}; pass an int between 1 and 256, or None")
    check_no_gradient(q=q, k=k, v=v)
    n = check_cache(q, k, v, block_table)
    if lengths is not None:
        lengths = check_lengths(lengths, q.shape[0], n, q.device)
    if starts is not None:
        starts = check_lengths(starts, q.shape[0], n, q.device, "starts")
    if q.stride(-1) != 1:
        q = q.contiguous()
    if block_table is not None:
        k, v = k.transpose(1, 2), v.transpose(1, 2)
    empty = is_empty(q, k) or not n
    if isinstance(mask, Selection) and not empty:
        heads = k.shape[1] if mask.heads == k.shape[1] else q.shape[1]
        mask = schedule_from_selection(mask, q.shape[2], n, q.shape[0], heads, q.device)
    elif not isinstance(mask, Mask | BlockMask | Selection | Schedule | None):
        how = remedy(mask) or " (BlockMask.from_dense takes a bool array)"
        raise ValueError(
            f"mask is a {type(mask).__name__}; pass a masks.Mask, a masks.BlockMask, a selection of"
            f" sparseflash.select or None{how}"
        )
    mask = None if empty or isinstance(mask, Selection) else mask
    bounds = Bounds(lengths, starts, block_table)
    tables = ()
    if score is not None:
        score = bound(score)
        check_no_gradient(**dict(zip(score.score.names, score.tables, strict=True)))
        check_fit(score, q.device, (q.shape[0], q.shape[1], n, n))
        tables = tuple(t.contiguous() for t in score.tables)
    if plain(q, k, v):
        out, lse = _run(q, k, v, bounds, mask, options, splits, tables)
    else:
        if not torch.compiler.is_compiling():
            check_transforms(q, k, v)
        key = mask.key if isinstance(mask, Mask | BlockMask) else ""
        flat = as_tensors(mask) if isinstance(mask, Schedule) else (None, None)
        call = options.scale, splits, backend, options.score, tables or None
        out, lse = torch.ops.sparseflash.decode(q, k, v, *bounds, key, *flat, *call)
    return (out, lse) if return_lse else out


def _run(
    q: Tensor, k: Tensor, v: Tensor, bounds: Bounds, mask: AnyMask, options: Options,
    splits: int | None, tables: Sequence[Tensor],
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Return out and lse."""
    lengths, starts, table = bounds
    n = k.shape[2] * (1 if table is None else table.shape[1])
    if 0 in (q.shape[0], q.shape[2], n):
        return nothing(q, v)
    identity = mask.facts if isinstance(mask, Schedule) else None if mask is None else mask.key
    pages = None if table is None else (table.shape[1], table.stride(0))
    given = lengths is None, starts is None
    key = "decode", key_of(q, k, v, identity, options, False), pages, *given, splits
    step: cpu.Decode | triton.Decode | None = cache.get(key)
    if step is None:
        page = 0 if table is None else k.shape[2]
        step = _prepare(describe(q, k, v, identity, options, False), mask, n, page, splits)
        lists = step.pattern.schedule
        cache.put(key, step, as_tensors(lists)[0] if lists else ())
    dynamic = mask if isinstance(mask, Schedule) else None
    return without_autocast(step, q, k, v, bounds, dynamic, tables)[:2]


def _prepare(
    problem: Problem, mask: AnyMask, n: int, page: int, splits: int | None
) -> cpu.Decode | triton.Decode:
    """Return what steps of one layout share; page: tokens of a page, or 0."""
    why_not = {
        "triton": portable.unsupported(problem, "forward"),
        "cpu": None if problem.device.type == "cpu" else f"it runs on a CPU, not {problem.device}",
    }
    backend = problem.options.backend
    wanted = why_not if backend == "auto" else [backend]
    chosen = next((name for name in wanted if why_not[name] is None), None)
    if chosen is None:
        reasons = "; ".join(f"backend {name!r} cannot decode: {why_not[name]}" for name in wanted)
        raise ValueError(reasons)
    pattern = pattern_of(mask, problem, n)
    if chosen == "cpu":
        return cpu.Decode(problem, pattern, n)
    return triton.Decode(problem, pattern, n, page, splits)


@torch.library.impl("sparseflash::decode", ("CPU", "CUDA"))
def _decode(q, k, v, lengths, starts, table, mask, schedule, numbers, *call):
    given = from_tensors(schedule, numbers) if schedule else find(mask) if mask else None
    scale, splits, backend, score, tables = call
    options = Options(scale, 0.0, True, backend, score)
    return _run(q, k, v, Bounds(lengths, starts, table), given, options, splits, tables or ())


@torch.library.register_fake("sparseflash::decode")
def _decode_fake(q, k, v, *call):
    lse = q.new_empty(q.shape[:3], dtype=torch.promote_types(q.dtype, torch.float32))
    return empty_out(q, v), lse


def check_cache(q: Any, k: Any, v: Any, table: Any) -> int:
    """Return the keys that a sequence has room for; table: the block table, or None.

    Raises ValueError for tensors that do not fit together. What a table holds is not read.
    """
    if table is None:
        check_tensors(q, k, v)
    else:
        _check_pages(q, k, v, table)
    for name, t in (("k", k), ("v", v)):
        if t.stride(-1) != 1:
            raise ValueError(
                f"{name} has strides {t.stride()}; the elements of a head must lie side by side,"
                " and a cache is not copied: allocate it so"
            )
    return k.shape[2] if table is None else table.shape[1] * k.shape[1]


def _check_pages(q: Any, k: Any, v: Any, table: Any) -> None:
    for name, t in (("k", k), ("v", v)):
        if isinstance(t, Tensor) and (t.ndim != 4 or 0 in t.shape):
            raise ValueError(
                f"{name} has shape {tuple(t.shape)}; with a block_table it must be"
                " (pages, page size, heads, head dim), every extent at least 1"
            )
    whole = isinstance(k, Tensor) and isinstance(v, Tensor) and isinstance(q, Tensor)
    if whole and k.shape[:3] != v.shape[:3]:
        raise ValueError(
            f"k has shape {tuple(k.shape)}, v {tuple(v.shape)}; all but the head dim must be equal"
        )
    if whole and q.ndim == 4:
        if q.shape[1] % k.shape[2]:
            raise ValueError(
                f"k has shape {tuple(k.shape)}, with a block_table {k.shape[2]} heads, and q"
                f" {q.shape[1]}, not a multiple of that: pass a cache of (pages, page size, heads,"
                " head dim), or no block_table for one of (batch, heads, length, head dim)"
            )
        # one page, as if it were the cache of every sequence
        k, v = (t[:1].transpose(1, 2).expand(q.shape[0], -1, -1, -1) for t in (k, v))
    check_tensors(q, k, v)
    fits = isinstance(table, Tensor) and table.ndim == 2 and table.dtype == torch.int32
    if not fits or table.shape[0] != q.shape[0]:
        shown = type(table).__name__
        if isinstance(table, Tensor):
            shown = f"{table.dtype} of shape {tuple(table.shape)}"
        raise ValueError(
            f"block_table is {shown}; pass an int32 tensor ({q.shape[0]}, pages of a sequence)"
        )
    if table.device != q.device or table.stride(1) != 1:
        raise ValueError(
            f"block_table is on {table.device} with strides {table.stride()}, q on {q.device};"
            " bring it there, its columns side by side"
        )


def check_no_gradient(**tensors: Any) -> None:
    """Raise ValueError where a gradient of one of them may be asked for."""
    for name, t in tensors.items():
        if torch.is_grad_enabled() and isinstance(t, Tensor) and t.requires_grad:
            raise ValueError(
                f"{name} requires a gradient, and decode has none: call it under torch.no_grad(),"
                " or take sparseflash.attention"
            )
