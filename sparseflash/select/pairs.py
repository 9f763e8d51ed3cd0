"""A selection of the pairs of tokens that a model picked itself."""

import torch
import torch.nn.functional as F
from torch import Tensor

from sparseflash.select.selection import Selection, number_tiles


def selection_of_pairs(pairs: Tensor, heads: int, block: int) -> Selection:
    """Return the selection of bool (B, H, N_q, N_k) for q of `heads` heads, a multiple of H.

    Waits for the device, to count the tiles.
    """
    n_q, n_k = pairs.shape[2:]
    if pairs.shape[1] > 1:
        pairs = pairs.repeat_interleave(heads // pairs.shape[1], 1)

    def cells(outside: bool) -> Tensor:  # (B, H, rows, cols, block, block)
        padded = F.pad(pairs, (0, -n_k % block, 0, -n_q % block), value=outside)
        return padded.unflatten(3, (-1, block)).unflatten(2, (-1, block)).transpose(3, 4)

    inside = cells(False)
    taken, full = inside.flatten(4).any(4), cells(True).flatten(4).all(4)
    partial = taken & ~full
    room = int(partial.sum())
    codes, cell = number_tiles(taken, partial, room)
    tiles = inside.flatten(0, 3)[cell].unflatten(2, (-1, 32))  # (T, block, words, 32)
    weights = 1 << torch.arange(32, device=pairs.device)
    words = (tiles * weights).sum(3)
    words = torch.where(words >= 2**31, words - 2**32, words).int()
    return Selection(codes, words, n_q, n_k, (block, block), codes.numel(), owned=room)
