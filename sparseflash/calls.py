"""Eager calls that come again: what the first one checked, chose and made, found by a key.

A key holds all that this followed from. Calls that are rare, or that more than autograd looks on,
have none and take the ordinary way every time; so does a bad call, which is never remembered.
"""

from typing import Any

from masks import BlockMask, Mask
from sparseflash import ops
from sparseflash.ops import Call
from sparseflash.schedule import Cache, as_tensors

_NUMBERS = (float, int)
known: Cache[Call] = Cache(max_count=256, max_bytes=2**28)


def key_of(
    q: Any, k: Any, v: Any, mask: Any, scale: Any, dropout_p: Any, deterministic: bool, backend: Any
) -> tuple[Any, ...] | None:
    """What a call without dropout follows from but for the contents of its tensors, or None."""
    if dropout_p or not ops.only_autograd_looks_on(q, k, v):
        return None
    if mask is None:
        name = None
    elif isinstance(mask, Mask | BlockMask):
        name = type(mask), mask.key
    else:
        return None
    if type(dropout_p) not in _NUMBERS or type(backend) is not str:
        return None
    if scale is not None and type(scale) not in _NUMBERS:  # a tensor may change
        return None
    if (q.data_ptr() | k.data_ptr() | v.data_ptr()) & 15:
        return None
    return (
        q.stride(), k.stride(), v.stride(), q.shape, k.shape, v.shape, q.dtype, k.dtype, v.dtype,
        q.device, k.device, v.device, name, scale, deterministic, backend,
    )  # fmt: skip


def remember(key: tuple[Any, ...], call: Call) -> None:
    if any(strides[-1] != 1 for strides in key[:3]):  # it was made for copies of these inputs
        return
    tensors = [] if call.schedule is None else as_tensors(call.schedule)[0]
    known.put(key, call, size=sum(t.nbytes for t in tensors))
