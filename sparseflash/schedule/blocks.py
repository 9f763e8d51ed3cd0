"""A block mask on the device: what a backend walks over.

`schedule_for` copies the run-length codes of a `masks.BlockMask` to the device and expands them
there, in time and memory proportional to the non-empty blocks, and remembers the result.
"""

from collections.abc import Hashable, Sequence
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from masks import BlockLists, BlockMask, Mask
from masks.tiles import EMPTY, FULL, edge_tiles
from sparseflash.cache import cache, persistent
from sparseflash.checks import check_extents


class ScheduleFacts(NamedTuple):
    """All that the host knows of a schedule without reading its tensors."""

    block_q: int
    block_k: int
    batch: int  # 1, or the batch of q
    heads: int  # 1, or the heads of q
    n_q: int
    n_k: int
    n_partial: int
    entries: int  # no more non-empty blocks
    lists: tuple[Hashable, ...]  # of the work lists that it brings

    @property
    def keys_per_query(self) -> float:
        """In the mean, of the mask as its blocks have them; at most, of a selection."""
        rows = self.batch * self.heads * -(-self.n_q // self.block_q)
        return self.entries * self.block_k / rows


class TileLists(NamedTuple):
    """A mask in tiles of major x minor tokens, on one device.

    By rows the major tokens are queries and the minor ones keys; by columns the reverse. An item is
    the work on one major tile or on a part of it; its entries are minor tiles, partial ones first.
    In a full entry every pair of tokens is allowed that exists; its minor tokens all exist, the
    major ones may stick out of the end, so nothing may be summed over them. All other non-empty
    entries are partial.

    The columns of an entry come in `gather` pieces of minor // gather tokens. Piece g lies at the
    tokens idx[e, g] * (minor // gather) and following. A missing piece begins beyond the end and
    has no bits. By columns with `group` query heads to a key head, all of them are in one list, and
    idx is head_in_group * (ceil(n_minor / piece) + 1) + piece number: the last number of a head is
    for what is missing.

    Item w of batch * heads * n_items: the first n_long items of every slice go over all (b, h)
    first, (b, h) fastest; then the others, (b, h) slowest. The slice of (b, h) is
    (b if batch > 1 else 0) * heads + (h if heads > 1 else 0).
    """

    items: Tensor  # int32 (slices, n_items, 8): tile, first entry, entries, partial ones, slot
    #   The slot of a whole tile is -1. An item with tile -1 is padding.
    idx: Tensor  # int32 (entries + SPARE, gather)
    bit: Tensor  # int32 (entries + SPARE,)  row of `bits` of a partial entry, -1 for a full one
    bits: Tensor  # int32 (bit tiles, major, 4)  column 8g + 2c + e is bit 2g + e of word c
    merge: Tensor  # int32 (slices, split tiles, 4): tile or -1, first slot, slots, 0
    n_items: int
    n_long: int
    n_parts: int  # slots of a slice; 0 where nothing is split
    major: int
    minor: int
    gather: int
    batch: int  # 1, or the batch of q
    heads: int  # 1, or the heads of q (by columns: of k)
    partial: bool  # False: no entry is partial
    n_major: int  # tokens
    n_minor: int
    group: int  # query heads in one list
    by_rows: bool

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return self.items, self.idx, self.bit, self.bits, self.merge

    @property
    def numbers(self) -> tuple[object, ...]:
        """The other fields: what a launch depends on beside the addresses of the tensors."""
        return self[self._fields.index("n_items") :]


class Schedule(NamedTuple):
    """The non-empty blocks of a mask, on one device.

    A full block has all its block_q x block_k entries inside n_q x n_k and allowed; any other
    non-empty block is partial. The list of batch b, head h and query block i is row
    ((b if batch > 1 else 0) * heads + (h if heads > 1 else 0)) * ceil(n_q / block_q) + i.
    """

    rows: BlockLists  # by query block
    cols: BlockLists  # by key block
    bits: Tensor  # int32 (tiles, block_q, ceil(block_k / 32))  bit j of word w = key 32 * w + j
    block_q: int
    block_k: int
    batch: int  # 1, or the batch of q
    heads: int  # 1, or the heads of q
    n_q: int
    n_k: int
    n_partial: int  # no more partial blocks; where it is 0, kernels leave the masking out
    key: Hashable = None  # identity of the schedule of a mask; None: made on the device
    lists: tuple[TileLists, ...] = ()  # work lists made beforehand by `sparseflash.plan`

    @property
    def dynamic(self) -> bool:
        """Whether it comes from a selection: only the device knows its lists."""
        return self.key is None

    def with_lists(self, lists: tuple[TileLists, ...]) -> "Schedule":
        """Return this schedule with other lists, and without a key. A compiled function cannot
        return the result of `_replace` with torch 2.11.
        """
        return Schedule(*self[:-2], None, lists)

    @property
    def facts(self) -> ScheduleFacts:
        """What plans for schedules like this depend on."""
        lists = tuple(lists.numbers for lists in self.lists)
        return ScheduleFacts(*self[3:10], self.rows.idx.shape[0], lists)


def as_tensors(schedule: Schedule) -> tuple[list[Tensor], list[int]]:
    """Return the tensors and the ints of a schedule, flat, for the schema of an operator."""
    tensors = [*schedule.rows, *schedule.cols, schedule.bits]
    numbers = [int(x) for x in schedule[3:10]]
    for lists in schedule.lists:
        tensors += lists[:5]
        numbers += [int(x) for x in lists[5:]]
    return tensors, numbers


def from_tensors(tensors: Sequence[Tensor], numbers: Sequence[int]) -> Schedule:
    """Return the inverse of `as_tensors`, but for the key."""
    sides = BlockLists(*tensors[:4]), BlockLists(*tensors[4:8])
    rest, width = numbers[7:], len(TileLists._fields) - 5
    lists = []
    for i in range(len(rest) // width):
        some = tensors[9 + 5 * i : 14 + 5 * i], rest[i * width : (i + 1) * width]
        found = TileLists._make([*some[0], *some[1]])
        lists.append(found._replace(partial=bool(found.partial), by_rows=bool(found.by_rows)))
    return Schedule(*sides, tensors[8], *numbers[:7], lists=tuple(lists))


def unpack_bits(bits: Tensor, block_k: int) -> Tensor:
    """Bool (..., block_k) from the bit words int32 (..., ceil(block_k / 32))."""
    shifts = torch.arange(32, dtype=torch.int32, device=bits.device)
    return ((bits.unsqueeze(-1) >> shifts) & 1).flatten(-2)[..., :block_k].bool()


def schedule_for(
    mask: Mask | BlockMask,
    n_q: int,
    n_k: int,
    batch: int,
    heads: int,
    device: torch.device | str,
    block_size: int | tuple[int, int] = 128,
    kv_heads: int | None = None,
) -> Schedule:
    """Return the schedule of `mask` for q (batch, heads, n_q, D) and k of n_k keys, from a bounded
    cache.

    block_size: the blocks that a `Mask` is cut into; a `BlockMask` has its own. A mask of
        `kv_heads` heads is that of the key heads, which their query heads share.
    Raises ValueError for a mask of other lengths, or of a batch or heads that are neither 1 nor
    those of the inputs.
    """
    device = torch.device(device)
    heads_of_mask = heads if isinstance(mask, Mask) and mask.per_head else None
    group = heads // kv_heads if kv_heads is not None and mask.heads == kv_heads > 1 else 1
    if isinstance(mask, BlockMask):
        key = ("schedule", mask.key, group, device)
    else:
        key = ("schedule", mask.key, n_q, n_k, block_size, heads_of_mask, group, device)
    schedule: Schedule | None = cache.get(key)
    if schedule is None:
        blocks = mask
        if isinstance(blocks, Mask):
            blocks = blocks.build(n_q, n_k, block_size, heads=heads_of_mask)
        check_extents(blocks, n_q, n_k, batch, heads, kv_heads)
        schedule = persistent(partial(to_device, blocks, device, group), device)._replace(key=key)
        cache.put(key, schedule, as_tensors(schedule)[0])
    check_extents(schedule, n_q, n_k, batch, heads)
    return schedule


def to_device(blocks: BlockMask, device: torch.device, group: int = 1) -> Schedule:
    """Copy the runs of a block mask to the device and expand them there, `group` times a head."""
    block_q, block_k = blocks.block_size
    cells = blocks.batch * blocks.heads * blocks.rows * blocks.cols
    ends = np.append(blocks.starts[1:], cells)
    edges = edge_tiles(blocks.n_q, blocks.n_k, blocks.block_size)[1:]
    bits = np.concatenate([blocks.bits, edges]).view(np.int32)
    start, end, code, bits = (
        torch.from_numpy(np.array(x)).to(device) for x in (blocks.starts, ends, blocks.tiles, bits)
    )
    cell, tile = _expand(start, end, code)
    row, col = cell // blocks.cols, cell % blocks.cols
    tile = _cut_tails(tile, row % blocks.rows, col, blocks, first_edge=len(blocks.bits))
    slice_ = row // blocks.rows
    slices = blocks.batch * blocks.heads * group
    if group > 1:
        slice_ = (slice_[:, None] * group + torch.arange(group, device=device)).flatten()
        row, col, tile = (x.repeat_interleave(group) for x in (row % blocks.rows, col, tile))
        row = slice_ * blocks.rows + row
    by_row = block_lists(row, col, tile, slices * blocks.rows)
    key_row = slice_ * blocks.cols + col
    by_col = block_lists(key_row, row % blocks.rows, tile, slices * blocks.cols)
    extents = (blocks.batch, blocks.heads * group, blocks.n_q, blocks.n_k)
    n_partial = int((tile != FULL).sum())
    return Schedule(by_row, by_col, bits, block_q, block_k, *extents, n_partial)


def _expand(start: Tensor, end: Tensor, code: Tensor) -> tuple[Tensor, Tensor]:
    """Return the cells (int64, ascending) that the non-empty runs cover, with their codes."""
    taken = code != EMPTY
    start, end, code = start[taken], end[taken], code[taken]
    length = end - start
    before = length.cumsum(0) - length
    # Cell j of the output lies in its run at the offset j - before.
    cell = torch.repeat_interleave(start - before, length)
    cell += torch.arange(len(cell), device=cell.device)
    return cell, torch.repeat_interleave(code, length)


def _cut_tails(
    tile: Tensor, row: Tensor, col: Tensor, blocks: BlockMask, *, first_edge: int
) -> Tensor:
    """Give the full blocks that stick out of n_q x n_k the edge tile that cuts them."""
    block_q, block_k = blocks.block_size
    if not blocks.n_q % block_q and not blocks.n_k % block_k:
        return tile
    cut = torch.zeros_like(tile)
    if blocks.n_q % block_q:
        cut += 2 * (row == blocks.rows - 1).int()
    if blocks.n_k % block_k:
        cut += (col == blocks.cols - 1).int()
    return torch.where((tile == FULL) & (cut > 0), first_edge - 1 + cut, tile)


def block_lists(row: Tensor, idx: Tensor, tile: Tensor, n_rows: int) -> BlockLists:
    """Sort blocks into their rows, partial before full; the order within each stays."""
    full = (tile == FULL).long()
    order = torch.sort(row * 2 + full, stable=True).indices
    ptr = torch.zeros(n_rows + 1, dtype=torch.int64, device=row.device)
    torch.cumsum(torch.bincount(row, minlength=n_rows), 0, out=ptr[1:])
    mid = ptr[:-1] + torch.bincount(row[full == 0], minlength=n_rows)
    return BlockLists(ptr, mid, idx[order].int(), tile[order])
