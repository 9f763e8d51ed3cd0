"""FlashInfer's block-sparse rows (BSR), the format that SciPy has under that name."""

from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np

from masks.arrays import to_numpy
from masks.block_lists import FULL
from masks.block_mask import BlockMask
from masks.checks import block_sizes, integer
from masks.interop.common import check_built, check_size, in_order, positions, slice_lists
from masks.runs import Grid
from masks.tiles import Tiles, assemble, pack_bits, unpack_bits


class Bsr(NamedTuple):
    """The first arguments of `BlockSparseAttentionWrapper.plan`, under its names.

    N is n_k rounded up to whole blocks: FlashInfer reads whole key blocks, so k and v must be
    padded to N (`mask` hides what was added).
    """

    indptr: Any  # int32 (MB + 1,)
    indices: Any  # int32 (nnz,), key blocks ascending in each row
    M: int
    N: int
    R: int
    C: int
    mask: Any  # bool (nnz, R, C), or None where all blocks are full

    def packed_mask(self) -> Any:
        """`mask` in the bits that FlashInfer makes of it: uint8, one query after the other.

        The bits of a query go through the blocks of its row, lowest bit first. Each block row
        begins a new byte, and the last one only has the queries that exist.
        """
        import torch

        if self.mask is None:
            return None
        mask, indptr = to_numpy(self.mask), to_numpy(self.indptr)
        parts = []
        for row, (begin, end) in enumerate(pairwise(indptr.tolist())):
            queries = min(self.R, self.M - row * self.R)
            bits = mask[begin:end, :queries].swapaxes(0, 1)
            parts.append(np.packbits(bits.ravel(), bitorder="little"))
        return torch.from_numpy(np.concatenate(parts)).to(self.mask.device)


def to_bsr(
    blocks: BlockMask, batch: int = 0, head: int = 0, device: Any = None, *, limit_gib: float = 8
) -> Bsr:
    """One slice for FlashInfer: `wrapper.plan(*bsr[:6], q_heads, kv_heads, dim, mask=bsr.mask)`.

    Heads and batch entries with masks of their own need a wrapper each.

    Args:
        batch, head: the slice.
        device: of the tensors; the CPU by default.
        limit_gib: the most memory that the mask may take. Where any block is partial, each
            non-empty block takes R * C bytes.

    Raises:
        ValueError: a slice that does not exist, or more memory would be needed.
    """
    import torch

    check_built(blocks)
    lists = slice_lists(blocks, batch, head)
    block_q, block_k = blocks.block_size
    tail = blocks.n_k % block_k
    mask = None
    if (lists.tile != FULL).any() or (tail and (lists.idx == blocks.cols - 1).any()):
        check_size("FlashInfer's mask", len(lists.idx) * block_q * block_k, limit_gib)
        bits = np.ones((len(lists.idx), block_q, block_k), bool)
        partial = lists.tile >= 0
        bits[partial] = unpack_bits(blocks.bits[lists.tile[partial]], block_k)
        if tail:
            bits[lists.idx == blocks.cols - 1, :, tail:] = False
        mask = torch.from_numpy(bits).to(device)
    indptr, indices = (torch.from_numpy(a.astype(np.int32)) for a in (lists.ptr, lists.idx))
    n_k = blocks.cols * block_k
    return Bsr(indptr.to(device), indices.to(device), blocks.n_q, n_k, block_q, block_k, mask)


def from_bsr(
    indptr: Any,
    indices: Any,
    n_q: int,
    n_k: int,
    block_size: int | tuple[int, int],
    mask: Any = None,
) -> BlockMask:
    """The exact block mask of BSR arrays or tensors.

    Args:
        indptr, indices: (MB + 1,) and (nnz,): the key blocks of every query block, in any order.
        n_q, n_k: tokens; bits beyond them are dropped.
        block_size: (R, C).
        mask: bool (nnz, R, C); None where all blocks are full.

    Raises:
        ValueError: arrays of other shapes, or blocks out of range or listed twice.
    """
    n_q, n_k = integer("n_q", n_q, min=1), integer("n_k", n_k, min=1)
    grid = Grid(n_q, n_k, *block_sizes(block_size))
    indptr, indices = to_numpy(indptr).astype(np.int64), to_numpy(indices)
    if indptr.shape != (grid.rows + 1,) or indptr[-1] != len(indices):
        raise ValueError(
            f"indptr has shape {indptr.shape} and ends with {indptr[-1]}: give {grid.rows + 1} "
            f"numbers that end with {len(indices)}, as many as there are indices"
        )
    if indptr[0] or (np.diff(indptr) < 0).any():
        raise ValueError("indptr does not ascend from 0: give cumulative sums")
    line = np.repeat(np.arange(grid.rows), np.diff(indptr))
    x, tiles = positions(grid, line, indices), Tiles(grid)
    codes = np.full(len(x), FULL, np.int32)
    if mask is not None:
        bits, shape = to_numpy(mask), (len(x), grid.block_q, grid.block_k)
        if bits.shape != shape:
            raise ValueError(f"mask has shape {bits.shape}: give {shape}, or None for full blocks")
        cut = grid.cut(line, indices)
        for part in tiles.parts(len(x)):
            codes[part] = tiles.codes(pack_bits(bits[part].astype(bool)), cut[part])
    return BlockMask(*assemble(tiles, *in_order(x, codes)))
