"""The order in which kernels run the tiles of a mask, and the splitting of very long ones."""

from typing import NamedTuple

import torch
from torch import Tensor


class Work(NamedTuple):
    """Items and merge of a `TileLists`, with their counts."""

    items: Tensor
    merge: Tensor
    n_long: int
    n_parts: int


def unordered(begin: Tensor, n: Tensor, n_partial: Tensor) -> Tensor:
    """Items of every tile, whole and in order: looking at the counts would wait for the device."""
    tile = torch.arange(n.shape[1], device=n.device).expand_as(n)
    none, zero = torch.full_like(n, -1), torch.zeros_like(n)
    return torch.stack([tile, begin, n, n_partial, none, zero, zero, zero], dim=2).int()


def ordered(
    begin: Tensor, n: Tensor, n_partial: Tensor, copies: int, sms: int, *, falling: bool = False
) -> Work:
    """Items of tiles (slices, tiles) for `copies` (batch, head)s to a slice on `sms` processors.

    Tiles run in order, begun from the heavier end. falling: in the order of their lengths, the
    longest first. A tile of more than twice the mean entries runs before all others, the longest
    first, if one as long could outlast the rest. A tile that is still too long, or one of too few
    to fill the processors, is split into even parts.
    """
    slices, tiles = n.shape
    total = int(n.sum()) * copies
    mean = total / copies / max(1, int((n > 0).sum()))
    tile = torch.arange(tiles, device=n.device).expand_as(n)
    if falling:
        tile = n.argsort(dim=1, descending=True, stable=True)
        begin, n, n_partial = (x.gather(1, tile) for x in (begin, n, n_partial))
    elif n[:, (tiles + 1) // 2 :].sum() > n[:, : tiles // 2].sum():
        tile, begin, n, n_partial = (x.flip(-1) for x in (tile, begin, n, n_partial))

    limit = _limit(total, sms)
    few = 2 * tiles * slices * copies < sms
    split = (n > 1.5 * limit) & ((n > 2 * mean) | few)
    parts = n // limit if few else (n + limit - 1) // limit  # few: no more than two rounds
    parts = torch.where(split, parts.clamp(min=2), 1)
    slots = parts * split
    items = _parts(tile, begin, n, n_partial, parts, torch.where(split, _before(slots), -1))
    merge = _merge(tile, split, _before(slots), parts)

    return _led(items, merge, slots, mean, total, sms)


def banded(begin: Tensor, n: Tensor, n_partial: Tensor, copies: int, sms: int) -> Work:
    """Items of tiles (slices, tiles, bands) whose lists are cut: all tiles of a band run before the
    next band, in the order of their lengths. A tile with entries in several bands is split.

    Items that are far longer than the others are split and run first as those of `ordered`.
    """
    _, tiles, bands = n.shape
    there = n > 0
    there[..., 0] |= ~there.any(2)  # a tile of nothing has an item too
    total = int(n.sum()) * copies
    mean = total / copies / int(there.sum())
    limit = _limit(total, sms)
    cut = there * torch.where((n > 1.5 * limit) & (n > 2 * mean), (n + limit - 1) // limit, 1)
    parts = cut.sum(2)
    split = parts > 1
    first = _before(parts * split)
    slot = torch.where(split[..., None], first[..., None] + _before(cut), -1)
    tile = torch.arange(tiles, device=n.device)[:, None].expand_as(n)
    place = torch.arange(bands, device=n.device) * (n.max() + 1) - n
    order = place.flatten(1).argsort(dim=1, stable=True)
    lines = tile, begin, n, n_partial, cut, slot
    items = _parts(*(x.flatten(1).gather(1, order) for x in lines))
    merge = _merge(tile[..., 0], split, first, parts)
    return _led(items, merge, parts * split, mean, total, sms)


def _limit(total: int, sms: int) -> int:
    """Return the entries above which a tile may be split."""
    return max(16, -(-total // (2 * sms)))


def _led(items: Tensor, merge: Tensor, slots: Tensor, mean: float, total: int, sms: int) -> Work:
    """Return the work; items above twice the mean lead if one as long could outlast the rest."""
    length, n_long = items[..., 2], 0
    if int(length.max()) * sms * 8 > total:
        n_long = int((length > 2 * mean).sum(1).max())
    return Work(_lead(items, n_long), merge, n_long, int(slots.sum(1).max()))


def _before(counts: Tensor) -> Tensor:
    """Return what comes before each element of a line."""
    return counts.cumsum(-1) - counts


def _parts(
    tile: Tensor, begin: Tensor, n: Tensor, n_partial: Tensor, parts: Tensor, slot: Tensor
) -> Tensor:
    """int32 (slices, items, 8): every tile in its parts, padded to as many for every slice."""
    slices, tiles = n.shape
    items = torch.zeros(slices, int(parts.sum(1).max()), 8, dtype=torch.int32, device=n.device)
    items[..., 0] = items[..., 4] = -1
    # one line for each item, with the number of the part in its tile
    number = torch.arange(slices * tiles, device=n.device).repeat_interleave(parts.flatten())
    part = torch.arange(len(number), device=n.device) - _before(parts.flatten())[number]
    own = number // tiles, number % tiles
    lo, hi = n[own] * part // parts[own], n[own] * (part + 1) // parts[own]
    partial = (n_partial[own] - lo).clamp(min=0).minimum(hi - lo)
    slot = torch.where(slot[own] < 0, -1, slot[own] + part)
    place = own[0], _before(parts)[own] + part
    for column, value in enumerate((tile[own], begin[own] + lo, hi - lo, partial, slot)):
        items[..., column][place] = value.int()
    return items


def _lead(items: Tensor, n_long: int) -> Tensor:
    """Return the same items, with the n_long longest ones of every slice first."""
    if not n_long:
        return items
    slices, n_items = items.shape[:2]
    leading = torch.sort(items[..., 2], dim=1, descending=True, stable=True).indices[:, :n_long]
    rank = torch.arange(n_long, n_long + n_items, device=items.device).repeat(slices, 1)
    rank.scatter_(1, leading, torch.arange(n_long, device=items.device).expand_as(leading))
    order = rank.argsort(1)
    return items.gather(1, order[..., None].expand_as(items))


def _merge(tile: Tensor, split: Tensor, first: Tensor, parts: Tensor) -> Tensor:
    """int32 (slices, split tiles, 4): what `TileLists.merge` holds."""
    merge = torch.zeros(
        len(split), int(split.sum(1).max()), 4, dtype=torch.int32, device=split.device
    )
    merge[..., 0] = -1
    own = split.nonzero(as_tuple=True)
    place = own[0], _before(split.long())[own]
    for column, value in enumerate((tile[own], first[own], parts[own])):
        merge[..., column][place] = value.int()
    return merge
