"""Two ways to keep padding keys out of `sparseflash.attention`: to hide them, or to skip them."""

from functools import lru_cache
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from experiments.lra.models.attention.base import real_tokens
from masks import Mask
from masks.block_lists import EMPTY, FULL
from masks.tiles import pack_bits
from sparseflash.select.selection import Selection
from sparseflash.select.static import grid_codes, to_device

HIDDEN = -30_000.0  # the score of a padding key: exp of it is 0, and float16 holds it
BLOCK = 128  # of what is skipped
NOWHERE = -(2**30)


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


class Blocks(NamedTuple):
    """A mask in blocks of BLOCK x BLOCK tokens, ready to be cut at the end of a sequence."""

    codes: Tensor  # int32 (1, H or 1, blocks, blocks)  as in a Selection of `tiles`
    tiles: Tensor  # int32 (T + 1, BLOCK, words)  the bit tiles of the mask, then one of all pairs
    column: Tensor  # int32 (blocks, S)  which of `tiles` occur in a column of blocks
    place: Tensor  # int32, as codes  which of these a block is; NOWHERE for an empty one
    prefix: Tensor  # int32 (BLOCK, words)  row t has the bits of the keys 0 to t
    starts: Tensor  # int32 (blocks,)  first token of each
    most: int  # non-empty blocks


@lru_cache(maxsize=32)
def blocks_of(mask: Mask | None, n: int, heads: int, device: torch.device) -> Blocks:
    """`mask` (None: all pairs) for n tokens, a multiple of BLOCK. Copied to the device once."""
    if mask is None:
        codes = np.full((1, n // BLOCK, n // BLOCK), FULL, np.int32)
        bits = np.zeros((0, BLOCK, BLOCK // 32), np.uint32)
    else:
        built = mask.build(n, n, (BLOCK, BLOCK), heads=heads if mask.per_head else None)
        codes, bits = grid_codes(built)[0], built.bits
    every = np.full((1, *bits.shape[1:]), 2**32 - 1, np.uint32)
    kinds = [np.setdiff1d(codes[..., c], EMPTY) for c in range(codes.shape[2])]
    column = np.zeros((len(kinds), max(1, *map(len, kinds))), np.int32)
    place = np.full_like(codes, NOWHERE)
    for c, found in enumerate(kinds):
        column[c, : len(found)] = np.where(found == FULL, len(bits), found)
        here = codes[..., c]
        place[..., c] = np.where(here == EMPTY, NOWHERE, np.searchsorted(found, here))
    keys = np.tril(np.ones((BLOCK, BLOCK), bool))[None]
    return Blocks(
        to_device(codes[None], device),
        to_device(np.concatenate([bits, every]).view(np.int32), device),
        to_device(column, device),
        to_device(place[None], device),
        to_device(pack_bits(keys)[0].view(np.int32), device),
        to_device(np.arange(0, n, BLOCK, dtype=np.int32), device),
        int((codes != EMPTY).sum()),
    )


def skip_padding(blocks: Blocks, lengths: Tensor) -> Selection:
    """The mask between the blocks of queries and keys that hold real tokens, keys cut at the last
    of these. Made on the device, for every sequence.

    A block whose keys are all real is that of the mask. The one key block that holds the last token
    gets new tiles, one for each tile that the mask has in that column.
    """
    batch, slots, known = len(lengths), blocks.column.shape[1], len(blocks.tiles) - 1
    last = lengths - 1
    tiles = blocks.tiles[blocks.column[last // BLOCK]] & blocks.prefix[last % BLOCK][:, None, None]
    first = torch.arange(known, known + batch * slots, slots, dtype=torch.int32, device=last.device)
    cut = (blocks.place + first[:, None, None, None]).clamp_(min=EMPTY)
    left = lengths[:, None] - blocks.starts
    real, whole = left > 0, left >= BLOCK
    codes = torch.where(whole[:, None, None], blocks.codes, cut)
    codes = torch.where(real[:, None, :, None] & real[:, None, None], codes, EMPTY)
    bits = torch.cat([blocks.tiles[:known], tiles.flatten(0, 1)])
    n = len(blocks.starts) * BLOCK
    return Selection(codes, bits, n, n, (BLOCK, BLOCK), max_blocks=batch * blocks.most)
