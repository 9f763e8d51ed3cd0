"""Numbers that launches take: the scale in base 2, strides, extents of tiles."""

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


LOG2E = 1.4426950408889634
LN2 = 0.6931471805599453


def scale_log2(scale: float) -> float:
    """Return the factor of the scores in base 2."""
    return scale * LOG2E


def cdiv(a: int, b: int) -> int:
    return -(-a // b)
