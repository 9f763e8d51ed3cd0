"""How tiles with scattered entries come to need the same minor tokens at the same time.

Persistent programs walk lists in ascending order. Where entries are scattered at random, what a
program reads lies in L2 only if the others are at about the same place of their lists. They begin
at the same time, but lists of unlike lengths drive them apart. Two measures keep them together:

- Tiles run in the order of their lengths, the longest first. Tiles that run at the same time are
  nearly as long, and one that is done early takes the longest that is left.
- Long lists are cut into bands. All tiles run a band before any of them begins the next.
"""

import torch
from torch import Tensor

from sparseflash.tiles.tile_spec import TileSpec

_UNEVEN = 0.3  # standard deviation of the lengths over their mean, from which they are unlike
# bytes by which programs may be apart at the end of a list, in standard deviations; measured on an
# H100, of whose 50 MB of L2 each half of the chip has a copy of its own
_APART = 14e6
_WORTH = 32  # entries of a band that make up for one more part of a tile


def locality(
    tile: Tensor, minor: Tensor, n_lists: int, width: int, piece: int, block: int, spec: TileSpec
) -> tuple[bool, int]:
    """Whether tiles run in the order of their lengths, and into how many bands lists are cut.

    tile, minor: int64 (entries,), the list of an entry and its place there, below `width`, in
    pieces of `piece` tokens, of which the mask's blocks have `block`. The parts of a tile take
    memory, together at most as much as the float32 dQ: that bounds the bands.
    """
    if len(tile) < 2 * n_lists:
        return False, 1
    count = torch.bincount(tile, minlength=n_lists).double()
    mean, pieces = count.mean(), block // piece
    place = torch.sort(tile * (width + 1) + minor).values
    runs = len(tile) - (place.diff() == 1).sum()  # of entries side by side
    if count.std(correction=0) > _UNEVEN * mean or runs * 2 * pieces < len(tile):
        return False, 1
    density = mean / width
    blocks = width / pieces * (1 - density) / density
    bands = (block * spec.traffic * blocks.sqrt() / _APART).square().round()
    return True, max(1, min(int(bands), spec.group // 2, int(mean) // _WORTH))
