"""How tiles with scattered entries come to need the same minor tokens at the same time.

Persistent programs walk lists in ascending order. Where entries are scattered at random, what a
program reads lies in L2 only if the others are at about the same place of their lists. They begin
at the same time, but lists of unlike lengths drive them apart. Two measures keep them together:

- Tiles run in the order of their lengths, the longest first. Tiles that run at the same time are
  nearly as long, and one that is done early takes the longest that is left.
- Long lists are cut into bands. All tiles run a band before any of them begins the next. Where
  lists go over the heads of a group and are of unlike lengths, as under a causal mask, programs are
  at different heads; bands keep them at the same two or more.
"""

import torch
from torch import Tensor

from sparseflash.schedule.tile_spec import TileSpec

_UNEVEN = 0.3  # standard deviation of the lengths over their mean, from which they are unlike
# bytes by which programs may be apart at the end of a list, in standard deviations, for each key of
# a tile: tiles of 64 read twice as much for their products. Measured on an H100, of whose 50 MB of
# L2 each half of the chip has a copy of its own.
_APART = 90e3
_WORTH = 32  # entries of a band that make up for one more part of a tile
_RESIDENT = 32e6  # bytes of a list that programs share although they are anywhere in it
_FAR = 64e6  # bytes of a list from which on selections look whether they are scattered


def locality(
    tile: Tensor, minor: Tensor, n_lists: int, width: int, piece: int, block: int, spec: TileSpec
) -> tuple[bool, int]:
    """Whether tiles run in the order of their lengths, and into how many bands lists are cut.

    tile, minor: int64 (entries,), the list of an entry and its place there, below `width`, in
    pieces of `piece` tokens, of which the mask's blocks have `block`. The parts of a tile take
    memory. With grouped heads all of them take at most as much as the float32 dQ, which bounds the
    bands; otherwise two bands take four times as much. Lists of more than twice the mean, as of
    global tokens, run first and drive nothing apart.
    """
    if len(tile) < 2 * n_lists:
        return False, 1
    count = torch.bincount(tile, minlength=n_lists).double()
    mean, pieces = count.mean(), block // piece
    place = torch.sort(tile * (width + 1) + minor).values
    runs = len(tile) - (place.diff() == 1).sum()  # of entries side by side
    if _uneven(count):
        bands = max(1, min(unseen_bands(spec), int(mean) // _WORTH))
        return False, bands if spec.group > 1 and _uneven(count[count <= 2 * mean]) else 1
    if runs * 2 * pieces < len(tile):
        return False, 1
    density = mean / width
    blocks = width / pieces * (1 - density) / density
    bands = int((block * spec.traffic * blocks.sqrt() / (_APART * spec.major)).square().round())
    return True, max(1, min(bands, max(2, spec.group // 2), int(mean) // _WORTH))


def _uneven(count: Tensor) -> bool:
    return bool(count.std(correction=0) > _UNEVEN * count.mean())


def seen_order(items: Tensor, idx: Tensor, pieces: int, spec: TileSpec) -> Tensor:
    """Items (slices, bands, tiles, 8) in the order of their lengths, if they are many bytes and
    their entries are scattered. The device alone knows: nothing waits for it.
    """
    if spec.group * spec.tokens[1] * spec.traffic <= _FAR:
        return items
    n, idx = items[..., 2], idx[:, 0]
    runs = n.sum() - (idx.diff() == 1).sum()
    length = n * (runs * 2 * pieces >= n.sum())
    order = length.argsort(dim=2, descending=True, stable=True)
    return items.gather(2, order[..., None].expand_as(items))


def unseen_bands(spec: TileSpec) -> int:
    """Bands of lists whose lengths are unlike or not known."""
    bands = round(spec.group * spec.tokens[1] * spec.traffic / _RESIDENT)
    return max(1, min(bands, spec.group // 2))
