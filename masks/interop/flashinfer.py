"""FlashInfer's block-sparse rows (BSR), the format that SciPy has under that name."""

from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np

from masks.arrays import to_numpy
from masks.block_lists import FULL
from masks.block_mask import BlockMask
from masks.interop.common import check_built, check_size, slice_lists
from masks.tiles import unpack_bits


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
