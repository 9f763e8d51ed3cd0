"""Tile lists of a schedule that only the device knows, with extents that the host knows."""

from collections.abc import Sequence

import torch
from torch import Tensor

from masks import BlockLists
from masks.tiles import FULL
from sparseflash.operators.twin import twin
from sparseflash.schedule.bits import cell_bytes, fragments
from sparseflash.schedule.blocks import Schedule, TileLists, as_tensors, from_tensors
from sparseflash.schedule.locality import seen_order, unseen_bands
from sparseflash.schedule.order import Work, unordered
from sparseflash.schedule.tile_spec import SPARE, TileSpec

Made = tuple[Tensor, Tensor, Tensor, Tensor]  # items, idx, bit and bits of a `TileLists`


@torch.no_grad()
def dynamic_lists(schedule: Schedule, spec: TileSpec) -> TileLists:
    """Every block is cut into the tiles that it holds, empty ones included.

    Long lists over the heads of a group are cut into bands of heads, and those with scattered
    entries run in the order of their lengths; see locality.py. All others run in order.
    """
    n_bands = next(n for n in range(unseen_bands(spec), 0, -1) if spec.group % n == 0)
    cut = spec._replace(kv_heads=spec.kv_heads * n_bands)  # a band is a smaller group
    given = as_tensors(schedule.with_lists(()))
    items, idx, bit, bits = cut_schedule(*given, [int(x) for x in cut])
    heads, partial = spec.list_heads(schedule.heads), schedule.n_partial > 0
    slices = schedule.batch * heads
    merge, n_parts = items.new_empty(slices, 0, 4), 0
    if n_bands > 1:
        majors = spec.block_sizes(schedule)[0] // spec.major
        items, idx, bit = _bands(items, idx, bit, slices, n_bands, majors, spec)
        merge, n_parts = _all_merged(items, n_bands), n_bands * spec.n_tiles
    else:
        items = items[:, None]
    items = seen_order(items, idx, spec.block_sizes(schedule)[1] // spec.minor, spec)
    work = Work(items.flatten(1, 2), merge, 0, n_parts)
    return spec.lists(work, idx, bit, bits, schedule.batch, heads, partial=partial)


def _bands(
    items: Tensor, idx: Tensor, bit: Tensor, slices: int, n_bands: int, majors: int, spec: TileSpec
) -> tuple[Tensor, Tensor, Tensor]:
    """Return lists of smaller groups as bands of one group, items (slices, bands, tiles, 8)."""
    places = -(-spec.tokens[1] // spec.minor) + 1  # of a head
    step = spec.group // n_bands * places
    band = torch.arange(n_bands, dtype=torch.int32, device=items.device)
    if len(items) == slices:  # all heads have one list: every band a copy
        begin = items[:, None, :, 1] + band[:, None] * len(idx)
        items = items[:, None].repeat(1, n_bands, 1, 1)
        items[..., 1] = begin
        idx = (idx + band[:, None, None] * step).flatten(0, 1)
        bit = bit.repeat(n_bands)
    else:
        entries = max(1, (len(idx) - SPARE) // majors)  # a selection may have room for none
        place = torch.arange(len(idx), device=idx.device) % entries
        own = torch.searchsorted(items[:, 0, 1].contiguous(), place.int(), right=True) - 1
        idx = idx + (own % n_bands * step)[:, None].int()
        items = items.view(slices, n_bands, -1, 8).clone()
    idx[-SPARE:] = 0
    items[..., 4] = items[..., 0] * n_bands + band[:, None]
    return items, idx, bit


def _all_merged(items: Tensor, n_bands: int) -> Tensor:
    """Return what `TileLists.merge` holds where every tile has a part in every band."""
    slices, _, n_tiles, _ = items.shape
    tile = torch.arange(n_tiles, dtype=torch.int32, device=items.device)
    columns = tile, tile * n_bands, torch.full_like(tile, n_bands), torch.zeros_like(tile)
    return torch.stack(columns, dim=1).repeat(slices, 1, 1)


@twin(
    "schedule",
    "(Tensor[] tensors, SymInt[] numbers, SymInt[] fields) -> (Tensor, Tensor, Tensor, Tensor)",
)
def cut_schedule(tensors: Sequence[Tensor], numbers: Sequence[int], fields: Sequence[int]) -> Made:
    """Return the tensors of `dynamic_lists`.

    tensors, numbers: `as_tensors` of the schedule; fields: those of the `TileSpec`, as ints.
    """
    schedule, spec = from_tensors(tensors, numbers), TileSpec.of_ints(fields)
    block_major, block_minor = spec.block_sizes(schedule)
    n_major, n_minor = spec.tokens
    majors, minors = block_major // spec.major, block_minor // spec.minor
    n_pieces, n_rows = -(-n_minor // spec.minor), -(-n_major // block_major)
    side = schedule.rows if spec.by_rows else schedule.cols
    device = side.ptr.device
    live = torch.arange(len(side.idx), device=device) < side.ptr[-1]
    head = side.idx  # not used without groups
    if spec.group > 1:
        side, live, head = _grouped(side, live, schedule, spec, n_rows)

    # each of the major tiles of a block has entries of its own, for their bits
    idx, bit = side.idx, torch.where(live, side.tile, FULL)
    if majors * minors > 1:
        step = torch.arange(minors, dtype=torch.int32, device=device)
        major = torch.arange(majors, dtype=torch.int32, device=device)[:, None, None]
        bit = torch.where(
            (bit >= 0)[:, None], (bit[:, None] * majors + major) * minors + step, FULL
        ).flatten()
        idx = (idx[:, None] * minors + step).expand(majors, -1, -1).flatten()
    idx = idx.clamp(max=n_pieces)  # a block may have tiles beyond the end
    if spec.group > 1:
        idx = (idx.view(majors, -1, minors) + head[:, None] * (n_pieces + 1)).flatten()
    idx = torch.where(live[:, None].expand(majors, -1, minors).flatten(), idx, 0)
    if schedule.n_partial > 0:
        bits = fragments(cell_bytes(schedule, spec.by_rows, spec.major, spec.minor).flatten(0, 2))
    else:
        bits = torch.zeros(1, spec.major, 4, dtype=torch.int32, device=device)
    idx, bit = (
        torch.cat([idx, idx.new_zeros(SPARE)]),
        torch.cat([bit, bit.new_full((SPARE,), FULL)]),
    )

    begin, end, middle = (x.view(-1, n_rows) for x in (side.ptr[:-1], side.ptr[1:], side.mid))
    n, n_partial = end - begin, middle - begin
    if majors * minors > 1:
        tile = torch.arange(spec.n_tiles, device=device)
        begin, n, n_partial = (x[:, tile // majors] * minors for x in (begin, n, n_partial))
        begin = begin + tile % majors * (len(live) * minors)
    return unordered(begin, n, n_partial), idx[:, None], bit, bits


def _grouped(
    side: BlockLists, live: Tensor, schedule: Schedule, spec: TileSpec, n_rows: int
) -> tuple[BlockLists, Tensor, Tensor]:
    """Return the joined lists of a group of query heads, which entries are live, and heads."""
    group, device = spec.group, live.device
    per_head = schedule.heads > 1
    lists = torch.searchsorted(side.ptr, torch.arange(len(live), device=device), right=True) - 1
    lists = lists.clamp(max=len(side.mid) - 1)
    local = torch.arange(len(live), device=device) - side.ptr[lists]
    partials, fulls = side.mid - side.ptr[:-1], side.ptr[1:] - side.mid
    shape = (-1, group if per_head else 1, n_rows)  # (slices of the result, heads, key blocks)
    partials, fulls = (
        x.view(shape).expand(-1, group, -1).transpose(1, 2).contiguous() for x in (partials, fulls)
    )
    n = partials.sum(2) + fulls.sum(2)
    ptr = torch.zeros(n.numel() + 1, dtype=torch.int64, device=device)
    torch.cumsum(n.flatten(), 0, out=ptr[1:])
    begin = ptr[:-1].view_as(n)[..., None]
    mid = begin + partials.sum(2, keepdim=True)
    partial_at = begin + partials.cumsum(2) - partials
    full_at = mid + fulls.cumsum(2) - fulls

    # where every entry goes: (heads that it serves, entries)
    row, slice_ = lists % n_rows, lists // n_rows
    if per_head:
        head = (slice_ % group)[None]
        slice_ = slice_ // group
    else:
        head = torch.arange(group, device=device)[:, None].expand(-1, len(live))
    own = slice_, row, head
    own_partials = partials[own]
    place = torch.where(
        local < own_partials, partial_at[own] + local, full_at[own] + local - own_partials
    )
    capacity = place.numel()
    place = torch.where(live, place, capacity).flatten()  # what means nothing goes to the end
    placed = torch.zeros(3, capacity + 1, dtype=torch.int32, device=device)
    values = (side.idx.expand(head.shape), side.tile.expand(head.shape), head)
    for line, value in zip(placed, values, strict=True):
        line[place] = value.flatten().int()
    idx, tile, head = placed[:, :capacity]
    live = torch.arange(capacity, device=device) < ptr[-1]
    return BlockLists(ptr, mid.flatten(), idx, tile), live, head
