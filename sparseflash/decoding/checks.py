"""The checks of `decode`. Every error names the argument, its value and the remedy."""

from typing import Any

import torch
from torch import Tensor

from sparseflash.checks import check_tensors


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


def check_no_gradient(*tensors: Any) -> None:
    """Raise ValueError where a gradient of q, k or v may be asked for."""
    for name, t in zip("qkv", tensors, strict=True):
        if torch.is_grad_enabled() and isinstance(t, Tensor) and t.requires_grad:
            raise ValueError(
                f"{name} requires a gradient, and decode has none: call it under torch.no_grad(),"
                " or take sparseflash.attention"
            )


def check_splits(splits: Any) -> None:
    """Raise ValueError for `splits` that are not an int between 1 and 256."""
    if splits is not None and (type(splits) is not int or not 1 <= splits <= 256):
        raise ValueError(f"splits is {splits!r}; pass an int between 1 and 256, or None")
