"""Attention to picked blocks: the inverse lists, and the launches of its kernels."""

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from sparseflash.backends.protocol import empty_out
from sparseflash.kernels.configs import power_of_two_divisor
from sparseflash.kernels.device import on
from sparseflash.kernels.launch import launch
from sparseflash.kernels.scale import scale_log2
from sparseflash.kernels.shapes import padded_dim, padded_dim_v
from sparseflash.kernels.tl.picks import picks_backward_q, picks_forward
from sparseflash.kernels.tl.picks_backward import picks_add_parts, picks_backward_kv

_PART = 2  # a part of an inverse list holds at most so many times the mean list ..
_SHORTEST = 64  # .. or so many queries


class Inverse(NamedTuple):
    """For each list of a batch entry, of heads that picked together and of a block: who picked it.

    A list is cut into parts of at most `length`. All is made on the device without waiting for it.

    Attributes:
        queries: int32, list after list, in ascending order.
        ptr: int32 (lists + 1,), where each begins.
        first_part: int32 (lists + 1,), the first part of each.
        owner: int32 (parts,), the list of each part; the number of lists where there is no part.
        length: queries of a part.
    """

    queries: Tensor
    ptr: Tensor
    first_part: Tensor
    owner: Tensor
    length: int


def inverse(blocks: Tensor, block: int, n_k: int, *, causal: bool) -> Inverse:
    """The inverse of the lists of `Picks`."""
    batch, heads, n_q, k = blocks.shape
    count, device = -(-n_k // block), blocks.device
    lists = batch * heads * count
    place = torch.arange(n_k - n_q, n_k, device=device)[:, None]
    seen = blocks < count
    if causal:
        seen &= blocks * block <= place
    which = torch.arange(batch * heads, device=device).view(batch, heads, 1, 1) * count
    owner_of = torch.where(seen, which + blocks, lists).flatten()
    ordered, order = owner_of.sort(stable=True)
    ptr = torch.searchsorted(ordered, torch.arange(lists + 1, device=device))
    length = max(_SHORTEST, -(-_PART * n_q * k // count))
    parts = (ptr.diff() + length - 1) // length
    first_part = F.pad(parts.cumsum(0), (1, 0))
    most = lists + batch * heads * n_q * k // length
    number = torch.arange(most, device=device)
    owner = torch.searchsorted(first_part[1:].contiguous(), number, right=True)
    queries = order // k % n_q
    return Inverse(queries.int(), ptr.int(), first_part.int(), owner.int(), length)


class _Shape(NamedTuple):
    """What the launches of a call share."""

    group: int  # query heads of a list
    share: int  # lists of a key head
    rows: int  # of a tile for one query: a power of two
    block_n: int  # keys of a tile
    together: int  # rows of a tile of several queries, in the backward

    @classmethod
    def of(cls, q: Tensor, k: Tensor, v: Tensor, blocks: Tensor, block: int) -> "_Shape":
        heads = blocks.shape[1]
        group = q.shape[1] // heads
        narrow = max(q.shape[3], v.shape[3]) <= 128
        widest = (64 if narrow else 32) if q.dtype != torch.float32 else 16
        tile = min(widest, power_of_two_divisor(block))
        return cls(group, heads // k.shape[1], 1 << (group - 1).bit_length(), tile, widest)


def _constants(q: Tensor, v: Tensor, shape: _Shape, block: int, causal: bool) -> dict[str, Any]:
    head_dim, head_dim_v = q.shape[3], v.shape[3]
    return {
        "GROUP": shape.group, "SHARE": shape.share, "HEAD_DIM": head_dim, "HEAD_DIM_V": head_dim_v,
        "BLOCK_D": padded_dim(head_dim), "BLOCK_DV": padded_dim_v(head_dim, head_dim_v),
        "BLOCK_N": shape.block_n, "BLOCK": block, "CAUSAL": causal,
        "PRECISION": "ieee" if q.dtype == torch.float32 else "tf32",
    }  # fmt: skip


def _strides(*tensors: Tensor) -> tuple[int, ...]:
    return tuple(stride for t in tensors for stride in t.stride()[:3])


def _rowwise(*tensors: Tensor) -> list[Tensor]:
    """The tensors, with elements of the head dim side by side."""
    return [t if t.stride(-1) == 1 else t.contiguous() for t in tensors]


def picked_forward(q: Tensor, k: Tensor, v: Tensor, *lists: Any) -> tuple[Tensor, Tensor]:
    """out and lse; lists: blocks, block and causal of `Picks`, then the scale."""
    blocks, block, causal, scale = lists
    q, k, v = _rowwise(q, k, v)
    shape = _Shape.of(q, k, v, blocks, block)
    out = empty_out(q, v)
    lse = torch.empty(q.shape[:3], dtype=torch.float32, device=q.device)
    batch, heads, n_q, n_picks = blocks.shape
    with on(q.device):
        launch(
            picks_forward, (n_q, batch * heads), q, k, v, out, lse, blocks, *_strides(q, k, v, out),
            scale_log2(scale), n_q, k.shape[2], heads,
            N_PICKS=n_picks, BLOCK_M=max(16, shape.rows), **_constants(q, v, shape, block, causal),
        )  # fmt: skip
    return out, lse


def picked_backward(
    dout: Tensor, dlse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor,
    *lists: Any,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """dq, dk and dv; lists: as in `picked_forward`."""
    blocks, block, causal, scale = lists
    q, k, v, dout = _rowwise(q, k, v, dout)
    shape = _Shape.of(q, k, v, blocks, block)
    batch, heads, n_q, n_picks = blocks.shape
    n_k, count = k.shape[2], -(-k.shape[2] // block)
    constants = _constants(q, v, shape, block, causal)
    delta = (out.float() * dout.float()).sum(-1)
    if dlse is not None:
        delta -= dlse
    dq, dk, dv = (torch.empty_like(t) for t in (q, k, v))
    inverted = inverse(blocks, block, n_k, causal=causal)
    parts = len(inverted.owner)
    part_k, part_v = (
        torch.empty(parts, block, t.shape[3], dtype=torch.float32, device=q.device) for t in (k, v)
    )
    given = q, k, v, dout, lse, delta
    numbers = scale_log2(scale), n_q, n_k, heads
    with on(q.device):
        launch(
            picks_backward_q, (n_q, batch * heads),
            *given, dq, blocks, *_strides(q, k, v, dout, dq), *numbers,
            N_PICKS=n_picks, BLOCK_M=max(16, shape.rows), **constants,
        )  # fmt: skip
        launch(
            picks_backward_kv, (parts, block // shape.block_n),
            *given, part_k, part_v, *inverted[:4], *_strides(q, k, v, dout), *numbers, count,
            batch * heads * count, inverted.length,
            TOKENS=max(1, shape.together // shape.rows), ROWS=shape.rows, **constants,
        )  # fmt: skip
        for name in ("GROUP", "CAUSAL", "PRECISION"):
            del constants[name]
        tile = constants.pop("BLOCK_N")
        launch(
            picks_add_parts, (-(-n_k // tile), batch * k.shape[1]),
            part_k, part_v, inverted.first_part, dk, dv, *_strides(dk, dv),
            scale_log2(scale), n_k, heads, count, ROWS=tile, **constants,
        )  # fmt: skip
    return dq, dk, dv
