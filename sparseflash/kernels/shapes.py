"""Extents of tiles along the head dim, and strides."""

from torch import Tensor


def padded_dim(head_dim: int) -> int:
    return max(16, 1 << (head_dim - 1).bit_length())


def padded_dim_v(head_dim: int, head_dim_v: int) -> int:
    """Return the extent of v in the kernels.

    Under wider keys a tile of 32 columns can be the last in shared memory, and there Triton 3.6's
    wgmma reads beyond its end (an illegal access for D = 64, D_v = 32): it gets 64 columns.
    """
    width = padded_dim(head_dim_v)
    return 64 if width == 32 < head_dim else width


def strides(*tensors: Tensor) -> tuple[int, ...]:
    """Strides of batch, head and token; that of the head dim is 1."""
    return tuple(stride for t in tensors for stride in t.stride()[:3])
