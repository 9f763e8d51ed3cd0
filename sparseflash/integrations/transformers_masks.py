"""Masks of `transformers` as expressions.

transformers describes a mask by nested functions of token numbers. The ones that it makes itself
are read: their names and the values that they hold say which mask they are. All others are
evaluated for every pair of tokens, as `sdpa` does.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from importlib.metadata import version
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only
from transformers.masking_utils import causal_mask_function, sdpa_mask

import masks
from masks import Mask, mask_from
from masks.checks import FAR
from sparseflash.integrations import FORBIDS, between_real, join, to_real

FOUND = version("transformers")
if tuple(map(int, FOUND.split(".")[:2])) < (5, 23):
    raise ImportError(f"transformers is {FOUND}")

Rows = list[list[int]]  # lengths of the documents of every batch entry


@dataclass
class Asked:
    """The mask that a model asks for.

    Attributes:
        own: the mask of the model within a document, or None where only `pairs` has it.
        real: bool (batch, tokens), False for padding, or None where there is none.
        documents: of a packed sequence, or None.
        q_offset, kv_offset: number of the first query and of the first key: what comes before is in
            the cache, or has left it.
        n_q, n_k: queries and keys.
        used: keys that a query may see, the first ones. The others are the end of a static cache.
        pairs: returns the mask of the model as bool (batch, 1, n_q, n_k).
    """

    own: Mask | None
    real: np.ndarray | None
    documents: Rows | None
    q_offset: int
    kv_offset: int
    n_q: int
    n_k: int
    used: int
    pairs: Callable[[], Tensor]
    made: dict[Any, Mask] = field(default_factory=dict)

    def mask(self, chosen: Mask | None = None, documents: Rows | None = None) -> Mask:
        """Return the mask of n_q queries and the used keys, joined to `chosen`.

        Args:
            chosen: a mask of the user, of the whole sequence.
            documents: those of the call, which count more than those of the model.

        Raises:
            ValueError: `chosen` between two sequences, or documents besides padding.
        """
        key = chosen, documents and tuple(map(tuple, documents))
        if key not in self.made:
            self.made[key] = self._make(chosen, documents)
        return self.made[key]

    def _make(self, chosen: Mask | None, documents: Rows | None) -> Mask:
        n_q, n_k = self.q_offset + self.n_q, self.kv_offset + self.used
        if chosen is not None and n_q != n_k:
            raise ValueError(two_lengths(n_q, n_k, chosen))
        if documents is not None and self.real is not None:
            raise ValueError("cu_seq_lens_q is given beside padding: pass one of them")
        mask, packing = join(self.own, chosen), documents or self.documents
        if mask is None and documents is not None:
            mask = masks.dense()
        if mask is not None:
            if self.real is not None:
                dense = mask == masks.dense()
                mask = to_real(self.real, n_q) if dense else between_real(mask, self.real)
            elif packing is not None:
                mask = mask >> masks.packed(packing)
            if self.q_offset or self.kv_offset:
                mask = mask >> masks.shift(-self.q_offset, -self.kv_offset)
        pairs = mask_from(self.pairs().cpu().numpy()) if self.own is None else None
        mask = join(mask, pairs)
        assert mask is not None
        return mask

    def part(self, dim: int, start: int, end: int) -> "Asked":
        """Return the mask of the queries (dim 2) or keys (dim 3) from `start` to `end`."""

        def pairs() -> Tensor:
            return self.pairs().narrow(dim, start, end - start)

        if dim == 2:
            at = {"q_offset": self.q_offset + start, "n_q": end - start}
        else:
            used = max(min(self.used, end) - start, 1)
            at = {"kv_offset": self.kv_offset + start, "n_k": end - start, "used": used}
        return replace(self, **at, pairs=pairs, made={})


def two_lengths(n_q: int, n_k: int, chosen: Mask) -> str:
    """Return the error of a mask of the user between sequences of two lengths."""
    return (
        f"there are {n_q} queries and {n_k} keys, and the mask {chosen} is for as many of both:"
        " take use(model) without a mask"
    )


class ModelMask(Tensor):
    """What a model gets for a mask: (batch, 1, n_q, n_k), without values until they are needed.

    A range of queries or keys is as light, and so are booleans, True for what is hidden, and the
    sum with a bias. For any other operation it has the values of `eager` attention, 0 and the
    lowest number; beside a mask of the user, which has none, it is an error.
    """

    asked: Asked
    chosen: Mask | None
    bias: Tensor | None  # with its gradient, (batch, heads, n_q, n_k) with extents of 1

    @staticmethod
    def __new__(
        cls, asked: Asked, chosen: Any, batch: int, dtype: Any, device: Any, bias: Any = None
    ) -> "ModelMask":
        shape = torch.Size((batch, 1, asked.n_q, asked.n_k))
        shape = shape if bias is None else torch.broadcast_shapes(shape, bias.shape)
        made = torch.Tensor._make_wrapper_subclass(cls, shape, dtype=dtype, device=device)
        made.asked, made.chosen, made.bias = asked, chosen, bias
        return made

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        return f"ModelMask{tuple(self.shape)}"

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        if not kwargs and (func in _SUMS or (func in _FILLS and args[2] <= FORBIDS)):
            mask, bias = args[:2] if isinstance(args[0], ModelMask) else args[1::-1]
            fits = isinstance(mask, ModelMask) and (mask.dtype == torch.bool) == (func in _FILLS)
            if fits and isinstance(bias, Tensor) and type(bias) is not cls and bias.ndim == 4:
                bias = bias if mask.bias is None else bias + mask.bias
                return cls(mask.asked, mask.chosen, mask.shape[0], bias.dtype, mask.device, bias)
        given = args, kwargs or {}
        if func not in _ABOUT:
            given = tree_map_only(ModelMask, lambda mask: mask._without_bias(func), given)
        with torch._C.DisableTorchFunctionSubclass():
            return func(*given[0], **given[1])

    @classmethod
    def __torch_dispatch__(
        cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if isinstance(mine := args[0], ModelMask):
            asked, kind = mine.asked, func.overloadpacket
            dtype, device = (kwargs.get(name) or getattr(mine, name) for name in _KIND)
            same = kind in (_aten.detach, _aten.alias, _aten.clone)
            if kind is _aten.slice:
                sliced: tuple[Any, ...] = (*args[1:], *(0, None, None, 1)[len(args) - 1 :])
                dim, *bounds, step = sliced
                start, end, _ = slice(*bounds).indices(mine.shape[dim])
                if same := dim in (2, 3) and step == 1 and start < end:
                    asked = asked.part(dim, start, end)
            elif mine.dtype.is_floating_point:
                if kind is _aten.lt and args[1] == -1:  # what is hidden, as Falcon asks for it
                    same, dtype = True, torch.bool
                elif kind is _aten._to_copy:
                    same = dtype.is_floating_point or dtype == torch.bool
            if same:
                return cls(asked, mine.chosen, len(mine), dtype, device)
        given = tree_map_only(ModelMask, lambda mask: mask._values(func), (args, kwargs))
        return func(*given[0], **given[1])

    def _without_bias(self, operation: Any) -> Tensor:
        if self.bias is None:
            return self
        low = torch.finfo(self.dtype).min
        return self.bias.masked_fill(self._values(operation) != 0, low)

    def _values(self, operation: Any) -> Tensor:
        if self.chosen is not None:
            raise ValueError(
                f"the model computes {operation} of its mask {tuple(self.shape)}, to which"
                f" {self.chosen} is joined: call use(model), without a mask if it had one"
            )
        pairs = self.asked.pairs()
        if self.dtype == torch.bool:
            return ~pairs.expand(len(self), -1, -1, -1).to(self.device)
        nothing = torch.zeros((), dtype=self.dtype, device=pairs.device)
        values = torch.where(pairs, nothing, torch.finfo(self.dtype).min)
        return values.expand(self.shape).to(self.device)


_KIND = "dtype", "device"
_ABOUT = {getattr(Tensor, name).__get__ for name in (*_KIND, "shape", "ndim", "requires_grad")}
_SUMS = torch.add, Tensor.add, Tensor.__add__, Tensor.__radd__
_FILLS = torch.masked_fill, Tensor.masked_fill
_aten: Any = torch.ops.aten


def make_mask(
    chosen: Mask | None,
    *,
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | Tensor = 0,
    kv_offset: int = 0,
    mask_function: Callable[..., Any] = causal_mask_function,
    attention_mask: Tensor | None = None,
    dtype: torch.dtype = torch.float32,
    device: Any = "cpu",
    **options: Any,
) -> ModelMask:
    """Return the mask of q_length queries and kv_length keys that a model asks for.

    Args:
        chosen: the user's mask, which attention joins to it.
        q_offset, kv_offset: number of the first query and of the first key: what comes before is in
            the cache, or has left it. A static cache gives a tensor, and has room for more keys.
        mask_function: (batch, head, query, key) -> bool.
        attention_mask: (batch, tokens), True or 1 for tokens that are no padding.

    Raises:
        ValueError: an attention_mask of another shape.
    """
    ids, function = _packed(mask_function)
    own, first = _read(function), int(q_offset)
    n_q, n_k = first + q_length, kv_offset + kv_length
    if own is not None and _causal(function):
        n_k = min(n_k, n_q)
    real = None if attention_mask is None else _real(attention_mask, n_k)
    documents = None if ids is None else _lengths(ids)
    options |= {"allow_is_causal_skip": False, "allow_is_bidirectional_skip": False}
    sizes = batch_size, q_length, kv_length, first, kv_offset

    @cache
    def pairs() -> Tensor:
        made = sdpa_mask(*sizes, mask_function, attention_mask, device=device, **options)
        assert made is not None
        return made

    if own is None:
        pairs()  # here, since __torch_dispatch__ has no vmap
    offsets = first, kv_offset, q_length, kv_length, n_k - kv_offset
    asked = Asked(own, real, documents, *offsets, pairs)
    return ModelMask(asked, chosen, batch_size, dtype, device)


def _read(function: Callable[..., Any]) -> Mask | None:
    """Return the mask of a function of transformers; None for any other function."""
    values = _values(function)
    match _name(function):
        case "causal_mask_function":
            return masks.causal()
        case "bidirectional_mask_function":
            return masks.dense()
        case "sliding_window_overlay":
            width = values["sliding_window"]  # 0 for layers that Qwen2-MoE does not have
            return masks.local(width - 1, FAR) if width > 0 else ~masks.dense()
        case "sliding_window_bidirectional_overlay":
            return masks.local(values["sliding_window"])
        case "chunked_overlay":  # its chunks begin after the padding, as positions do here
            return masks.block_diagonal(values["chunk_size"])
        case "and_masks":
            parts = [_read(part) for part in values["mask_functions"]]
            return None if any(part is None for part in parts) else join(*parts)
    return None


def _causal(function: Callable[..., Any]) -> bool:
    """Return whether a function that `_read` knows lets no query see a later key."""
    if _name(function) == "and_masks":
        return any(map(_causal, _values(function)["mask_functions"]))
    return _name(function) == "causal_mask_function"


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
    """Return the function of transformers that made this one, or that it is; else ""."""
    if getattr(function, "__module__", "") != sdpa_mask.__module__:
        return ""
    return getattr(function, "__qualname__", "").partition(".")[0]


def _values(function: Callable[..., Any]) -> dict[str, Any]:
    """Return what an inner function took along."""
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
