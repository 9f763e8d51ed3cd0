"""Block diffusion over packed documents, in two streams."""

import torch
from torch import Tensor

from masks.checks import block_sizes, flag, integer
from sparseflash.dynamic.selection import Selection
from sparseflash.packed.blocks import from_spans
from sparseflash.packed.offsets import check_offsets
from sparseflash.packed.spans import diffusion_spans


@torch.no_grad()
def block_diffusion(
    cu_seqlens: Tensor,
    n: int,
    size: int,
    *,
    interleaved: bool = False,
    block_size: int | tuple[int, int] = 128,
) -> Selection:
    """Return the training mask of block diffusion (arXiv 2503.09573) over packed documents.

    Every document is there twice, as a noisy and as a clean copy, and is cut into token blocks of
    `size` from its first token on. A noisy block sees itself, and the clean blocks of its document
    strictly before it. A clean block sees the clean blocks of its document up to itself. With one
    document of n / 2 tokens this is `masks.block_diffusion(size)`.

    Args:
        cu_seqlens: int32 or int64 (M + 1,), where each of M documents begins in one copy, and where
            the last one ends, at most at n / 2. Or (B, M + 1), a packing for every batch entry.
        n: tokens of q and k, both copies together; an even number.
        size: tokens of a token block, >= 1.
        interleaved: the noisy and the clean copy of a document follow one another, and then comes
            the next document: `masks.block_diffusion(size) >> masks.packed(lengths)`, the lengths
            of both copies together. Otherwise tokens 0 to n / 2 - 1 are the noisy copies, and the
            clean ones begin at n / 2.
        block_size: tokens, one size or (block_q, block_k).

    Raises:
        ValueError: arguments of a wrong type, shape or range, and values of `cu_seqlens` on a CPU
            that do not ascend from 0 to at most n / 2. Those on a GPU are not read.
    """
    block_q, block_k = block_size = block_sizes(block_size)
    n, size = integer("n", n, min=2), integer("size", size, min=1)
    interleaved = flag("interleaved", interleaved)
    if n % 2:
        raise ValueError(f"n is {n}: give an even number, for a noisy and a clean copy")
    half = n // 2
    offsets = check_offsets("cu_seqlens", cu_seqlens, half)
    size = min(size, half)
    spans = diffusion_spans(offsets, n, size, interleaved)
    rows, cols = -(-n // block_q), -(-n // block_k)
    # A row of blocks within one token block has partial blocks where its two spans begin and end.
    # One with several has them also near its tokens, in both copies. Where a copy of a document
    # ends in a row, all that the copy sees may be partial.
    near = (block_q + 2 * size) // block_k + 2
    several = min(rows, 2 * (half // size + offsets.shape[1]))
    room = 4 * rows + 3 * near * several + 2 * (cols + 2 * rows) + cols
    seen = sum(min(_clean_keys(row, block_size, half) + 2 * near + 2, cols) for row in range(rows))
    most = rows * cols if interleaved else min(seen, rows * cols)
    batch = len(offsets)
    return from_spans(spans, block_size, batch * min(room, most), batch * most)


def _clean_keys(row: int, block_size: tuple[int, int], half: int) -> int:
    """Blocks of clean keys before the last token of a row of blocks; both copies lie in halves."""
    block_q, block_k = block_size
    first, last = row * block_q, min((row + 1) * block_q, 2 * half) - 1
    place = half - 1 if first < half <= last else last % half
    return place // block_k + 1
