"""FlashAttention-4 (flash_attn.cute of Dao-AILab/flash-attention).

Its forward walks the key blocks of a query block, its backward the query blocks of a key block.
Both have a list of partial blocks and one of full blocks. As in `masks`, a block at a ragged end is
full when all of its existing tokens are allowed.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from masks.arrays import to_numpy
from masks.block_lists import BlockLists
from masks.block_mask import BlockMask
from masks.checks import block_sizes, integer
from masks.interop.common import (
    block_codes,
    check_built,
    check_fields,
    check_mask_mod,
    check_size,
    evaluate,
    from_lists,
)
from masks.runs import Grid, Ints, expand
from masks.tiles import Tiles


class BlockSparseTensors(NamedTuple):
    """The fields of `flash_attn.cute.block_sparsity.BlockSparseTensorsTorch`, in its order.

    Counts are int32 (batch or 1, heads or 1, lines), lists int32 (..., lines, longest list), with 0
    after the last entry. Lines are query blocks forward and key blocks backward.
    """

    mask_block_cnt: Any  # partial blocks
    mask_block_idx: Any
    full_block_cnt: Any = None
    full_block_idx: Any = None
    cu_total_m_blocks: Any = None
    cu_block_idx_offsets: Any = None
    block_size: tuple[int, int] | None = None
    dq_write_order: Any = None
    dq_write_order_full: Any = None
    spt: bool | None = None


class Fa4Mask(NamedTuple):
    """What `flash_attn_func` takes for one mask.

    `forward` is its block_sparse_tensors, `backward` its block_sparse_tensors_bwd. Partial blocks
    also need a mask_mod, a CuTe function. It can look up `aux_tensors`, which is None where no
    block is partial.
    """

    forward: BlockSparseTensors
    backward: BlockSparseTensors
    aux_tensors: list[Any] | None  # [code int32 (B, H, rows, cols), bits int32 (T, block_q, words)]


def to_fa4(blocks: BlockMask, device: Any = None, *, limit_gib: float = 8) -> Fa4Mask:
    """Block lists for FlashAttention-4, compact: as wide as the longest list.

    FlashAttention-4 evaluates partial blocks by a mask_mod written in CuTe. For any mask it can be:


        tile = code[b, h, q // block_q, k // block_k]      (b, h: 0 where that extent is 1)
        allowed = tile == -1 or tile >= 0 and
                  bits[tile, q % block_q, k % block_k // 32] >> (k % block_k % 32) & 1

    with code and bits the two `aux_tensors`. A formula of the pattern works as well. On an H100,
    FlashAttention-4 needs blocks of 128 x 128 for head dimensions up to 128. Its own type is
    `BlockSparseTensorsTorch(*mask.forward)`.

    Args:
        device: of the tensors; the CPU by default.
        limit_gib: the most memory that a list or table may take.

    Raises:
        ValueError: more memory would be needed.
    """
    import torch

    check_built(blocks)
    forward, backward = (
        _padded(lists, lines, blocks, device, limit_gib)
        for lists, lines in ((blocks.csr(), blocks.rows), (blocks.csc(), blocks.cols))
    )
    aux = None
    if len(blocks.bits):
        check_size("the table of tiles", 4 * blocks.grid.size, limit_gib)
        arrays = block_codes(blocks), blocks.bits.view(np.int32).copy()
        aux = [torch.from_numpy(array).to(device) for array in arrays]
    return Fa4Mask(forward, backward, aux)


def from_fa4(
    forward: Any,
    n_q: int,
    n_k: int,
    *,
    aux_tensors: Any = None,
    mask_mod: Callable[..., Any] | None = None,
) -> BlockMask:
    """The exact block mask of forward lists, ours or a `BlockSparseTensorsTorch`.

    Args:
        forward: lists by query block, with `block_size`.
        n_q, n_k: tokens.
        aux_tensors: those of `to_fa4`, for partial blocks.
        mask_mod: without them, the formula (b, h, q, k) -> bool in PyTorch. It is called for
            partial blocks only.

    Raises:
        ValueError: partial blocks with neither, no block_size, or lists of another shape.
    """
    check_mask_mod(mask_mod)
    wanted = "lists by query block, such as to_fa4(blocks).forward"
    check_fields("forward", forward, "mask_block_cnt", wanted)
    if forward.block_size is None:
        raise ValueError("block_size is None: give forward._replace(block_size=(queries, keys))")
    n_q, n_k = integer("n_q", n_q, min=1), integer("n_k", n_k, min=1)
    extents = tuple(forward.mask_block_cnt.shape[:2])
    grid = Grid(n_q, n_k, *block_sizes(forward.block_size), *extents)

    def codes_of(tiles: Tiles, x: Ints) -> NDArray[np.int32]:
        if not len(x):
            return np.zeros(0, np.int32)
        if aux_tensors is not None:
            tile, bits = (to_numpy(tensor) for tensor in aux_tensors)
            shapes = (*extents, grid.rows, grid.cols), tiles.exists.shape[1:]
            if (tile.shape, bits.shape[1:]) != shapes or tile.max() >= len(bits):
                raise ValueError(
                    f"aux_tensors have shapes {tile.shape} and {bits.shape}: give those of these "
                    f"lists, {shapes[0]} and (tiles, *{shapes[1]})"
                )
            tile = tile.reshape(-1)[x]
            if (tile < 0).any():
                raise ValueError("a partial block has no tile: give the aux_tensors of these lists")
            _, row, col = grid.split(x)
            return tiles.codes_of(bits.view(np.uint32), tile, grid.cut(row, col))
        if mask_mod is not None:
            return evaluate(mask_mod, tiles, x, forward.mask_block_idx.device)
        raise ValueError(f"{len(x)} blocks are partial: give aux_tensors, or the mask_mod")

    partial = forward.mask_block_cnt, forward.mask_block_idx
    full = forward.full_block_cnt, forward.full_block_idx
    return BlockMask(*from_lists(grid, partial, full, codes_of))


def _padded(
    lists: BlockLists, lines: int, blocks: BlockMask, device: Any, limit_gib: float
) -> BlockSparseTensors:
    import torch

    shape = (blocks.batch, blocks.heads, lines)
    ends = lists.ptr[:-1], lists.mid, lists.ptr[1:]
    tensors = []
    for begin, end in (ends[:2], ends[1:]):
        count = end - begin
        width = max(1, int(count.max()))
        check_size("the lists", 4 * len(count) * width, limit_gib)
        padded = np.zeros((len(count), width), np.int32)
        line, place = expand(np.zeros_like(count), count)
        padded[line, place] = lists.idx[np.repeat(begin, count) + place]
        arrays = count.astype(np.int32).reshape(shape), padded.reshape(*shape, width)
        tensors += [torch.from_numpy(array).to(device) for array in arrays]
    return BlockSparseTensors(*tensors, block_size=blocks.block_size)
