"""Block-sparse FlashAttention in plain Triton.

It runs on any NVIDIA GPU since Ampere, or on a CPU under TRITON_INTERPRET=1. Dense attention is the
same kernel without the lists. See docs/kernels.md.
"""

import os
from functools import cache
from typing import Any

import torch
from torch import Tensor

from sparseflash.backends import empty_out
from sparseflash.dropout import keep_threshold
from sparseflash.kernels.configs import Tiles, tiles_for
from sparseflash.kernels.launch import launch
from sparseflash.schedule import BlockLists, Schedule

_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
_LOG2E = 1.4426950408889634


def unsupported(
    q: Tensor, k: Tensor, v: Tensor, schedule: Schedule | None, dropout_p: float
) -> str | None:
    """The reason this backend cannot run the call, or None."""
    try:
        import triton  # noqa: F401
    except ImportError as error:
        return f"triton cannot be imported ({error}); install it with pip install triton"
    if q.dtype not in _DTYPES:
        return f"its kernels take bfloat16, float16 and float32, not {q.dtype}"
    if max(q.shape[-1], v.shape[-1]) > 256:
        return f"its kernels hold head dims up to 256, not {max(q.shape[-1], v.shape[-1])}"
    if max(t.stride(2) for t in (q, k, v)) >= 2**23:
        return "its 32-bit offsets inside a tile hold token strides below 2**23; call contiguous()"
    if q.device.type == "cuda":
        capability = torch.cuda.get_device_capability(q.device)
        if capability >= (8, 0):
            return None
        return f"it needs compute capability 8.0, this GPU has {capability}"
    if not interpreted():
        device = q.device.type
        return f"its kernels run on CUDA tensors (or under TRITON_INTERPRET=1), not on {device}"
    if q.dtype == torch.bfloat16:
        return "Triton's interpreter multiplies bfloat16 wrongly; use float32 or float16 there"
    return None


def forward(
    q: Tensor, k: Tensor, v: Tensor,
    schedule: Schedule | None, scale: float, dropout_p: float, seed: Tensor | None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """out (B, Hq, N_q, D_v), laid out like q, and lse (B, Hq, N_q) float32."""
    from sparseflash.kernels.tl.forward import attention_forward

    batch, heads, n_q, _ = q.shape
    out = empty_out(q, v)
    lse = torch.empty(batch, heads, n_q, dtype=torch.float32, device=q.device)
    lists = _lists(schedule and schedule.rows, schedule)

    def arguments():
        tiles, shape = _plan("forward", q, k, v, schedule)
        n_tiles = _cdiv(n_q, tiles.block_m)
        k_desc, v_desc = _descriptors((k, v), tiles.block_n, shape)
        args = (
            q, k, v, k_desc, v_desc, out, lse, *lists, *_strides(q, k, v, out),
            scale * _LOG2E, *_dropout(dropout_p, seed),
            *_counts(q, k, schedule, n_tiles, by_query=True),
        )  # fmt: skip
        options = {**shape, "TMA": k_desc is not None, "DROPOUT": dropout_p > 0, **_options(tiles)}
        return (n_tiles * batch * heads,), args, options

    key = _key(schedule, scale, dropout_p, q, k, v)
    launch(attention_forward, key, (q, k, v, out, lse, *lists, seed), arguments)
    return out, lse


def backward(
    dout: Tensor, dlse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor,
    schedule: Schedule | None, scale: float, dropout_p: float, seed: Tensor | None,
    deterministic: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """dq, dk, dv like q, k, v. The passes use no atomics, so the result is always deterministic."""
    delta, lse2 = backward_rows(dout, dlse, out, lse)
    dk, dv = backward_kv(dout, q, k, v, lse2, delta, schedule, scale, dropout_p, seed)
    dq = backward_q(dout, q, k, v, lse2, delta, schedule, scale, dropout_p, seed)
    return dq, dk, dv


def backward_rows(
    dout: Tensor, dlse: Tensor | None, out: Tensor, lse: Tensor
) -> tuple[Tensor, Tensor]:
    """What both passes need of a query: delta = rowsum(out * dout) - dlse, and its LSE in base 2,
    inf for empty rows.
    """
    from sparseflash.kernels.tl.backward import backward_prepare

    batch, heads, n_q, head_dim = out.shape
    delta, lse2 = torch.empty_like(lse), torch.empty_like(lse)
    dlse_strides = (0, 0, 0) if dlse is None else dlse.stride()

    def arguments():
        n_tiles = _cdiv(n_q, 64)
        args = (
            out, dout, lse, dlse, delta, lse2, *_strides(out, dout), *dlse_strides,
            n_q, n_tiles, heads,
        )  # fmt: skip
        shape = {"HEAD_DIM": head_dim, "BLOCK_D": _padded(head_dim), "BLOCK_M": 64}
        return (n_tiles * batch * heads,), args, {**shape, "LSE_GRAD": dlse is not None}

    dlse_key = dlse is not None and (dlse_strides, dlse.dtype)
    key = (out.shape, out.stride(), dout.stride(), out.dtype, dout.dtype, dlse_key)
    launch(backward_prepare, key, (out, dout, lse, dlse, delta, lse2), arguments)
    return delta, lse2


def backward_kv(
    dout, q, k, v, lse2, delta, schedule, scale, dropout_p, seed
) -> tuple[Tensor, Tensor]:
    """dk and dv, by key tiles over the columns of the mask."""
    from sparseflash.kernels.tl import backward

    dk, dv = torch.empty_like(k), torch.empty_like(v)
    lists = _lists(schedule and schedule.cols, schedule)

    def arguments():
        tiles, shape = _plan("backward_kv", q, k, v, schedule)
        n_tiles = _cdiv(k.shape[2], tiles.block_n)
        q_desc, dout_desc = _descriptors((q, dout), tiles.block_m, shape)
        args = (
            q, k, v, dout, q_desc, dout_desc, dk, dv, lse2, delta, *lists,
            *_strides(q, k, v, dout, dk, dv), scale, scale * _LOG2E, *_dropout(dropout_p, seed),
            *_counts(q, k, schedule, n_tiles, by_query=False),
        )  # fmt: skip
        options = {**shape, "TMA": q_desc is not None, "DROPOUT": dropout_p > 0, **_options(tiles)}
        return (n_tiles * k.shape[0] * k.shape[1],), args, options

    key = _key(schedule, scale, dropout_p, q, k, v, dout)
    tensors = (q, k, v, dout, dk, dv, lse2, delta, *lists, seed)
    launch(backward.backward_kv, key, tensors, arguments)
    return dk, dv


def backward_q(dout, q, k, v, lse2, delta, schedule, scale, dropout_p, seed) -> Tensor:
    """dq, by query tiles over the rows of the mask."""
    from sparseflash.kernels.tl import backward

    dq = torch.empty_like(q)
    lists = _lists(schedule and schedule.rows, schedule)

    def arguments():
        tiles, shape = _plan("backward_q", q, k, v, schedule)
        n_tiles = _cdiv(q.shape[2], tiles.block_m)
        k_desc, v_desc = _descriptors((k, v), tiles.block_n, shape)
        args = (
            q, k, v, dout, k_desc, v_desc, dq, lse2, delta, *lists,
            *_strides(q, k, v, dout, dq), scale, scale * _LOG2E, *_dropout(dropout_p, seed),
            *_counts(q, k, schedule, n_tiles, by_query=True),
        )  # fmt: skip
        options = {**shape, "TMA": k_desc is not None, "DROPOUT": dropout_p > 0, **_options(tiles)}
        return (n_tiles * q.shape[0] * q.shape[1],), args, options

    key = _key(schedule, scale, dropout_p, q, k, v, dout)
    tensors = (q, k, v, dout, dq, lse2, delta, *lists, seed)
    launch(backward.backward_q, key, tensors, arguments)
    return dq


def _key(schedule: Schedule | None, scale: float, dropout_p: float, q: Tensor, *others: Tensor):
    """What the arguments of a launch follow from, but for addresses; see `launch`."""
    blocks = None
    if schedule is not None:
        blocks = (*schedule.numbers, schedule.rows.idx.shape)
    layout = [part for t in others for part in (t.shape, t.stride())]
    return (blocks, scale, dropout_p, q.dtype, q.shape, q.stride(), *layout)


@cache
def interpreted() -> bool:
    """Whether Triton runs kernels in its interpreter; it decides that once, when it is imported."""
    return os.environ.get("TRITON_INTERPRET") == "1"


@cache
def _has_tma(device: torch.device) -> bool:
    if device.type == "cpu":
        return interpreted()
    return torch.cuda.get_device_capability(device)[0] >= 9


@cache
def _has_large_shared_memory(device: torch.device) -> bool:
    """Whether a program may take what the tiles for Hopper need."""
    if device.type == "cpu":
        return True
    return torch.cuda.get_device_properties(device).shared_memory_per_block_optin >= 220 * 1024


def _plan(
    kernel: str, q: Tensor, k: Tensor, v: Tensor, schedule: Schedule | None
) -> tuple[Tiles, dict[str, Any]]:
    """The tiles of a kernel and its compile-time arguments."""
    head_dim, head_dim_v = q.shape[-1], v.shape[-1]
    if schedule is None:
        block_q = block_k = 256
        partial, keys = False, k.shape[2]
    else:
        block_q, block_k = schedule.block_q, schedule.block_k
        partial = schedule.n_partial > 0
        keys = schedule.rows.idx.numel() * block_k / (schedule.rows.ptr.numel() - 1)
    # the interpreter has no registers to run out of: float32 takes the tiles, and the code paths,
    # of 16 bits there
    dtype = torch.float16 if interpreted() else q.dtype
    tiles = tiles_for(
        kernel, max(head_dim, head_dim_v), dtype, hopper=_has_large_shared_memory(q.device),
        partial=partial, keys_per_query=keys, block_q=block_q, block_k=block_k,
    )  # fmt: skip
    if schedule is None:  # no lists: what sticks out of the last tile is all that is partial
        by_key = kernel == "backward_kv"
        rest = q.shape[2] % tiles.block_m if by_key else k.shape[2] % tiles.block_n
        partial = rest > 0
    shape = {
        "HEAD_DIM": head_dim,
        "HEAD_DIM_V": head_dim_v,
        "BLOCK_D": _padded(head_dim),
        "BLOCK_DV": _padded_v(head_dim, head_dim_v),
        "BLOCK_M": tiles.block_m,
        "BLOCK_N": tiles.block_n,
        "BLOCK_Q": block_q,
        "BLOCK_K": block_k,
        "DENSE": schedule is None,
        "PARTIAL": partial,
        "PRECISION": "ieee" if q.dtype == torch.float32 else "tf32",  # of float32 products only
    }
    return tiles, shape


def _options(tiles: Tiles) -> dict[str, int]:
    options = {"num_warps": tiles.num_warps, "num_stages": tiles.num_stages}
    return options | {"maxnreg": tiles.max_registers} if tiles.max_registers else options


def _lists(lists: BlockLists | None, schedule: Schedule | None) -> tuple[Tensor | None, ...]:
    return (*lists, schedule.bits) if lists and schedule else (None,) * 5


def _strides(*tensors: Tensor) -> tuple[int, ...]:
    """Strides of batch, head and token; that of the head dim is 1."""
    return tuple(stride for t in tensors for stride in t.stride()[:3])


def _dropout(dropout_p: float, seed: Tensor | None) -> tuple[Tensor | None, int, float]:
    return seed, keep_threshold(dropout_p), 1.0 / (1.0 - dropout_p)


def _counts(
    q: Tensor, k: Tensor, schedule: Schedule | None, n_tiles: int, *, by_query: bool
) -> tuple[int, ...]:
    """n_q, n_k, tiles, heads, group, and the strides of batch and head in the row (or column) lists
    of the mask.
    """
    stride_b = stride_h = 0
    if schedule:
        query_blocks = _cdiv(schedule.n_q, schedule.block_q)
        lists = query_blocks if by_query else _cdiv(schedule.n_k, schedule.block_k)
        stride_h = lists if schedule.heads > 1 else 0
        stride_b = lists * schedule.heads if schedule.batch > 1 else 0
    heads = q.shape[1]
    return q.shape[2], k.shape[2], n_tiles, heads, heads // k.shape[1], stride_b, stride_h


def _descriptors(
    tensors: tuple[Tensor, Tensor], rows: int, shape: dict[str, Any]
) -> tuple[Any, Any]:
    """Descriptors for the tensor memory accelerator over (rows, D) tiles of the first tensor and
    (rows, D_v) tiles of the second, or None twice; shape: as `_plan` has it.

    Each tensor (B, H, N, D) is seen as one matrix whose row length is its token stride s: element
    (b, h, n, 0) lies in row (b, h offset) // s + n at column (b, h offset) % s. The hardware wants
    16-byte strides and addresses.
    """
    tiles = zip(tensors, (shape["BLOCK_D"], shape["BLOCK_DV"]), strict=True)
    if not all(_has_tma(t.device) and _fits_tma(t, width) for t, width in tiles):
        return None, None
    from triton.tools.tensor_descriptor import TensorDescriptor

    first, second = (
        TensorDescriptor(t, [_matrix_rows(t), t.stride(2)], [t.stride(2), 1], [rows, t.shape[3]])
        for t in tensors
    )
    return first, second


def _fits_tma(t: Tensor, width: int) -> bool:
    batch, heads, n, head_dim = t.shape
    stride_b, stride_h, stride_n, _ = t.stride()
    if head_dim != width or n == 1:
        return False
    if t.data_ptr() % 16 or (t.element_size() * stride_n) % 16:
        return False
    if t.dtype == torch.float32 and not interpreted():
        return False  # ieee products run on the vector units, from registers
    if stride_n < head_dim:  # tokens that share memory
        return False
    head_columns = stride_h % stride_n if heads > 1 else 0
    fits_row = head_columns * (heads - 1) + head_dim <= stride_n and (
        head_columns == 0 or stride_h < stride_n
    )
    return fits_row and (batch == 1 or stride_b % stride_n == 0) and _matrix_rows(t) < 2**31


def _matrix_rows(t: Tensor) -> int:
    last = sum((size - 1) * stride for size, stride in zip(t.shape, t.stride(), strict=True))
    return last // t.stride(2) + 1


def _padded(head_dim: int) -> int:
    return max(16, 1 << (head_dim - 1).bit_length())


def _padded_v(head_dim: int, head_dim_v: int) -> int:
    """The extent of v in the kernels.

    Under wider keys a tile of 32 columns can be the last in shared memory, and there Triton 3.6's
    wgmma reads beyond its end (an illegal access for D = 64, D_v = 32): it gets 64 columns.
    """
    width = _padded(head_dim_v)
    return 64 if width == 32 < head_dim else width


def _cdiv(a: int, b: int) -> int:
    return -(-a // b)
