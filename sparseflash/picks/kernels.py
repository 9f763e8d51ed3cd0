"""Attention to picked blocks: the inverse lists, and the launches of its kernels."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from sparseflash.backends.protocol import empty_out
from sparseflash.kernels.common.launch import launch
from sparseflash.kernels.common.shapes import padded_dim, padded_dim_v, scale_log2
from sparseflash.kernels.portable.configs import power_of_two_divisor
from sparseflash.kernels.portable.tma import descriptors
from sparseflash.picks.column_kernels import picks_add_parts, picks_backward_kv
from sparseflash.picks.row_kernels import join_picks, merge_picks, picks_backward_q, picks_forward

_PART = 2  # a part of an inverse list holds at most so many times the mean list ..
_SHORTEST = 64  # .. or so many queries
# Out and dq come from gathered queries where the heads of a list do not fill a tile. The parts of
# the picks are written and read again, which long blocks outweigh. The queries of a tile share the
# keys of a block, which few queries would not.
_FULL = 16  # rows of the smallest tile
_LONG = 48  # keys of a block, at least, for each row of a query
_BUSY = 4  # queries that picked a block, at least, on average
_MERGED = 16  # rows of a tile that are merged
# Else a tile has queries that follow each other. They share the keys that several of them picked.
_JOINED = 32, 64  # rows of such a tile, and with 16 bits and head dims up to 128, unless ..
_MOST_QUERIES = 16  # .. it would have more queries, or they had ..
_MOST_JOINED = 4096  # .. more picks
_LIMIT = 2**28  # bytes of parts at a time, unless one list alone has more, at most ..
_MOST = 2  # .. so many times those of a float32 dQ, or queries are not gathered


class Inverse(NamedTuple):
    """For each list of a batch entry, of heads that picked together and of a block: who picked it.

    All is made on the device without waiting for it.

    Attributes:
        places: int32, query * k + pick, list after list, in ascending order.
        ptr: int32 (lists + 1,), where each begins.
    """

    places: Tensor
    ptr: Tensor

    def parts(self, length: int) -> tuple[Tensor, Tensor]:
        """int32 first_part (lists + 1,) and owner: each list cut into parts of at most `length`.

        The first part of each list; and the list of each part, or their number for no part.
        """
        lists = len(self.ptr) - 1
        parts = (self.ptr.diff() + length - 1) // length
        first_part = F.pad(parts.cumsum(0, dtype=torch.int32), (1, 0))
        most = lists + len(self.places) // length
        number = torch.arange(most, device=parts.device, dtype=torch.int32)
        return first_part, torch.searchsorted(
            first_part[1:].contiguous(), number, right=True, out_int32=True
        )


def inverse(blocks: Tensor, block: int, n_k: int, *, causal: bool) -> Inverse:
    """Return the inverse of the lists of `Picks`."""
    batch, heads, n_q, k = blocks.shape
    count, options = -(-n_k // block), {"device": blocks.device, "dtype": torch.int32}
    lists = batch * heads * count
    place = torch.arange(n_k - n_q, n_k, **options)[:, None]
    seen = blocks < count
    if causal:
        seen &= blocks * block <= place
    which = torch.arange(batch * heads, **options).view(batch, heads, 1, 1) * count
    ordered, order = torch.where(seen, which + blocks, lists).flatten().sort(stable=True)
    numbers = torch.arange(lists + 1, **options)
    return Inverse((order % (n_q * k)).int(), torch.searchsorted(ordered, numbers, out_int32=True))


class _Shape(NamedTuple):
    """What the launches of a call share."""

    group: int  # query heads of a list
    share: int  # lists of a key head
    rows: int  # of a tile for one query: a power of two
    block_n: int  # keys of a tile
    together: int  # rows of a tile of gathered queries
    queries: int  # that follow each other in a tile
    gathers: bool  # whether out and dq are computed by the inverse lists

    @classmethod
    def of(cls, q: Tensor, k: Tensor, v: Tensor, blocks: Tensor, block: int) -> "_Shape":
        heads, n_q, n_picks = blocks.shape[1:]
        group = int(q.shape[1] // heads)  # for torch.compile, too
        rows = 1 << (group - 1).bit_length()
        narrow = max(q.shape[3], v.shape[3]) <= 128
        widest = (64 if narrow else 32) if q.dtype != torch.float32 else 16
        tile = min(widest, power_of_two_divisor(block))
        parts = 4 * n_q * n_picks * group * max(q.shape[3], v.shape[3])  # bytes of a list
        fits = parts <= max(_LIMIT, _MOST * 4 * q.numel())
        gathers = fits and _gathers(rows, block, n_q * n_picks * block / k.shape[2])
        queries = max(1, min(_JOINED[widest == 64] // rows, _MOST_QUERIES))
        return cls(group, heads // k.shape[1], rows, tile, widest, queries, gathers)


def _gathers(rows: int, block: int, mean: float) -> bool:
    """Whether tiles of gathered queries take less time; mean: queries that picked a block."""
    return rows < _FULL and block >= _LONG * rows and mean >= _BUSY


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


def _rows(
    kernel: Any, given: Sequence[Tensor], out: Tensor, lse: Tensor | None, blocks: Tensor,
    inverted: Inverse | None, shape: _Shape, scale: float, constants: dict[str, Any],
) -> None:  # fmt: skip
    """out and lse, or dq where lse is None: `kernel` by the inverse lists, if they are given, and
    the parts of each query's picks merged; else by the joined lists of queries that follow each
    other. given: the tensors of the kernel before its results.
    """
    q, k, v, *others = given
    batch, heads, n_q, n_picks = blocks.shape
    n_k, block = k.shape[2], constants["BLOCK"]
    strides, scaled = _strides(q, k, v, *others[:1], out), scale_log2(scale)
    numbers = n_q, n_k, heads
    same = {"N_PICKS": n_picks} | {name: constants[name] for name in ("BLOCK", "CAUSAL")}
    constants = constants | same
    if inverted is None:
        room = 1 << (n_picks - 1).bit_length()
        queries = max(1, min(shape.queries, _MOST_JOINED // room))
        grid = -(-n_q // queries), batch * heads
        which, who = blocks.new_empty(2, grid[1], grid[0] * queries * n_picks)
        lists = which, who, blocks.new_empty(grid[1], grid[0])
        launch(join_picks, grid, blocks, *lists, n_q, n_k, PICKS=room, QUERIES=queries, **same)
        whole = n_k % block == 0  # the tiles of a block may lie beyond n_k
        widths = constants["BLOCK_D"], constants["BLOCK_DV"]
        maps = descriptors((k, v), shape.block_n, widths) if whole else (None, None)
        results = (out,) if lse is None else (out, lse)
        # else those of the compiler: three on NVIDIA GPUs, two on AMD's, which have less memory
        stages = {"num_stages": 2} if lse is None or shape.block_n <= 32 else {}
        launch(
            kernel, grid, q, k, v, *maps, *others, *results, lists, *strides, scaled, *numbers,
            0, 0, 0, QUERIES=queries, ROWS=max(shape.rows, _FULL // queries), GATHERED=False,
            WHOLE=whole, TMA=maps[0] is not None, **constants, **stages,
        )  # fmt: skip
        return
    dim, tokens, count = out.shape[3], shape.together // shape.rows, -(-n_k // block)
    lists = *inverted, *inverted.parts(tokens)
    each = n_q * n_picks * shape.group  # rows of the parts of a list
    step = min(batch * heads, max(1, _LIMIT // (4 * each * dim)))
    part = torch.empty(step * each, dim, dtype=torch.float32, device=out.device)
    part_lse = None if lse is None else part.new_empty(step * each)
    results = (part,) if part_lse is None else (part, part_lse)
    for first in range(0, batch * heads, step):
        number = min(step, batch * heads - first)
        launch(
            kernel, (number * count + number * n_q * n_picks // tokens,),
            q, k, v, None, None, *others, *results, lists, *strides, scaled, *numbers,
            count, first, first + number, QUERIES=tokens, ROWS=shape.rows, GATHERED=True,
            WHOLE=False, TMA=False, num_stages=2, **constants,
        )  # fmt: skip
        launch(
            merge_picks, (-(-n_q * shape.group // _MERGED), number),
            part, part_lse, blocks, out, lse, *_strides(out), *numbers, first,
            GROUP=shape.group, HEAD_DIM=dim, BLOCK_D=padded_dim(dim), ROWS=_MERGED, **same,
        )  # fmt: skip


def inverse_sizes(
    q: Tensor, k: Tensor, v: Tensor, blocks: Tensor, block: int
) -> tuple[int, int]:  # fmt: skip
    """Lengths of the `Inverse` that `picked_forward` returns, 0 where it makes none."""
    if not _Shape.of(q, k, v, blocks, block).gathers:
        return 0, 0
    return blocks.numel(), blocks.shape[0] * blocks.shape[1] * -(-k.shape[2] // block) + 1


def picked_forward(
    q: Tensor, k: Tensor, v: Tensor, *lists: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """out, lse and the `Inverse`, which is empty where queries are not gathered.

    lists: blocks, block and causal of `Picks`, then the scale.
    """
    blocks, block, causal, scale = lists
    shape = _Shape.of(q, k, v, blocks, block)
    constants = _constants(q, v, shape, block, causal)
    out = empty_out(q, v)
    lse = torch.empty(q.shape[:3], dtype=torch.float32, device=q.device)
    inverted = None
    if shape.gathers:
        inverted = inverse(blocks, block, k.shape[2], causal=causal)
    _rows(picks_forward, (q, k, v), out, lse, blocks, inverted, shape, scale, constants)
    return out, lse, *(inverted or (blocks.new_empty(0), blocks.new_empty(0)))


def picked_backward(
    dout: Tensor, dlse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor,
    places: Tensor, ptr: Tensor, *lists: Any,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """dq, dk and dv; from out to ptr: what `picked_forward` returned; lists: as there."""
    blocks, block, causal, scale = lists
    dout = dout if dout.stride(-1) == 1 else dout.contiguous()
    shape = _Shape.of(q, k, v, blocks, block)
    batch, heads, n_q, n_picks = blocks.shape
    n_k, count = k.shape[2], -(-k.shape[2] // block)
    constants = _constants(q, v, shape, block, causal)
    delta = (out.float() * dout.float()).sum(-1)
    if dlse is not None:
        delta -= dlse
    dq, dk, dv = (torch.empty_like(t) for t in (q, k, v))
    inverted = Inverse(places, ptr) if len(ptr) else inverse(blocks, block, n_k, causal=causal)
    given = q, k, v, dout, lse, delta
    numbers = scale_log2(scale), n_q, n_k, heads
    gathered = inverted if shape.gathers else None
    _rows(picks_backward_q, given, dq, None, blocks, gathered, shape, scale, constants)
    length = max(_SHORTEST, -(-_PART * n_q * n_picks // count))
    first_part, owner = inverted.parts(length)
    part_k, part_v = (
        torch.empty(len(owner), block, t.shape[3], dtype=torch.float32, device=q.device)
        for t in (k, v)
    )
    launch(
        picks_backward_kv, (len(owner), block // shape.block_n),
        *given, part_k, part_v, inverted.places // n_picks, inverted.ptr, first_part, owner,
        *_strides(q, k, v, dout), *numbers, count, batch * heads * count, length,
        TOKENS=max(1, shape.together // shape.rows), ROWS=shape.rows, **constants,
    )  # fmt: skip
    for name in ("GROUP", "CAUSAL", "PRECISION"):
        del constants[name]
    tile = constants.pop("BLOCK_N")
    launch(
        picks_add_parts, (-(-n_k // tile), batch * k.shape[1]),
        part_k, part_v, first_part, dk, dv, *_strides(dk, dv),
        scale_log2(scale), n_k, heads, count, ROWS=tile, **constants,
    )  # fmt: skip
    return dq, dk, dv
