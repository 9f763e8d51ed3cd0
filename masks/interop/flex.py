"""FlexAttention of PyTorch (torch.nn.attention.flex_attention), for torch 2.6 and later.

Its lists are square: for every query block the numbers of all key blocks, the listed ones first,
and again for every key block. A block that the end of the sequence cuts is never full there.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from masks.block_lists import EMPTY
from masks.block_mask import BlockMask
from masks.checks import block_sizes
from masks.interop.common import (
    block_codes,
    check_built,
    check_fields,
    check_mask_mod,
    check_size,
    evaluate,
    from_lists,
)
from masks.runs import Bools, Grid, Ints
from masks.tiles import Tiles

LINES_AT_ONCE = 1024


def to_flex(
    blocks: BlockMask,
    device: Any = None,
    mask_mod: Callable[..., Any] | None = None,
    *,
    limit_gib: float = 8,
) -> Any:
    """FlexAttention's BlockMask, with the same lists as `create_block_mask` makes.

    Args:
        device: of its tensors; the CPU by default.
        mask_mod: the formula (b, h, q, k) -> bool of the same mask. It is called for partial
            blocks, and for all of them where FlexAttention runs without torch.compile. By default
            a lookup of the bit tiles, which works for any mask; a formula may be faster.
        limit_gib: the most memory that the lists may take. There are four of int32, each of batch *
            heads * rows * cols, and a table for the lookup. A million tokens in blocks of 128 take
            1.3 GiB without heads.

    Raises:
        ValueError: more memory would be needed, or mask_mod takes other arguments.
    """
    import torch
    from torch.nn.attention.flex_attention import BlockMask as FlexMask

    check_built(blocks)
    check_mask_mod(mask_mod)
    arrays = 5 if mask_mod is None else 4
    check_size("FlexAttention's square lists", 4 * arrays * blocks.grid.size, limit_gib)
    layout = blocks.layout()
    if blocks.n_q % blocks.block_size[0]:
        np.minimum(layout[:, :, -1, :], 1, out=layout[:, :, -1, :])
    if blocks.n_k % blocks.block_size[1]:
        np.minimum(layout[..., -1], 1, out=layout[..., -1])
    lists = {}
    for name, chosen in (("", layout == 1), ("full_", layout == 2)):
        for side, kind in (("kv", chosen), ("q", chosen.swapaxes(-1, -2))):
            counts, order = _ordered(kind)
            lists[f"{name}{side}_num_blocks"] = torch.from_numpy(counts).to(device)
            lists[f"{name}{side}_indices"] = torch.from_numpy(order).to(device)
    return FlexMask(
        seq_lengths=(blocks.n_q, blocks.n_k),
        BLOCK_SIZE=blocks.block_size,
        mask_mod=tile_lookup(blocks, device) if mask_mod is None else mask_mod,
        **lists,
    )


def tile_lookup(blocks: BlockMask, device: Any = None) -> Callable[..., Any]:
    """Return a mask_mod (b, h, q, k) -> bool of any block mask, which torch.compile can trace.

    It has no branch: two tiles stand in front, an empty and a full one, so every code is an index.
    With `clamp` in its place, FlexAttention's kernel needed more shared memory than an H100 has,
    and torch 2.11 could not write it for FlashAttention-4.
    """
    import torch

    ends = np.zeros((2, *blocks.bits.shape[1:]), np.uint32)
    ends[1] = ~ends[0]
    tiles = np.concatenate([ends, blocks.bits]).view(np.int32)
    code = torch.from_numpy(block_codes(blocks) - EMPTY).to(device)
    words = torch.from_numpy(tiles).to(device)
    (block_q, block_k), batch, heads = blocks.block_size, blocks.batch, blocks.heads

    def mask_mod(b: Any, h: Any, q: Any, k: Any) -> Any:
        tile = code[b % batch, h % heads, q // block_q, k // block_k]
        column = k % block_k
        word = words[tile, q % block_q, column // 32]
        return (word >> (column % 32)) & 1 == 1

    return mask_mod


def from_flex(flex_mask: Any) -> BlockMask:
    """Return the exact block mask of a FlexAttention BlockMask.

    Full blocks are taken from the lists. `mask_mod` is called for the partial blocks, some at a
    time, on the device of the lists; a block found full or empty is stored as such. FlexAttention
    calls every block at a ragged end partial; here it is full when all of its existing tokens are
    allowed.

    Raises:
        ValueError: block sizes other than multiples of 16 up to 256, or lists that contradict each
            other.
    """
    check_fields("flex_mask", flex_mask, "kv_num_blocks", "a BlockMask of FlexAttention")
    n_q, n_k = (int(n) for n in flex_mask.seq_lengths)
    counts, indices = flex_mask.kv_num_blocks, flex_mask.kv_indices
    batch, heads = (1, 1, *counts.shape)[-3:-1]  # a sliced mask may lack them
    block_q, block_k = block_sizes(flex_mask.BLOCK_SIZE)
    grid = Grid(n_q, n_k, block_q, block_k, batch, heads)
    full = flex_mask.full_kv_num_blocks, flex_mask.full_kv_indices

    def codes_of(tiles: Tiles, x: Ints) -> NDArray[np.int32]:
        return evaluate(flex_mask.mask_mod, tiles, x, indices.device)

    return BlockMask(*from_lists(grid, (counts, indices), full, codes_of))


def _ordered(chosen: Bools) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
    """Return counts (..., rows), and columns (..., rows, cols): the chosen ones first, then the
    others.
    """
    lines = np.ascontiguousarray(~chosen).reshape(-1, chosen.shape[-1])
    order = np.empty(lines.shape, np.int32)
    for i in range(0, len(lines), LINES_AT_ONCE):  # argsort gives int64
        order[i : i + LINES_AT_ONCE] = np.argsort(lines[i : i + LINES_AT_ONCE], kind="stable")
    return chosen.sum(-1, dtype=np.int32), order.reshape(chosen.shape)
