"""Block-sparse FlashAttention for Hopper: warp-specialised kernels in Gluon, with wgmma and TMA.

Dense attention is the same kernel with one list for all rows. See docs/hopper.md.
"""

from functools import cache
from typing import Any

import torch
from torch import Tensor

from sparseflash.backends import empty_out
from sparseflash.dropout import keep_threshold
from sparseflash.kernels.hopper.configs import ForwardTiles, forward_tiles
from sparseflash.kernels.launch import Launch, launch
from sparseflash.lasting import make_lasting
from sparseflash.schedule import Schedule
from sparseflash.tiles.lists import expressible, tile_lists
from sparseflash.tiles.tile_lists import TileLists

_LOG2E = 1.4426950408889634


def unsupported(
    q: Tensor, k: Tensor, v: Tensor, schedule: Schedule | None, dropout_p: float
) -> str | None:
    """The reason this backend cannot run the call, or None."""
    if q.device.type != "cuda":
        return f"its kernels run on CUDA tensors, not on {q.device.type}"
    if q.dtype not in (torch.bfloat16, torch.float16):
        return f"its kernels take bfloat16 and float16, not {q.dtype}"
    capability = _capability(q.device)
    if capability != (9, 0):
        return f"it needs a Hopper GPU, compute capability 9.0; this one has {capability}"
    if reason := gluon_missing():
        return reason
    if max(q.shape[-1], v.shape[-1]) > 256:
        return f"its kernels hold head dims up to 256, not {max(q.shape[-1], v.shape[-1])}"
    for name, t in (("q", q), ("k", k), ("v", v)):
        if reason := _not_copied(name, t):
            return reason
    tiles = _tiles(q, v, schedule)
    return expressible(schedule, "rows", tiles.major, tiles.minor)


def forward(
    q: Tensor, k: Tensor, v: Tensor,
    schedule: Schedule | None, scale: float, dropout_p: float, seed: Tensor | None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """out (B, Hq, N_q, D_v), laid out like q, and lse (B, Hq, N_q) float32."""
    return Forward(q, k, v, schedule, scale, dropout_p)(q, k, v, seed)


class Forward:
    """`forward` for inputs with the device, dtype, shapes and strides of q, k and v."""

    def __init__(
        self, q: Tensor, k: Tensor, v: Tensor, schedule: Schedule | None, scale: float,
        dropout_p: float,
    ):  # fmt: skip
        from sparseflash.kernels.hopper.forward import attention_forward

        self.scale, self.dropout_p, self.tiles = scale, dropout_p, _tiles(q, v, schedule)
        self.programs = multiprocessors(q.device) * self.tiles.programs
        self.lists = lists = _forward_lists(q, k, schedule, self.tiles)
        layout = (q.shape, q.stride(), k.shape, k.stride(), v.shape, v.stride(), q.dtype)
        key = (scale, dropout_p, *layout, self.tiles, *lists.numbers)
        fixed = lists.items, lists.idx, lists.bit, lists.bits
        self._launch = Launch(attention_forward, key, fixed)
        self._lse = {"size": q.shape[:3], "dtype": torch.float32, "device": q.device}
        self._device = q.device

    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, seed: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        out, lse = empty_out(q, v), torch.empty(**self._lse)
        parts, counter = self._parts(out, lse), _counter(self._device)
        tensors = (q, k, v, out, lse, counter, *parts, seed)
        self._launch(tensors, lambda: self._arguments(*tensors))
        if self.lists.n_parts:
            _merge(self.lists, *parts, out, lse)
        return out, lse

    def _arguments(self, q, k, v, out, lse, counter, part_out, part_lse, seed):
        tiles, lists, dropout_p = self.tiles, self.lists, self.dropout_p
        batch, heads, n_q, _ = q.shape
        n_bh, piece = batch * heads, tiles.minor // lists.gather
        args = (
            descriptor(q, 64, tiles.width), descriptor(k, piece, _panel(tiles.width, lists)),
            descriptor(v, piece, _panel(tiles.width_v, lists)), descriptor(out, 64, tiles.width_v),
            out, lse, counter, part_out, part_lse, lists.items, lists.idx, lists.bit, lists.bits,
            lists.n_items, lists.n_long, lists.n_parts, lists.batch, lists.heads,
            n_q, v.shape[3], heads, heads // v.shape[1], n_bh, *out.stride()[:3],
            self.scale * _LOG2E, seed, keep_threshold(dropout_p), 1.0 / (1.0 - dropout_p),
        )  # fmt: skip
        options = {
            "MINOR": tiles.minor, "CONSUMERS": tiles.consumers, "KS": tiles.k_stages,
            "VS": tiles.v_stages, "D": tiles.width, "DV": tiles.width_v, "PARTIAL": lists.partial,
            "DROPOUT": dropout_p > 0, "SPLIT": lists.n_parts > 0, "DRAIN": tiles.drain,
            "PAIRS": tiles.pairs, **_registers(tiles),
        }  # fmt: skip
        return (min(self.programs, n_bh * lists.n_items),), args, options

    def _parts(self, out: Tensor, lse: Tensor) -> tuple[Tensor, Tensor]:
        """Out and LSE of the parts of split tiles, float32; where nothing is split, any tensor."""
        if not self.lists.n_parts:
            return lse, lse
        rows = out.shape[0] * out.shape[1] * self.lists.n_parts * self.tiles.major
        part_out = torch.empty(rows, self.tiles.width_v, dtype=torch.float32, device=out.device)
        return part_out, torch.empty(rows, dtype=torch.float32, device=out.device)


def backward(
    dout: Tensor, dlse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor,
    schedule: Schedule | None, scale: float, dropout_p: float, seed: Tensor | None,
    deterministic: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """dq, dk, dv like q, k, v."""
    from sparseflash.backends import hopper_backward

    return hopper_backward.backward(
        dout, dlse, q, k, v, out, lse, schedule, scale, dropout_p, seed, deterministic
    )


def lists(
    q: Tensor, k: Tensor, v: Tensor, schedule: Schedule, dropout_p: float, deterministic: bool, *,
    backward: bool,
) -> tuple[TileLists, ...]:  # fmt: skip
    """The tile lists that calls with inputs like these walk."""
    from sparseflash.backends import hopper_backward

    rows = _forward_lists(q, k, schedule, _tiles(q, v, schedule))
    if not backward:
        return (rows,)
    schedule = schedule._replace(lists=(rows,))  # a pass over rows may have the same tiles
    more = hopper_backward.lists(q, k, v, schedule, dropout_p, deterministic)
    return (rows, *(lists for lists in more if lists is not rows))


def _forward_lists(
    q: Tensor, k: Tensor, schedule: Schedule | None, tiles: ForwardTiles
) -> TileLists:
    return tile_lists(
        schedule, by="rows", major=tiles.major, minor=tiles.minor, n_q=q.shape[2],
        n_k=k.shape[2], batch=q.shape[0], heads=q.shape[1], kv_heads=k.shape[1],
        sms=multiprocessors(q.device) * tiles.programs, device=q.device,
    )  # fmt: skip


def descriptor(t: Tensor, rows: int, width: int) -> Any:
    """For TMA: (rows, width) of a tensor (B, H, N, D); beyond N and D it reads zeros, and does not
    write.
    """
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    shape = list(t.shape)
    # the stride of an axis of one is not used, but it must be legal
    strides = [8 if n == 1 else s for n, s in zip(shape[:3], t.stride()[:3], strict=True)]
    block = [1, 1, rows, width]
    return TensorDescriptor(t, shape, [*strides, 1], block, _shared_layout(rows, width, t.dtype))


def _counter(device: torch.device) -> Tensor:
    """Zeros that a kernel counts its work with, and clears again: one pair for every stream. A CUDA
    graph, which may be replayed on any stream, has its own.
    """
    if torch.cuda.is_current_stream_capturing():
        return torch.zeros(2, dtype=torch.int32, device=device)
    # what torch.cuda.current_stream() wraps, at a twentieth of its time
    stream = device, torch._C._cuda_getCurrentRawStream(device.index)
    counter = counters.get(stream)
    if counter is None:
        counter = make_lasting(lambda: torch.zeros(2, dtype=torch.int32, device=device), device)
        counters[stream] = counter
    return counter


counters: dict[tuple[torch.device, int], Tensor] = {}  # by device and stream; zeros between kernels


@cache
def _shared_layout(rows: int, width: int, dtype: torch.dtype) -> Any:
    from triton.experimental.gluon import language as gl

    kind = gl.bfloat16 if dtype == torch.bfloat16 else gl.float16
    return gl.NVMMASharedLayout.get_default_for([1, 1, rows, width], kind)  # pyright: ignore[reportCallIssue]


@cache
def _capability(device: torch.device) -> tuple[int, int]:
    return torch.cuda.get_device_capability(device)


@cache
def multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


@cache
def gluon_missing() -> str | None:
    """Why the kernels cannot be compiled here, or None."""
    try:
        import triton
        from triton.experimental.gluon.language.nvidia.hopper import warpgroup_mma  # noqa: F401
        from triton.experimental.gluon.nvidia.hopper import TensorDescriptor  # noqa: F401
    except ImportError as error:
        return f"Triton's Gluon cannot be imported ({error}); install triton 3.6"
    if triton.__version__.startswith("3.6."):
        return None
    return f"its kernels are written in the Gluon of Triton 3.6, this is {triton.__version__}"


def _not_copied(name: str, t: Tensor) -> str | None:
    """Why TMA cannot copy tiles of a tensor, or None."""
    batch, head, token, _ = t.stride()
    if not (t.data_ptr() % 16 or (batch | head | token) % 8) and min(batch, head, token) > 0:
        return None
    if t.data_ptr() % 16:
        return f"{name} begins at an address that is no multiple of 16 bytes; clone it"
    strides = [s for n, s in zip(t.shape[:3], t.stride()[:3], strict=True) if n > 1]
    if all(s > 0 and s % 8 == 0 for s in strides):
        return None
    return (
        f"the strides of {name}, {tuple(t.stride())}, are no positive multiples of 16 bytes;"
        " call contiguous(), or pad its head dim to a multiple of 8"
    )


def _tiles(q: Tensor, v: Tensor, schedule: Schedule | None) -> ForwardTiles:
    block_q = 128 if schedule is None else schedule.block_q
    return forward_tiles(q.shape[-1], v.shape[-1], block_q, q.shape[2])


def _panel(width: int, lists: TileLists) -> int:
    """Columns of one copy: where an entry is gathered, those that lie together for all its rows."""
    return width if lists.gather == 1 else min(width, 64)


def _registers(tiles: ForwardTiles) -> dict[str, int]:
    """Of a thread: of the consumers, of the warps that feed them, and the mean that a launch must
    name. A program has its consumers and one more warpgroup.
    """
    groups = tiles.consumers + 1
    mean = 65536 // (tiles.programs * groups * 128) // 8 * 8
    feed = min(40, mean // 20 * 8)
    consumer = min(240, (mean * groups - feed) // tiles.consumers // 8 * 8)
    return {"REGISTERS": consumer, "FEED_REGISTERS": feed, "num_warps": 4, "maxnreg": mean}


def _merge(lists: TileLists, part_out: Tensor, part_lse: Tensor, out: Tensor, lse: Tensor) -> None:
    from sparseflash.kernels.tl.merge_parts import merge_parts

    batch, heads, n_q, head_dim_v = out.shape
    n_split, rows = lists.merge.shape[1], 16
    grid = n_split, batch * heads, lists.major // rows

    def arguments():
        args = (
            part_out, part_lse, lists.merge, out, lse, n_split, lists.n_parts,
            lists.batch, lists.heads, heads, n_q, head_dim_v, *out.stride()[:3],
        )  # fmt: skip
        return grid, args, {"ROWS": lists.major, "DIM": part_out.shape[1], "BLOCK": rows}

    key = (grid, lists.n_parts, lists.batch, lists.heads, out.shape, out.stride(), out.dtype)
    key = (*key, lists.major, part_out.shape[1])
    launch(merge_parts, key, (part_out, part_lse, lists.merge, out, lse), arguments)
