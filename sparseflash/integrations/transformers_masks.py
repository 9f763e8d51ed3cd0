"""Masks of `transformers` as expressions.

transformers describes a mask by nested functions of token numbers. The ones that it makes itself
are read: their names and the values that they hold say which mask they are. All others are
evaluated for every pair of tokens, as `sdpa` does.
"""

from collections.abc import Callable
from importlib.metadata import version
from typing import Any

import numpy as np
from torch import Tensor
from transformers.masking_utils import causal_mask_function, sdpa_mask

import masks
from masks import Mask, mask_from
from masks.checks import FAR
from sparseflash.integrations.tensors import between_real, join, to_real

FOUND = version("transformers")
if tuple(map(int, FOUND.split(".")[:2])) < (5, 23):
    raise ImportError(f"transformers is {FOUND}")

Rows = list[list[int]]  # lengths of the documents of every batch entry


def make_mask(
    chosen: Mask | None,
    *,
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int = 0,
    kv_offset: int = 0,
    mask_function: Callable[..., Any] = causal_mask_function,
    attention_mask: Tensor | None = None,
    **options: Any,
) -> Mask:
    """The mask of q_length queries and kv_length keys that a model asks for, joined to `chosen`.

    Args:
        chosen: the user's mask, of the whole sequence.
        q_offset, kv_offset: number of the first query and of the first key: what comes before is in
            the cache, or has left it.
        mask_function: (batch, head, query, key) -> bool.
        attention_mask: (batch, tokens), True or 1 for tokens that are no padding.

    Raises:
        ValueError: a static cache, a mask of the user between two sequences, or an attention_mask
            of another shape.
    """
    ids, function = _packed(mask_function)
    own = _read(function)
    ends = q_offset + q_length, kv_offset + kv_length
    if isinstance(q_offset, Tensor) or (ends[0] != ends[1] and own != masks.dense()):
        raise ValueError(
            f"there are {int(ends[0])} queries and {ends[1]} keys, as with a static cache: take the"
            " dynamic cache, without cache_implementation='static'"
        )
    if chosen is not None and ends[0] != ends[1]:
        raise ValueError(
            f"there are {ends[0]} queries and {ends[1]} keys, and the mask {chosen} is for as many"
            " of both: take use(model) without a mask"
        )
    real = None if attention_mask is None else _real(attention_mask, ends[1])
    mask = join(own, chosen)
    if mask is not None:
        if real is not None:
            mask = to_real(real, ends[0]) if mask == masks.dense() else between_real(mask, real)
        elif ids is not None:
            mask = mask >> masks.packed(_lengths(ids))
        if q_offset or kv_offset:
            mask = mask >> masks.shift(-q_offset, -kv_offset)
    if own is None:
        options |= {"allow_is_causal_skip": False, "allow_is_bidirectional_skip": False}
        sizes = (batch_size, q_length, kv_length, q_offset, kv_offset)
        pairs = sdpa_mask(*sizes, mask_function, attention_mask, **options)
        assert pairs is not None
        mask = join(mask, mask_from(pairs.cpu().numpy()))
    assert mask is not None
    return mask


def _read(function: Callable[..., Any]) -> Mask | None:
    """The mask of a function of transformers; None for any other function."""
    values = _values(function)
    match _name(function):
        case "causal_mask_function":
            return masks.causal()
        case "bidirectional_mask_function":
            return masks.dense()
        case "sliding_window_overlay":
            return masks.local(values["sliding_window"] - 1, FAR)
        case "sliding_window_bidirectional_overlay":
            return masks.local(values["sliding_window"])
        case "chunked_overlay":  # its chunks begin after the padding, as positions do here
            return masks.block_diagonal(values["chunk_size"])
        case "and_masks":
            parts = [_read(part) for part in values["mask_functions"]]
            return None if any(part is None for part in parts) else join(*parts)
    return None


_PACKED = dict.fromkeys(("packed_sequence_mask_function", "remap_positions_for_packed_sequence"))


def _packed(function: Callable[..., Any]) -> tuple[Tensor | None, Callable[..., Any]]:
    """Numbers of the documents that are packed into a sequence, (batch, tokens) ascending, and the
    function within a document; None and the function itself where none are."""
    if _name(function) == "and_masks":
        parts = {_name(part): _values(part) for part in _values(function)["mask_functions"]}
        if parts.keys() == _PACKED.keys():  # in the order of the version of transformers
            ids, within = (parts[name] for name in _PACKED)
            return ids["packed_sequence_mask"], within["mask_function"]
    return None, function


def _name(function: Callable[..., Any]) -> str:
    """The function of transformers that made this one, or that it is; else ""."""
    if getattr(function, "__module__", "") != sdpa_mask.__module__:
        return ""
    return getattr(function, "__qualname__", "").partition(".")[0]


def _values(function: Callable[..., Any]) -> dict[str, Any]:
    """What an inner function took along."""
    names = getattr(getattr(function, "__code__", None), "co_freevars", ())
    cells = getattr(function, "__closure__", None) or ()
    return {name: cell.cell_contents for name, cell in zip(names, cells, strict=True)}


def _lengths(ids: Tensor) -> Rows:
    rows = ids.cpu().numpy()
    return [np.bincount(row - row[0]).tolist() for row in rows]


def _real(attention_mask: Tensor, tokens: int) -> np.ndarray | None:
    """Bool (batch, tokens): False for padding; None where there is none."""
    if attention_mask.ndim != 2:
        raise ValueError(
            f"attention_mask has shape {tuple(attention_mask.shape)}; pass (batch, tokens), or"
            " (batch, 1 or heads, queries, keys)"
        )
    given = attention_mask[:, :tokens].bool().cpu().numpy()
    real = np.pad(given, ((0, 0), (0, tokens - given.shape[1])))
    return None if real.all() else real
