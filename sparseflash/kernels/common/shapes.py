"""Numbers that launches take: the scale in base 2, strides, extents of tiles, diagonals."""

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


STEPS = 8  # tiles of a diagonal that one program of backward_bias adds


def near_diagonals(
    n_q: int, n_k: int, block: int, far: tuple[int, ...], radius: int
) -> tuple[int, int, int]:
    """Return the first diagonal of tiles of `block` tokens with one near the main diagonal, how
    many such diagonals there are, and in how many parts each is summed.

    far: the tiles that are near or far, queries x keys: those of backward_q.
    """
    n_tiles, middle = cdiv(n_q, block), n_k - n_q
    reach = radius + sum(far) - block
    first = max((middle - reach) // block + 1, 1 - n_tiles)
    end = min(cdiv(middle + reach, block), cdiv(n_k, block))
    return first, end - first, cdiv(n_tiles, STEPS)


def cdiv(a: int, b: int) -> int:
    return -(-a // b)
