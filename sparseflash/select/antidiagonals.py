"""The selector that estimates attention by sums along antidiagonals."""

from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from masks.algebra import Mask
from masks.block_lists import EMPTY
from masks.block_mask import BlockMask
from masks.checks import block_sizes, integer
from sparseflash.cache import cached
from sparseflash.dynamic.static import built, grid_codes, heads_of, to_device
from sparseflash.kernels.common.device import kernels_of, on_nvidia
from sparseflash.select.base import BlockSelector, selector
from sparseflash.select.blocks import SCORES_AT_ONCE, dot
from sparseflash.select.rules import MAX_COLS, adaptive

FINEST = 16  # tokens: the smallest blocks that a static mask is built of


@dataclass(frozen=True, repr=False, eq=False)
class Antidiagonal(BlockSelector):
    """The selectors of `antidiagonal`."""

    stride: int
    probabilities = True

    def scores(self, q: Tensor, k: Tensor) -> Tensor:
        n_q, n_k = q.shape[2], k.shape[2]
        heads = heads_of(self.within, q.shape[1])
        given = (self.within, n_q, n_k, self.block_size, self.stride, heads, q.device)
        if on_nvidia(q) and q.dtype != torch.float64 and -(-n_k // self.block_size[1]) <= MAX_COLS:
            allowed = None if self.within is None else _allowed(*given)
            shape = (self.stride, self.block_size)
            return kernels_of("select").antidiagonal_sums(q, k, *shape, allowed, SCORES_AT_ONCE)
        return block_sums_torch(q, k, self.stride, self.block_size, _allowed(*given))


@selector
def antidiagonal(
    stride: int = 16,
    threshold: float = 0.9,
    block_size: int | tuple[int, int] = 128,
    *,
    min_blocks: int = 1,
    max_blocks: int | None = None,
    within: Mask | BlockMask | None = None,
    always: Mask | BlockMask | None = None,
) -> Antidiagonal:
    """Return the fewest key blocks that hold `threshold` of the attention estimated from
    antidiagonals.

    The mean of its antidiagonal estimates the scores of a stride x stride square: it meets each
    query and each key of the square once. A softmax over the squares of a row gives probabilities,
    which add up over a block. XAttention, arXiv:2503.16428, also takes the first block and the
    diagonal: always=local(0) | sinks(1).

    Args:
        stride: a power of two that divides both block sizes.
        threshold: the share of a row's probability that the blocks taken must reach.
        block_size, within, always: as in `top_k`. Squares outside a `within` that is a Mask have
            probability 0, to `stride` tokens but not finer than 16.
        min_blocks, max_blocks: bounds on the blocks of a row.

    Takes 2 B H N_q N_k D / stride operations, 1 / (2 stride) of dense attention; the memory for
    scores is bounded. Raises ValueError for arguments out of range.
    """
    block_size = block_sizes(block_size)
    integer("stride", stride, min=1)
    if stride & (stride - 1) or any(size % stride for size in block_size):
        raise ValueError(
            f"stride is {stride}: give a power of two that divides the block sizes {block_size}"
        )
    rule = adaptive("mass", "threshold", threshold, min_blocks, max_blocks)
    return Antidiagonal(block_size, within, rule, always, stride)


def block_sums_torch(
    q: Tensor, k: Tensor, stride: int, block_size: tuple[int, int], allowed: Tensor
) -> Tensor:
    """Probabilities of squares, added up over blocks, (B, H, rows, cols): some rows at a time.

    allowed: bool, broadcastable to (B, H, squares of queries, squares of keys).
    """
    block_q, block_k = block_size
    # the queries of a square in reverse, so that one product runs along the antidiagonal
    q_rows = _squares(q, stride, block_q).flip(3).flatten(3)
    k_rows = _squares(k, stride, block_k).flatten(3)
    scale = q.shape[-1] ** -0.5 / stride
    step = max(1, SCORES_AT_ONCE // (q.shape[0] * q.shape[1] * k_rows.shape[2] * block_q))
    step *= block_q  # squares in a part: whole blocks of queries
    parts = []
    for start in range(0, q_rows.shape[2], step):
        part = dot(q_rows[:, :, start : start + step], k_rows).float() * scale
        part = part.masked_fill(~allowed[:, :, start : start + step], -torch.inf)
        p = part.softmax(-1).nan_to_num(0.0)  # a row with nothing allowed has none
        p = p.unflatten(3, (-1, block_k // stride)).sum(4)
        parts.append(p.unflatten(2, (-1, block_q // stride)).sum(3))
    return torch.cat(parts, 2)


def _squares(x: Tensor, stride: int, block: int) -> Tensor:
    """(B, H, N / stride, stride, D), padded with zeros to whole blocks."""
    return F.pad(x, (0, 0, 0, -x.shape[2] % block)).unflatten(2, (-1, stride))


@cached
def _allowed(within, n_q, n_k, block_size, stride, heads, device) -> Tensor:
    """Bool (B, H, squares of queries, squares of keys), extents of 1 where they are the same."""
    q_there, k_there = (
        np.arange(0, -(-n // block) * block, stride) < n
        for n, block in zip((n_q, n_k), block_size, strict=True)
    )
    exists = q_there[:, None] & k_there
    if within is None:
        return to_device(exists[None, None], device)
    fine = max(stride, FINEST)
    sizes = block_size if isinstance(within, BlockMask) else (fine, fine)
    allowed = grid_codes(built(within, n_q, n_k, sizes, heads)) != EMPTY
    for axis, size in zip((2, 3), sizes, strict=True):
        allowed = allowed.repeat(size // stride, axis)
    short = [(0, max(0, n - m)) for n, m in zip(exists.shape, allowed.shape[2:], strict=True)]
    allowed = np.pad(allowed, ((0, 0), (0, 0), *short))
    return to_device(allowed[:, :, : len(q_there), : len(k_there)] & exists, device)
