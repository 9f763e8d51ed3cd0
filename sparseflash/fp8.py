"""Attention with e4m3 inputs on Hopper GPUs: twice the rate of bf16 products, forward only.

    inputs = quantize(q, k, v)
    out = attention(inputs, mask)

Every block of 128 tokens of a head has one scale for each of q, k and v, so that a few large tokens
cost only their block its precision. See docs/internals/hopper.md for the kernel and its errors.
"""

# pyright: reportCallIssue=false, reportArgumentType=false
# To pyright a launch kernel[grid](...) is a call of the Python function, by its argument list.

from functools import lru_cache
from typing import Literal, NamedTuple, overload

import numpy as np
import torch
from torch import Tensor

from masks import BlockMask, Mask, mask_from
from sparseflash.backends.hopper import missing
from sparseflash.backends.hopper.forward import merge_arguments
from sparseflash.backends.nvidia import multiprocessors
from sparseflash.checks import check_scale, check_shapes
from sparseflash.kernels.launch import FUSED
from sparseflash.kernels.scale import scale_log2
from sparseflash.schedule import Schedule, schedule_for
from sparseflash.select.schedule import schedule_from_selection
from sparseflash.select.selection import Selection
from sparseflash.tiles.lists import indivisible, tile_lists
from sparseflash.tiles.tile_spec import TileSpec

AnyMask = Mask | BlockMask | Selection | np.ndarray | Tensor | None

BLOCK = 128  # tokens to a scale, and to a side of a kernel tile
LARGEST = 448.0  # of e4m3
_SHIFT = 8  # P is multiplied by 2 ** 8, the largest power of two that keeps 1 in the range of e4m3


class Quantized(NamedTuple):
    """q, k and v in e4m3 with the scales of their blocks: x = e4m3 value * scale.

    Head dims are padded with zeros to multiples of 16. `v` is transposed, and inside every group of
    16 its token 8 * half + 2 * quad + pair stands at place 4 * quad + 2 * half + pair.
    """

    q: Tensor  # (B, H_q, N_q, D)
    k: Tensor  # (B, H_kv, N_k, D)
    v: Tensor  # (B, H_kv, D_v, N_k rounded up to 16)
    q_scale: Tensor  # float32 (B, H_q, ceil(N_q / 128))
    k_scale: Tensor  # float32 (B, H_kv, ceil(N_k / 128))
    v_scale: Tensor  # float32 (B, H_kv, ceil(N_k / 128))
    k_table: Tensor  # float32 (B, H_kv, ceil(N_k / 128), 2): k_scale, log2 of what P is scaled by
    out_scale: Tensor  # float32 (B, H_kv): what the kernel's output is scaled by
    head_dim: int
    head_dim_v: int


def quantize(q: Tensor, k: Tensor, v: Tensor) -> Quantized:
    """Bring attention's inputs into e4m3, with one scale to 128 tokens of a head.

    q: (B, H_q, N_q, D); k: (B, H_kv, N_k, D); v: (B, H_kv, N_k, D_v), H_q a multiple of H_kv; of
        any floating dtype, on any device.
    Raises ValueError for shapes that do not fit together, and for inputs that ask for gradients.
    """
    _check(q, k, v)
    with torch.no_grad():
        q8, q_scale = _to_e4m3(q)
        k8, k_scale = _to_e4m3(k)
        # a block of far smaller values than its head shares the scale of larger ones, so that P,
        # which is scaled by their ratio, keeps its range
        largest = v.abs().amax((2, 3)).float()
        v8, v_scale = _to_e4m3(v, least=largest[..., None] * 2.0**-6)
        v_max = v_scale.amax(-1)
        shift = _SHIFT + torch.log2(v_scale / v_max[..., None])
        k_table = torch.stack([k_scale, shift], -1)
        out_scale = v_max * 2.0**-_SHIFT
    return Quantized(
        q8, k8, _transposed(v8), q_scale, k_scale, v_scale, k_table, out_scale,
        q.shape[-1], v.shape[-1],
    )  # fmt: skip


def dequantize(inputs: Quantized) -> tuple[Tensor, Tensor, Tensor]:
    """The q, k and v (float32) that the e4m3 values and their scales stand for."""
    n_k = inputs.k.shape[2]
    b, h, d, n = inputs.v.shape
    v = inputs.v.float().mT.reshape(b, h, n // 16, 4, 2, 2, d)  # quad, half, pair
    v = v.transpose(3, 4).reshape(b, h, n, d)[:, :, :n_k, : inputs.head_dim_v]

    def scaled(x: Tensor, scale: Tensor) -> Tensor:
        return x.float() * scale.repeat_interleave(BLOCK, -1)[..., : x.shape[2], None]

    q, k = (x[..., : inputs.head_dim] for x in (inputs.q, inputs.k))
    return scaled(q, inputs.q_scale), scaled(k, inputs.k_scale), scaled(v, inputs.v_scale)


def unsupported(inputs: Quantized) -> str | None:
    """Why `attention` cannot run these inputs, or None."""
    if not inputs.q.is_cuda:
        return f"its kernel runs on CUDA tensors, not on {inputs.q.device.type}"
    dims = inputs.head_dim, inputs.head_dim_v
    if max(dims) > 128:
        return f"its kernel holds head dims up to 128, not {max(dims)}"
    return missing(inputs.q.device)


@overload
def attention(
    inputs: Quantized,
    mask: AnyMask = None,
    *,
    scale: float | None = None,
    return_lse: Literal[False] = False,
) -> Tensor: ...
@overload
def attention(
    inputs: Quantized, mask: AnyMask = None, *, scale: float | None = None,
    return_lse: Literal[True],
) -> tuple[Tensor, Tensor]: ...  # fmt: skip
@torch.no_grad()
def attention(
    inputs: Quantized, mask: AnyMask = None, *, scale: float | None = None, return_lse: bool = False
) -> Tensor | tuple[Tensor, Tensor]:
    """softmax(scale q k^T, over the allowed keys) v: (B, H_q, N_q, D_v) bfloat16, no gradients.

    mask, scale, return_lse: as in `sparseflash.attention`. The kernel's tiles are 128 x 128 tokens:
        finer blocks of a `BlockMask` are merged, which computes more and changes no result.
    On normal inputs out is within 6 % of exact attention in the Frobenius norm, 5 % of it from the
    rounding of q, k and v and 3 % from that of P. LSE is within 0.05.
    Raises ValueError where `unsupported` has a reason, and for a mask that does not fit.
    """
    reason = unsupported(inputs)
    if reason is not None:
        raise ValueError(f"fp8 attention cannot run this call: {reason}")
    if scale is not None:
        check_scale(scale)
    factor = inputs.head_dim**-0.5 if scale is None else float(scale)
    schedule = _schedule(mask, inputs.q, inputs.k)
    out, lse = _forward(inputs, schedule, factor)
    return (out, lse) if return_lse else out


def _check(q: Tensor, k: Tensor, v: Tensor) -> None:
    for name, x in (("q", q), ("k", k), ("v", v)):
        if x.ndim != 4 or 0 in x.shape:
            raise ValueError(
                f"{name} has shape {tuple(x.shape)}; it must be (batch, heads, length, head dim),"
                " every extent at least 1"
            )
        if not x.dtype.is_floating_point or x.device != q.device:
            raise ValueError(f"{name} is {x.dtype} on {x.device}; pass floats on {q.device}")
        if x.requires_grad and torch.is_grad_enabled():
            raise ValueError(
                f"{name} asks for gradients, and fp8 attention has none:"
                " detach() it, or use sparseflash.attention"
            )
    check_shapes(q, k, v)


def _to_e4m3(x: Tensor, least: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """x (B, H, N, D) in e4m3, D rounded up to 16, and its scales (B, H, ceil(N / 128)).

    least: of the largest magnitude of a block that the scale goes by.
    """
    b, h, n, d = x.shape
    blocks = -(-n // BLOCK)
    padded = torch.nn.functional.pad(x.float(), (0, -d % 16, 0, blocks * BLOCK - n))
    padded = padded.view(b, h, blocks, BLOCK, -1)
    largest = padded.abs().amax((3, 4))
    if least is not None:
        largest = torch.maximum(largest, least)
    scale = torch.where(largest > 0, largest / LARGEST, 1.0)
    values = (padded / scale[..., None, None]).clamp(-LARGEST, LARGEST)
    values = values.to(torch.float8_e4m3fn).view(b, h, blocks * BLOCK, -1)
    return values[:, :, :n].contiguous(), scale


def _transposed(v: Tensor) -> Tensor:
    """(B, H, N, D) -> (B, H, D, N rounded up to 16), tokens in the order of `Quantized.v`."""
    b, h, n, d = v.shape
    # torch pads no e4m3 tensor: bytes
    v = torch.nn.functional.pad(v.view(torch.uint8), (0, 0, 0, -n % 16))
    v = v.view(b, h, -1, 2, 4, 2, d).transpose(3, 4).reshape(b, h, -1, d)
    return v.mT.contiguous().view(torch.float8_e4m3fn)


def _schedule(mask: AnyMask, q: Tensor, k: Tensor) -> Schedule | None:
    """The schedule of a mask, its blocks such that whole ones make up a tile of 128 keys."""
    if mask is None:
        return None
    if isinstance(mask, Tensor):
        mask = mask.detach().cpu().numpy()
    if isinstance(mask, np.ndarray):
        mask = mask_from(mask)
    extents = (q.shape[2], k.shape[2], q.shape[0], q.shape[1])
    if isinstance(mask, Selection):
        schedule = schedule_from_selection(mask, *extents, q.device)
        reason = indivisible(schedule.facts, _spec(q, k))
        if reason is not None:
            raise ValueError(f"fp8 attention cannot run this call: {reason}")
        return schedule
    if isinstance(mask, BlockMask) and mask.block_size[1] % BLOCK:
        mask = _coarsened(mask)
    return schedule_for(mask, *extents, q.device)


@lru_cache(maxsize=16)
def _coarsened(mask: BlockMask) -> BlockMask:
    block_q, block_k = mask.block_size
    if BLOCK % block_k:
        raise ValueError(
            f"the mask has blocks of {block_k} keys; for fp8 build it with block_size=128, or any"
            " that divides 128"
        )
    return mask.coarsen((max(block_q, 128) if 128 % block_q == 0 else block_q, BLOCK))


def _spec(q: Tensor, k: Tensor) -> TileSpec:
    extents = q.shape[2], k.shape[2], *q.shape[:2], k.shape[1]
    return TileSpec(True, BLOCK, BLOCK, *extents, multiprocessors(q.device))


def _forward(inputs: Quantized, schedule: Schedule | None, scale: float) -> tuple[Tensor, Tensor]:
    from triton.experimental.gluon import language as gl
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    from sparseflash.kernels.hopper.forward_fp8 import attention_forward_fp8
    from sparseflash.kernels.tl.merge_parts import merge_parts

    q, k, v = inputs[:3]
    (batch, heads, n_q, dim), kv_heads, dim_v = q.shape, k.shape[1], v.shape[2]
    spec = _spec(q, k)
    lists = tile_lists(schedule, spec, q.device)
    out = torch.empty(batch, heads, n_q, dim_v, dtype=torch.bfloat16, device=q.device)
    lse = torch.empty(batch, heads, n_q, dtype=torch.float32, device=q.device)
    block_d, block_dv = (max(32, 1 << (n - 1).bit_length()) for n in (dim, dim_v))
    split = lists.n_parts > 0
    part_out, part_lse = out, lse
    if split:
        n_slots = batch * heads * lists.n_parts
        part_out = torch.empty(n_slots, BLOCK, block_dv, dtype=torch.float32, device=q.device)
        part_lse = torch.empty(n_slots, BLOCK, dtype=torch.float32, device=q.device)
    counter = torch.zeros(1, dtype=torch.int32, device=q.device)

    def descriptor(x: Tensor, rows: int, cols: int) -> TensorDescriptor:
        block = [1, 1, rows, cols]
        dtype = gl.bfloat16 if x.dtype == torch.bfloat16 else gl.float8e4nv
        layout = gl.NVMMASharedLayout.get_default_for(block, dtype)
        return TensorDescriptor(x, list(x.shape), list(x.stride()), block, layout)

    stages = 3 if max(block_d, block_dv) > 64 else 4
    with torch.cuda.device(q.device):
        attention_forward_fp8[(spec.sms,)](
            descriptor(q, 64, block_d), descriptor(k, BLOCK, block_d),
            descriptor(v, block_dv, BLOCK), descriptor(out, 64, block_dv),
            out, lse, part_out, part_lse, counter,
            inputs.q_scale, inputs.k_table, inputs.out_scale,
            lists.items, lists.idx, lists.bit, lists.bits,
            lists.n_items, lists.n_long, lists.batch, lists.heads, lists.n_parts,
            n_q, heads, heads // kv_heads, batch * heads, dim_v, scale_log2(scale),
            STAGES=stages, PARTIAL=lists.partial, SPLIT=split,
            num_warps=4, maxnreg=168, **FUSED,
        )  # fmt: skip
        if split:
            grid, args, options = merge_arguments(lists, part_out, part_lse, out, lse)
            merge_parts[grid](*args, **options, **FUSED)
    return out[..., : inputs.head_dim_v], lse
