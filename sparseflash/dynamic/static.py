"""Static masks on the device: built on the host, copied once, remembered."""

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from masks.algebra import Mask
from masks.block_lists import EMPTY, FULL
from masks.block_mask import BlockMask
from masks.tiles import Tiles
from sparseflash.cache import cached


class Static(NamedTuple):
    """The codes and bits of a mask as in `Selection`."""

    codes: Tensor
    bits: Tensor
    max_blocks: int  # non-empty blocks


def heads_of(mask: Mask | BlockMask | None, heads: int | None) -> int | None:
    """Return the heads that the mask has to be built with; None where they do not matter."""
    return heads if isinstance(mask, Mask) and mask.per_head else None


@cached
def static_codes(
    mask: Mask | BlockMask,
    n_q: int,
    n_k: int,
    block_size: tuple[int, int],
    heads: int | None,
    device: torch.device,
    complement: bool = False,
) -> Static:
    """`mask`, or all that is not in it, for these lengths; ValueError if it has others.

    heads: those of `heads_of`.
    """
    blocks = built(mask, n_q, n_k, block_size, heads)
    codes, bits = grid_codes(blocks), blocks.bits
    if complement:
        tiles, partial = Tiles(blocks.grid), codes >= 0
        _, row, col = blocks.grid.split(np.flatnonzero(partial))
        cut = blocks.grid.cut(row, col)
        codes, own = (EMPTY + FULL) - codes, codes[partial]
        codes[partial] = tiles.codes_of(~bits, own, cut)
        bits = tiles.bits
    max_blocks = int((codes != EMPTY).sum())
    return Static(to_device(codes, device), to_device(bits.view(np.int32), device), max_blocks)


def built(
    mask: Mask | BlockMask, n_q: int, n_k: int, block_size: tuple[int, int], heads: int | None
) -> BlockMask:
    """Return the block mask of `mask`; ValueError where it is a BlockMask of something else."""
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


def to_device(array: np.ndarray, device: torch.device) -> Tensor:
    """Return a copy to remember: it is there for every stream, and outlives any inference mode."""
    with torch.inference_mode(False):
        return torch.from_numpy(np.array(array, order="C")).to(device)
