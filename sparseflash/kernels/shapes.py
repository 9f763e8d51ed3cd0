"""Extents of tiles along the head dim, and what the tensor memory accelerator can copy."""

from torch import Tensor


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


def padded_dim(head_dim: int) -> int:
    return max(16, 1 << (head_dim - 1).bit_length())


def padded_dim_v(head_dim: int, head_dim_v: int) -> int:
    """The extent of v in the kernels.

    Under wider keys a tile of 32 columns can be the last in shared memory, and there Triton 3.6's
    wgmma reads beyond its end (an illegal access for D = 64, D_v = 32): it gets 64 columns.
    """
    width = padded_dim(head_dim_v)
    return 64 if width == 32 < head_dim else width


def strides(*tensors: Tensor) -> tuple[int, ...]:
    """Strides of batch, head and token; that of the head dim is 1."""
    return tuple(stride for t in tensors for stride in t.stride()[:3])
