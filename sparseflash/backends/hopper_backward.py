"""The backward of the Hopper backend: two forms of it, and the launching of their kernels.

One pass over the columns of the mask gives dK and dV, and adds up dQ by float32 reductions, whose
order changes from run to run. Two passes without atomics, over columns and rows, take seven matrix
products instead of five. See docs/hopper.md.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from sparseflash.backends import triton as fallback
from sparseflash.backends.hopper import descriptor, multiprocessors
from sparseflash.dropout import keep_threshold
from sparseflash.kernels.gluon.configs import padded
from sparseflash.kernels.launch import launch
from sparseflash.schedule import Schedule
from sparseflash.tiles.lists import expressible, tile_lists
from sparseflash.tiles.make import TileLists

_LOG2E = 1.4426950408889634
_PAD = 128  # rows of the buffers with a number for every query come in multiples of this
_FEW_KEYS = 512  # up to so many for a query, clearing and converting dQ costs more than it saves


class Tiles(NamedTuple):
    """How a pass is cut: tiles of 64 * consumers (major) x minor tokens, stages of what streams
    by, and of what stays for a tile.
    """

    consumers: int
    minor: int
    stages: int
    ring: int

    @property
    def major(self) -> int:
        return 64 * self.consumers

    @property
    def programs(self) -> int:
        """Of one multiprocessor."""
        return 3 - self.consumers


def cols_tiles(width: int, block_k: int, *, with_dq: bool) -> Tiles:
    """Of the pass over columns, for head dims up to `width` and a mask with blocks of block_k."""
    if width > 64:
        return Tiles(2, 64, stages=2, ring=2)
    if block_k % 128:
        return Tiles(1, 64, stages=2, ring=2)
    return Tiles(2, 64, stages=3, ring=2) if with_dq else Tiles(2, 128, stages=2, ring=2)


def rows_tiles(width: int, block_q: int) -> Tiles:
    """Of the pass over rows, likewise."""
    if width > 64:
        return Tiles(2, 128, stages=2, ring=1)
    if block_q % 128:
        return Tiles(1, 128, stages=2, ring=2)
    return Tiles(2, 128, stages=2, ring=2)


class Call(NamedTuple):
    """What all the kernels of one backward take."""

    q: Tensor
    k: Tensor
    v: Tensor
    dout: Tensor
    start: Tensor  # float32 (B, H, n_pad)  -lse / scale, where the sums of the scores begin
    delta: Tensor  # float32 (B, H, n_pad)  dlse - rowsum(out * dout), where those of dP begin
    schedule: Schedule | None
    scale: float
    dropout_p: float
    seed: Tensor | None

    @property
    def n_pad(self) -> int:
        return self.start.shape[2]


def backward(
    dout: Tensor, dlse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor,
    schedule: Schedule | None, scale: float, dropout_p: float, seed: Tensor | None,
    deterministic: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """dq, dk, dv like q, k, v; bit-equal from run to run if `deterministic`."""
    width = max(padded(q.shape[-1]), padded(v.shape[-1]))
    one_pass = not deterministic and _keys_per_query(k, schedule) > _FEW_KEYS
    if dropout_p > 0 and width > 64:  # not enough registers
        one_pass = False
    if width > 128 or _inexpressible(schedule, width, one_pass):
        return fallback.backward(
            dout, dlse, q, k, v, out, lse, schedule, scale, dropout_p, seed, deterministic
        )
    if not _fits_tma(dout):
        dout = _like(dout).copy_(dout)
    batch, heads, n_q, head_dim = q.shape
    n_pad = _cdiv(n_q, _PAD) * _PAD
    start, delta = torch.empty(2, batch, heads, n_pad, dtype=torch.float32, device=q.device)
    dq_sum = None
    if one_pass:
        # list entries that are not there add zeros beyond the last row
        rows = batch * heads * n_pad + _PAD
        dq_sum = torch.empty(rows, padded(head_dim), dtype=torch.float32, device=q.device)
    call = Call(q, k, v, dout, start, delta, schedule, scale, dropout_p, seed)
    _prepare(call, dlse, out, lse, dq_sum)
    dk, dv = backward_cols(call, dq_sum)
    dq = backward_rows(call) if dq_sum is None else _finish(call, dq_sum)
    return dq, dk, dv


def _keys_per_query(k: Tensor, schedule: Schedule | None) -> float:
    """In the mean, of the mask as its blocks have them; at most, of a selection."""
    if schedule is None:
        return k.shape[2]
    return schedule.rows.idx.numel() * schedule.block_k / (schedule.rows.ptr.numel() - 1)


def _blocks(schedule: Schedule | None) -> tuple[int, int]:
    return (schedule.block_q, schedule.block_k) if schedule else (128, 128)


def _inexpressible(schedule: Schedule | None, width: int, one_pass: bool) -> str | None:
    """Why one of the passes cannot walk over a mask, or None."""
    block_q, block_k = _blocks(schedule)
    cols = cols_tiles(width, block_k, with_dq=one_pass)
    rows = rows_tiles(width, block_q)
    reason = expressible(schedule, "cols", cols.major, cols.minor)
    return reason if one_pass or reason else expressible(schedule, "rows", rows.major, rows.minor)


def _prepare(call: Call, dlse: Tensor | None, out: Tensor, lse: Tensor, dq_sum: Tensor | None):
    from sparseflash.kernels.gluon.backward_prepare import backward_prepare as kernel

    batch, heads, n_q, dim_v = out.shape
    dq_d = padded(call.q.shape[-1])
    dlse_strides = (0, 0, 0) if dlse is None else dlse.stride()

    def arguments():
        args = (
            out, call.dout, lse, dlse, call.delta, call.start, dq_sum,
            *out.stride()[:3], *call.dout.stride()[:3], *dlse_strides,
            n_q, call.n_pad, heads, 1.0 / call.scale,
        )  # fmt: skip
        options = {
            "HEAD_DIM": dim_v, "BLOCK_D": padded(dim_v), "DQ_D": dq_d, "BLOCK_M": 64,
            "LSE_GRAD": dlse is not None, "CLEAR": dq_sum is not None, "num_warps": 4,
        }  # fmt: skip
        return (batch * heads * call.n_pad // 64,), args, options

    key = (
        out.shape, out.stride(), out.dtype, call.dout.stride(), dlse_strides, dlse is None,
        dq_sum is None, dq_d, call.scale,
    )  # fmt: skip
    tensors = (out, call.dout, lse, dlse, call.delta, call.start, dq_sum)
    launch(kernel, key, tensors, arguments)


def _finish(call: Call, dq_sum: Tensor) -> Tensor:
    from sparseflash.kernels.gluon.backward_prepare import backward_finish as kernel

    batch, heads, n_q, head_dim = call.q.shape
    dq = _like(call.q)

    def arguments():
        args = (dq_sum, dq, *dq.stride()[:3], n_q, call.n_pad, heads, call.scale)
        options = {
            "HEAD_DIM": head_dim, "BLOCK_D": padded(head_dim), "BLOCK_M": 64, "num_warps": 4,
        }  # fmt: skip
        return (batch * heads * call.n_pad // 64,), args, options

    launch(kernel, (dq.shape, dq.stride(), dq.dtype, call.scale), (dq_sum, dq), arguments)
    return dq


def backward_cols(
    call: Call, dq_sum: Tensor | None, tiles: Tiles | None = None
) -> tuple[Tensor, Tensor]:
    """dk and dv, by key tiles; dq is added to `dq_sum`, if that is not None."""
    from sparseflash.kernels.gluon.backward_cols import backward_cols as kernel

    q, k, v, dout = call[:4]
    dk, dv = _like(k), _like(v)
    head_dim, dim_v = padded(q.shape[-1]), padded(v.shape[-1])
    tiles = tiles or cols_tiles(
        max(head_dim, dim_v), _blocks(call.schedule)[1], with_dq=dq_sum is not None
    )
    minor, major = tiles.minor, tiles.major
    lists = _lists(call, "cols", tiles)
    piece = minor // lists.gather
    parts = _parts(call, lists, head_dim + dim_v)
    n_bh = k.shape[0] * k.shape[1]
    counter = _counter(q.device)
    dq_out, parts_out, seed = (
        _or(dq_sum, call.start), _or(parts, call.start), _or(call.seed, lists.items),
    )  # fmt: skip

    def arguments():
        args = (
            descriptor(q, piece, head_dim), descriptor(dout, piece, dim_v),
            descriptor(k, major, head_dim), descriptor(v, major, dim_v),
            descriptor(dk, major, head_dim), descriptor(dv, major, dim_v),
            _vector(call.start, piece), _vector(call.delta, piece), call.start, call.delta,
            lists.items, lists.idx, lists.bit, lists.bits, counter, dq_out, parts_out, seed,
            lists.n_items, lists.n_long, lists.batch, lists.heads, k.shape[1], n_bh,
            lists.group, call.n_pad, _cdiv(q.shape[2], piece), k.shape[2], lists.n_parts,
            call.scale * _LOG2E, *_dropout(call),
        )  # fmt: skip
        options = {
            "BM": minor, "STAGES": tiles.stages, "KV": tiles.ring, "GROUPED": lists.group > 1,
            "PARTIAL": lists.partial or k.shape[2] % major > 0, "DROPOUT": call.dropout_p > 0,
            "SPLIT": parts is not None, "WITH_DQ": dq_sum is not None, "LATE": 4,
            **_registers(tiles),
        }  # fmt: skip
        return (_grid(call, lists, tiles, n_bh),), args, options

    key = (_key(call, lists, tiles), dk.stride(), dv.stride(), dq_sum is None)
    tensors = (
        q, k, v, dout, dk, dv, call.start, call.delta, lists.items, lists.idx, lists.bit,
        lists.bits, counter, dq_out, parts_out, seed,
    )  # fmt: skip
    launch(kernel, key, tensors, arguments)
    if parts is not None:
        _merge(parts, lists, dk, first=0)
        _merge(parts, lists, dv, first=head_dim)
    return dk, dv


def backward_rows(call: Call, tiles: Tiles | None = None) -> Tensor:
    """dq, by query tiles."""
    from sparseflash.kernels.gluon.backward_rows import backward_rows as kernel

    q, k, v, dout = call[:4]
    dq = _like(q)
    head_dim, dim_v = padded(q.shape[-1]), padded(v.shape[-1])
    tiles = tiles or rows_tiles(max(head_dim, dim_v), _blocks(call.schedule)[0])
    major = tiles.major
    lists = _lists(call, "rows", tiles)
    piece = tiles.minor // lists.gather
    parts = _parts(call, lists, head_dim)
    n_bh = q.shape[0] * q.shape[1]
    counter = _counter(q.device)
    parts_out, seed = _or(parts, call.start), _or(call.seed, lists.items)

    def arguments():
        args = (
            descriptor(q, major, head_dim), descriptor(dout, major, dim_v),
            descriptor(k, piece, head_dim), descriptor(v, piece, dim_v),
            descriptor(dq, 64, head_dim),
            _vector(call.start, major), _vector(call.delta, major),
            lists.items, lists.idx, lists.bit, lists.bits, counter, parts_out, seed,
            lists.n_items, lists.n_long, lists.batch, lists.heads, q.shape[1], n_bh,
            q.shape[1] // k.shape[1], call.n_pad, lists.n_parts,
            call.scale * _LOG2E, *_dropout(call),
        )  # fmt: skip
        options = {
            "BN": tiles.minor, "STAGES": tiles.stages, "RING": tiles.ring,
            "PARTIAL": lists.partial, "DROPOUT": call.dropout_p > 0,
            "SPLIT": parts is not None, "LATE": 3, **_registers(tiles),
        }  # fmt: skip
        return (_grid(call, lists, tiles, n_bh),), args, options

    tensors = (
        q, k, v, dout, dq, call.start, call.delta, lists.items, lists.idx, lists.bit,
        lists.bits, counter, parts_out, seed,
    )  # fmt: skip
    launch(kernel, (_key(call, lists, tiles), dq.stride()), tensors, arguments)
    if parts is not None:
        _merge(parts, lists, dq, first=0)
    return dq


def _key(call: Call, lists: TileLists, tiles: Tiles) -> tuple[Any, ...]:
    """What the arguments of a pass follow from, but for addresses; see `launch`."""
    q, k, v, dout = call[:4]
    layout = (q.shape, q.stride(), k.shape, k.stride(), v.shape, v.stride(), dout.stride(), q.dtype)
    return (*layout, call.scale, call.dropout_p, tiles, lists.numbers)


def _lists(call: Call, by: Any, tiles: Tiles) -> TileLists:
    q, k = call.q, call.k
    return tile_lists(
        call.schedule, by=by, major=tiles.major, minor=tiles.minor,
        n_q=q.shape[2], n_k=k.shape[2], batch=q.shape[0], heads=q.shape[1], kv_heads=k.shape[1],
        sms=multiprocessors(q.device) * tiles.programs, device=q.device,
    )  # fmt: skip


def _grid(call: Call, lists: TileLists, tiles: Tiles, n_bh: int) -> int:
    return min(multiprocessors(call.q.device) * tiles.programs, n_bh * lists.n_items)


def _registers(tiles: Tiles) -> dict[str, int]:
    """How the register file is shared out; one consumer leaves half of it to another program."""
    return {
        "CONSUMERS": tiles.consumers, "REGISTERS": 240, "num_warps": 4,
        "maxnreg": 168 if tiles.consumers == 2 else 128,
    }  # fmt: skip


def _parts(call: Call, lists: TileLists, width: int) -> Tensor | None:
    """Room for the float32 sums of the tiles that are split."""
    if not lists.n_parts:
        return None
    heads = call.q.shape[1] // lists.group
    n = call.q.shape[0] * heads * lists.n_parts
    return torch.empty(n, lists.major, width, dtype=torch.float32, device=call.q.device)


def _merge(parts: Tensor, lists: TileLists, out: Tensor, *, first: int) -> None:
    from sparseflash.kernels.gluon.backward_prepare import backward_merge as kernel

    batch, heads, n, head_dim = out.shape
    n_merge = lists.merge.shape[1]

    def arguments():
        args = (
            parts, lists.merge, out, *out.stride()[:3], n, heads, lists.n_parts, n_merge,
            lists.batch, lists.heads,
        )  # fmt: skip
        options = {
            "WIDTH": parts.shape[2], "FIRST": first, "HEAD_DIM": head_dim,
            "BLOCK_D": padded(head_dim), "MAJOR": lists.major, "BLOCK_M": 16, "num_warps": 4,
        }  # fmt: skip
        return (lists.major // 16 * n_merge * batch * heads,), args, options

    key = (out.shape, out.stride(), out.dtype, parts.shape, first, n_merge, lists.numbers)
    launch(kernel, key, (parts, lists.merge, out), arguments)


def _vector(t: Tensor, rows: int) -> Any:
    from triton.experimental.gluon import language as gl
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    layout = gl.NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=32, rank=1)
    return TensorDescriptor(t, [t.numel()], [1], [rows], layout)


def _fits_tma(t: Tensor) -> bool:
    dims = zip(t.shape[:3], t.stride()[:3], strict=True)
    lawful = all(n == 1 or (s > 0 and s % 8 == 0) for n, s in dims)
    return lawful and t.stride(3) == 1 and t.data_ptr() % 16 == 0


def _like(t: Tensor) -> Tensor:
    """An empty tensor like t, with strides for the tensor memory accelerator."""
    like = torch.empty_like(t)
    if _fits_tma(like):
        return like
    *extents, head_dim = t.shape
    return t.new_empty(*extents, _cdiv(head_dim, 8) * 8)[..., :head_dim]


def _counter(device: torch.device) -> Tensor:
    return torch.zeros(1, dtype=torch.int32, device=device)


def _or(t: Tensor | None, stand_in: Tensor) -> Tensor:
    return stand_in if t is None else t


def _dropout(call: Call) -> tuple[int, float]:
    return keep_threshold(call.dropout_p), 1.0 / (1.0 - call.dropout_p)


def _cdiv(a: int, b: int) -> int:
    return -(-a // b)
