"""Static masks on the device: built on the host, copied once, remembered."""

from functools import lru_cache
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from masks.algebra import Mask
from masks.block_lists import EMPTY, FULL
from masks.block_mask import BlockMask
from masks.tiles import edge_tiles


class Static(NamedTuple):
    """The codes and bits of a mask as in `Selection`."""

    codes: Tensor
    bits: Tensor
    max_blocks: int  # non-empty blocks


def static_codes(
    mask: Mask | BlockMask,
    n_q: int,
    n_k: int,
    block_size: tuple[int, int],
    heads: int,
    device: torch.device,
    complement: bool = False,
) -> Static:
    """`mask`, or all that is not in it, for these lengths; ValueError if it has others."""
    return _static_codes(mask, n_q, n_k, block_size, heads_of(mask, heads), device, complement)


def heads_of(mask: Mask | BlockMask, heads: int) -> int | None:
    """The heads that the mask has to be built with."""
    return heads if isinstance(mask, Mask) and mask.per_head else None


@lru_cache(maxsize=32)
def _static_codes(mask, n_q, n_k, block_size, heads, device, complement) -> Static:
    blocks = built(mask, n_q, n_k, block_size, heads)
    codes, bits = grid_codes(blocks), blocks.bits
    if complement:
        codes, bits = _complement(codes, blocks)
    return Static(
        to_device(codes, device),
        to_device(bits.view(np.int32), device),
        int((codes != EMPTY).sum()),
    )


def built(
    mask: Mask | BlockMask, n_q: int, n_k: int, block_size: tuple[int, int], heads: int | None
) -> BlockMask:
    """The block mask of `mask`; ValueError where it is a BlockMask of something else."""
    if isinstance(mask, Mask):
        return mask.build(n_q, n_k, block_size, heads=heads)
    if (mask.n_q, mask.n_k, mask.block_size) != (n_q, n_k, block_size):
        raise ValueError(
            f"the mask is for {mask.n_q} x {mask.n_k} tokens in blocks of {mask.block_size}, the "
            f"selection for {n_q} x {n_k} in blocks of {block_size}: pass the Mask it comes from"
        )
    return mask


def grid_codes(blocks: BlockMask) -> np.ndarray:
    """int32 (batch, heads, rows, cols)."""
    lengths = np.diff(blocks.starts, append=blocks.grid.size)
    shape = (blocks.batch, blocks.heads, blocks.rows, blocks.cols)
    return np.repeat(blocks.tiles, lengths).reshape(shape)


def _complement(codes: np.ndarray, blocks: BlockMask) -> tuple[np.ndarray, np.ndarray]:
    """The same tile leaves other pairs over at the edge of the grid than inside it."""
    edges = edge_tiles(blocks.n_q, blocks.n_k, blocks.block_size)
    cut = np.zeros(codes.shape[2:], np.int32)
    cut[-1], cut[:, -1] = cut[-1] + 2, cut[:, -1] + 1
    bits = (~blocks.bits & edges[:, None]).reshape(-1, *blocks.bits.shape[1:])
    partial = codes >= 0
    used, number = np.unique((cut * len(blocks.bits) + codes)[partial], return_inverse=True)
    codes = np.where(codes == FULL, EMPTY, FULL).astype(np.int32)
    codes[partial] = number
    return codes, bits[used]


def to_device(array: np.ndarray, device: torch.device) -> Tensor:
    """A copy to remember: it is there for every stream, and outlives any inference mode."""
    with torch.inference_mode(False):
        return torch.from_numpy(np.array(array, order="C")).to(device)
