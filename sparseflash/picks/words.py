"""Which queries take which chunk of keys, as bits: int16 words of 16 queries each."""

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from masks.algebra import Mask
from masks.patterns.bands import causal
from masks.tiles import edge_tiles
from sparseflash.cache import cached
from sparseflash.dynamic.selection import Selection, number_tiles, to_device

GROUP = 16  # queries in a word; it divides every block size


def words_of(taken: Tensor) -> Tensor:
    """int16 (B, heads, groups, chunks) of bool (B, heads, n, chunks), the first query in bit 0."""
    weight = 1 << torch.arange(GROUP, dtype=torch.int32, device=taken.device)[:, None]
    taken = F.pad(taken, (0, 0, 0, -taken.shape[2] % GROUP)).unflatten(2, (-1, GROUP))
    return (taken * weight).sum(3, dtype=torch.int32).to(torch.int16)


def taken_by(words: Tensor, n: int) -> Tensor:
    """bool (B, heads, n, chunks), what `words_of` was given."""
    bit = torch.arange(GROUP, dtype=torch.int16, device=words.device)[:, None]
    return ((words[..., None, :] >> bit) & 1).flatten(2, 3)[:, :, :n] != 0


def selection_of(
    words: Tensor, n_q: int, n_k: int, block_size: tuple[int, int], chunk: int,
    capacity: int | None,
) -> Selection:  # fmt: skip
    """Return the block mask of what every query picked.

    words: (B, heads, groups, chunks), whose groups fill the last query block. capacity: room for
        partial blocks, of which those beyond are taken whole; None waits for the device to count.
    """
    block_q, block_k = block_size
    rows, cols = -(-n_q // block_q), -(-n_k // block_k)
    words = words.unflatten(2, (rows, -1))  # (B, heads, rows, block_q / 16, chunks)
    picked = (words != 0).any(3)
    partial = picked & (words != _existing(n_q, block_q, words.device)).any(3)
    per_chunk = chunk // block_k
    picked, partial = (by_block(x, per_chunk, cols) for x in (picked, partial))
    room = min(capacity or int(partial.sum()), picked.numel())
    code, cell = number_tiles(picked, partial, room)
    row, col = cell // cols, cell % cols
    word = words.flatten(0, 2)[row, :, col // per_chunk]  # (T, block_q / 16)
    bit = torch.arange(GROUP, dtype=torch.int16, device=code.device)
    chosen = ((word[..., None] >> bit) & 1).flatten(1) != 0  # (T, block_q)
    keys = _key_words(n_k, block_size, code.device)[(col == cols - 1).int()]
    bits = torch.where(chosen[..., None], keys[:, None], 0)
    return Selection(code, bits, n_q, n_k, block_size, code.numel(), owned=room)


def up_to_itself(n_q: int, n_k: int) -> Mask:
    """Return the mask of the keys up to each query, the last of which stands at the last key."""
    return causal() if n_q == n_k else causal(align="bottom_right")


def by_block(x: Tensor, per_chunk: int, cols: int) -> Tensor:
    """From chunks to the key blocks of each."""
    return x[..., None].expand(*x.shape, per_chunk).flatten(-2)[..., :cols]


@cached
def _existing(n: int, block_q: int, device: torch.device) -> Tensor:
    """int16 (rows, block_q / 16, 1): words of all queries that exist."""
    there = np.arange(n + -n % block_q).reshape(-1, block_q // GROUP, GROUP) < n
    words = (there << np.arange(GROUP)).sum(-1, keepdims=True)
    return to_device(words.astype(np.uint16).view(np.int16), device)


@cached
def _key_words(n: int, block_size: tuple[int, int], device: torch.device) -> Tensor:
    """int32 (2, words): the bits of the keys in an inner block, and in the last."""
    return to_device(edge_tiles(n, n, block_size)[:2, 0].view(np.int32), device)
