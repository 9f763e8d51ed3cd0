"""Two ways to keep padding keys out of `sparseflash.attention`: to hide them, or to skip them."""

import numpy as np
import torch
from torch import Tensor

from experiments.models.attention.base import real_tokens
from masks.block_lists import EMPTY, FULL
from masks.block_mask import pack_bits
from masks.select.selection import Selection

HIDDEN = -30_000.0  # the score of a padding key: exp of it is 0, and float16 holds it
BLOCK = 128  # of what is skipped


def hide_padding(q: Tensor, k: Tensor, lengths: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """q and k with further features, up to the next multiple of 8, whose product is 0 for real keys
    and HIDDEN for padding ones.

    One copy each, with the tokens outermost as the projection lays them out; the gradients are
    views.
    """
    batch, heads, n, head_dim = k.shape
    extra = 8 - head_dim % 8
    ones = torch.full((1, 1, 1, 1), 1 / scale, dtype=q.dtype, device=q.device)
    hide = (~real_tokens(lengths, n) * (HIDDEN / extra)).to(k.dtype)[:, :, None, None]
    q = torch.cat([q.transpose(1, 2), ones.expand(batch, q.shape[2], heads, extra)], dim=3)
    k = torch.cat([k.transpose(1, 2), hide.expand(-1, -1, heads, extra)], dim=3)
    return q.transpose(1, 2), k.transpose(1, 2)


def skip_padding(lengths: Tensor, n: int, heads: int, tiles: Tensor) -> Selection:
    """The blocks of queries and keys that hold real tokens, made on the device.

    n: tokens, a multiple of BLOCK; heads: 1, or so many that see the same; tiles: `prefix_tiles`.
    """
    left = lengths[:, None] - torch.arange(0, n, BLOCK, dtype=torch.int32, device=lengths.device)
    keys = torch.where(left >= BLOCK, FULL, torch.where(left > 0, left - 1, EMPTY))
    codes = torch.where(left[:, :, None] > 0, keys[:, None], EMPTY).to(torch.int32)
    codes = codes[:, None].expand(-1, heads, -1, -1)
    return Selection(codes, tiles, n, n, (BLOCK, BLOCK), most=codes.numel())


def prefix_tiles() -> Tensor:
    """int32 (BLOCK - 1, BLOCK, words): tile t of a block allows its first t + 1 keys."""
    keys = np.arange(BLOCK) <= np.arange(BLOCK - 1)[:, None, None]
    bits = pack_bits(np.broadcast_to(keys, (BLOCK - 1, BLOCK, BLOCK)))
    return torch.from_numpy(bits.view(np.int32))
