"""The kernels of the Hopper backward, and the launching of them."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from sparseflash.backends.hopper import descriptor, multiprocessors
from sparseflash.dropout import keep_threshold
from sparseflash.kernels.hopper.configs import BackwardTiles, padded
from sparseflash.kernels.launch import Arguments, Launch, launch
from sparseflash.schedule import Schedule
from sparseflash.tiles.lists import Side, tile_lists
from sparseflash.tiles.tile_lists import TileLists

_LOG2E = 1.4426950408889634


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
    memo: dict[Any, Any]  # what calls of this layout share

    @property
    def n_pad(self) -> int:
        return self.start.shape[2]


def _launch(
    call: Call, kernel: Any, key: Callable[[], Any], tensors: Sequence[Tensor | None],
    arguments: Arguments, tiles: BackwardTiles | None = None,
) -> None:  # fmt: skip
    """`launch`, with its key made once for a layout; masks of one layout may differ in n_pad."""
    name = id(kernel), tiles
    again = call.memo.get(name)
    if again is None:
        again = call.memo[name] = Launch(kernel, (call.n_pad, key()))
    again(tensors, arguments)


def prepare(call: Call, dlse: Tensor | None, out: Tensor, lse: Tensor, dq_sum: Tensor | None):
    from sparseflash.kernels.hopper.backward_prepare import backward_prepare as kernel

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

    def key():
        return (
            out.shape, out.stride(), out.dtype, call.dout.stride(), dlse_strides, dlse is None,
            dq_sum is None, dq_d, call.scale,
        )  # fmt: skip

    tensors = (out, call.dout, lse, dlse, call.delta, call.start, dq_sum)
    _launch(call, kernel, key, tensors, arguments)


def finish(call: Call, dq_sum: Tensor) -> Tensor:
    from sparseflash.kernels.hopper.backward_prepare import backward_finish as kernel

    batch, heads, n_q, head_dim = call.q.shape
    dq = like(call.q)

    def arguments():
        args = (dq_sum, dq, *dq.stride()[:3], n_q, call.n_pad, heads, call.scale)
        options = {
            "HEAD_DIM": head_dim, "BLOCK_D": padded(head_dim), "BLOCK_M": 64, "num_warps": 4,
        }  # fmt: skip
        return (batch * heads * call.n_pad // 64,), args, options

    def key():
        return dq.shape, dq.stride(), dq.dtype, call.scale

    _launch(call, kernel, key, (dq_sum, dq), arguments)
    return dq


def backward_cols(call: Call, tiles: BackwardTiles, dq_sum: Tensor | None) -> tuple[Tensor, Tensor]:
    """dk and dv, by key tiles; dq is added to `dq_sum`, if that is not None."""
    from sparseflash.kernels.hopper.backward_cols import backward_cols as kernel

    q, k, v, dout = call[:4]
    dk, dv = like(k), like(v)
    head_dim, dim_v = padded(q.shape[-1]), padded(v.shape[-1])
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
            lists.group, call.n_pad, cdiv(q.shape[2], piece) + 1, k.shape[2], lists.n_parts,
            call.scale * _LOG2E, *_dropout(call),
        )  # fmt: skip
        options = {
            "BM": minor, "STAGES": tiles.stages, "KV": tiles.ring, "GROUPED": lists.group > 1,
            "PARTIAL": lists.partial or k.shape[2] % major > 0, "DROPOUT": call.dropout_p > 0,
            "SPLIT": parts is not None, "WITH_DQ": dq_sum is not None, "LATE": 4,
            **_registers(tiles),
        }  # fmt: skip
        return (_grid(call, lists, tiles, n_bh),), args, options

    def key():
        return _key(call, lists, tiles), dk.stride(), dv.stride(), dq_sum is None

    tensors = (
        q, k, v, dout, dk, dv, call.start, call.delta, lists.items, lists.idx, lists.bit,
        lists.bits, counter, dq_out, parts_out, seed,
    )  # fmt: skip
    _launch(call, kernel, key, tensors, arguments, tiles)
    if parts is not None:
        _merge(parts, lists, dk, first=0)
        _merge(parts, lists, dv, first=head_dim)
    return dk, dv


def backward_rows(call: Call, tiles: BackwardTiles) -> Tensor:
    """dq, by query tiles."""
    from sparseflash.kernels.hopper.backward_rows import backward_rows as kernel

    q, k, v, dout = call[:4]
    dq = like(q)
    head_dim, dim_v = padded(q.shape[-1]), padded(v.shape[-1])
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

    def key():
        return _key(call, lists, tiles), dq.stride()

    _launch(call, kernel, key, tensors, arguments, tiles)
    if parts is not None:
        _merge(parts, lists, dq, first=0)
    return dq


def _key(call: Call, lists: TileLists, tiles: BackwardTiles) -> tuple[Any, ...]:
    """What the arguments of a pass follow from, but for addresses; see `launch`."""
    q, k, v, dout = call[:4]
    layout = (q.shape, q.stride(), k.shape, k.stride(), v.shape, v.stride(), dout.stride(), q.dtype)
    return (*layout, call.scale, call.dropout_p, tiles, lists.numbers)


def lists(
    q: Tensor, k: Tensor, schedule: Schedule | None, by: Side, tiles: BackwardTiles
) -> TileLists:
    """What a pass with these tiles walks over."""
    return tile_lists(
        schedule, by=by, major=tiles.major, minor=tiles.minor, n_q=q.shape[2],
        n_k=k.shape[2], batch=q.shape[0], heads=q.shape[1], kv_heads=k.shape[1],
        sms=multiprocessors(q.device) * tiles.programs, device=q.device,
    )  # fmt: skip


def _lists(call: Call, by: Side, tiles: BackwardTiles) -> TileLists:
    found = call.memo.get((by, tiles))
    if found is None:
        found = call.memo[by, tiles] = lists(call.q, call.k, call.schedule, by, tiles)
    return found


def _grid(call: Call, lists: TileLists, tiles: BackwardTiles, n_bh: int) -> int:
    return min(multiprocessors(call.q.device) * tiles.programs, n_bh * lists.n_items)


def _registers(tiles: BackwardTiles) -> dict[str, int]:
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
    from sparseflash.kernels.hopper.backward_prepare import backward_merge as kernel

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


def fits_tma(t: Tensor) -> bool:
    batch, head, token, last = t.stride()
    if last == 1 and min(batch, head, token) > 0 and not (batch | head | token) % 8:
        return t.data_ptr() % 16 == 0
    dims = zip(t.shape[:3], t.stride()[:3], strict=True)
    lawful = all(n == 1 or (s > 0 and s % 8 == 0) for n, s in dims)
    return lawful and t.stride(3) == 1 and t.data_ptr() % 16 == 0


def like(t: Tensor) -> Tensor:
    """An empty tensor like t, with strides for the tensor memory accelerator."""
    like = torch.empty_like(t)
    if fits_tma(like):
        return like
    *extents, head_dim = t.shape
    return t.new_empty(*extents, cdiv(head_dim, 8) * 8)[..., :head_dim]


def _counter(device: torch.device) -> Tensor:
    return torch.zeros(1, dtype=torch.int32, device=device)


def _or(t: Tensor | None, stand_in: Tensor) -> Tensor:
    return stand_in if t is None else t


def _dropout(call: Call) -> tuple[int, float]:
    return keep_threshold(call.dropout_p), 1.0 / (1.0 - call.dropout_p)


def cdiv(a: int, b: int) -> int:
    return -(-a // b)
