"""What the tensor memory accelerator copies for the Triton kernels: descriptors of tensors."""

from functools import cache
from typing import Any

import torch
from torch import Tensor

from sparseflash.kernels.common.device import interpreted


@cache
def has_tma(device: torch.device) -> bool:
    """Whether a device has it; Triton's interpreter does, too."""
    if device.type == "cpu":
        return interpreted()
    return torch.version.hip is None and torch.cuda.get_device_capability(device) >= (9, 0)


def descriptors(
    tensors: tuple[Tensor, Tensor], rows: int, widths: tuple[int, int]
) -> tuple[Any, Any]:
    """Descriptors for tiles of the two tensors, (rows, width) each, or None twice.

    Each tensor (B, H, N, D) is seen as one matrix whose row length is its token stride s: element
    (b, h, n, 0) lies in row (b, h offset) // s + n at column (b, h offset) % s. The hardware wants
    16-byte strides and addresses.
    """
    if tensors[0].dtype == torch.float32 and not interpreted():
        return None, None  # ieee products run on the vector units, from registers
    pairs = zip(tensors, widths, strict=True)
    if not all(has_tma(t.device) and fits_tma(t, width) for t, width in pairs):
        return None, None
    from triton.tools.tensor_descriptor import TensorDescriptor

    first, second = (
        TensorDescriptor(t, [matrix_rows(t), t.stride(2)], [t.stride(2), 1], [rows, t.shape[3]])
        for t in tensors
    )
    return first, second


def fits_tma(t: Tensor, width: int) -> bool:
    """Whether the tensor memory accelerator can copy rows of (B, H, N, D) as wide as `width`."""
    batch, heads, n, head_dim = t.shape
    stride_b, stride_h, stride_n, _ = t.stride()
    if head_dim != width or n == 1:
        return False
    if t.data_ptr() % 16 or (t.element_size() * stride_n) % 16:
        return False
    if stride_n < head_dim:  # tokens that share memory
        return False
    head_columns = stride_h % stride_n if heads > 1 else 0
    fits_row = head_columns * (heads - 1) + head_dim <= stride_n and (
        head_columns == 0 or stride_h < stride_n
    )
    return fits_row and (batch == 1 or stride_b % stride_n == 0) and matrix_rows(t) < 2**31


def matrix_rows(t: Tensor) -> int:
    """Rows of the matrix that a descriptor sees, each as long as the token stride."""
    last = sum((size - 1) * stride for size, stride in zip(t.shape, t.stride(), strict=True))
    return last // t.stride(2) + 1
