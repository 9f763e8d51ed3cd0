"""FlashAttention-4 (flash_attn.cute of Dao-AILab/flash-attention).

Its forward walks the key blocks of a query block, its backward the query blocks of a key block.
Both have a list of partial blocks and one of full blocks. As in `masks`, a block at a ragged end is
full when all of its existing tokens are allowed.
"""

from typing import Any, NamedTuple

import numpy as np

from masks.block_lists import BlockLists
from masks.block_mask import BlockMask
from masks.interop import (
    block_codes,
    check_built,
    check_size,
)
from masks.runs import expand


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
