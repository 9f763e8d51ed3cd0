"""Tensors for the tensor memory accelerator (TMA): descriptors, and what it cannot copy."""

from functools import cache
from typing import Any

import torch
from torch import Tensor

from sparseflash.problem import Layout

ALIGNED = "begins at an address that is not a multiple of 16 bytes; clone it"


def panel(width: int, columns: int) -> int:
    """Return what one copy takes of a head dim that is padded to `width`, of which `columns` are
    multiplied: all, or as many as leave out whole panels that would be nothing but zeros.
    """
    if 64 < columns <= 96:
        return 32
    return width if width - columns < 64 else 64


def descriptor(t: Tensor, rows: int, width: int, heads: int = 1) -> Any:
    """Of (heads, rows, width) of a tensor (B, H, N, D); beyond N and D TMA reads zeros, and writes
    nothing.
    """
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    shape = list(t.shape)
    # the stride of an axis of one is not used, but it must be legal
    strides = [8 if n == 1 else s for n, s in zip(shape[:3], t.stride()[:3], strict=True)]
    block = [1, heads, rows, width]
    layout = _shared_layout(heads * rows, width, t.dtype)
    return TensorDescriptor(t, shape, [*strides, 1], block, layout)


def vector_descriptor(t: Tensor, rows: int) -> Any:
    """Of `rows` float32 values of a tensor, seen as a vector."""
    from triton.experimental.gluon import language as gl
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    layout = gl.NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=32, rank=1)
    return TensorDescriptor(t, [t.numel()], [1], [rows], layout)


@cache
def _shared_layout(rows: int, width: int, dtype: torch.dtype) -> Any:
    from triton.experimental.gluon import language as gl

    kind = gl.bfloat16 if dtype == torch.bfloat16 else gl.float16
    return gl.NVMMASharedLayout.get_default_for([1, 1, rows, width], kind)  # pyright: ignore[reportCallIssue]


def not_copied(name: str, shape: Layout, strides: Layout) -> str | None:
    """Why TMA cannot copy tiles of a 16-bit tensor (B, H, N, D), or None."""
    used = [s for n, s in zip(shape[:3], strides[:3], strict=True) if n > 1]
    if all(s > 0 and s % 8 == 0 for s in used):
        return None
    return (
        f"the strides of {name}, {tuple(strides)}, are no positive multiples of 16 bytes;"
        " call contiguous(), or pad its head dim to a multiple of 8"
    )


def fits_tma(t: Tensor) -> bool:
    """Whether TMA can copy tiles of a 16-bit tensor."""
    batch, head, token, last = t.stride()
    if last != 1 or t.data_ptr() % 16:
        return False
    if min(batch, head, token) > 0 and not (batch | head | token) % 8:
        return True
    return not_copied("", t.shape, t.stride()) is None


def empty_like(t: Tensor) -> Tensor:
    """Return an uninitialised tensor like t, with strides for TMA."""
    like = torch.empty_like(t)  # in the memory order of t
    return like if fits_tma(like) else t.new_empty(t.shape)
