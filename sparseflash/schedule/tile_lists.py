"""The mask as a kernel with tiles of its own walks over it: work items, entries and their bits.

The blocks of a schedule are cut where they are larger than the tiles of a kernel, and merged where
they are smaller: along the major axis into the union of what their tokens attend to, along the
minor axis by gathering.
"""

from math import gcd

import torch
from torch import Tensor

from masks.tiles import EMPTY, FULL
from sparseflash.cache import cache, persistent
from sparseflash.schedule.bits import cell_bytes, compose, fragments, same_rows
from sparseflash.schedule.blocks import Schedule, ScheduleFacts, TileLists
from sparseflash.schedule.dynamic_tiles import dynamic_lists
from sparseflash.schedule.locality import locality
from sparseflash.schedule.order import banded, ordered
from sparseflash.schedule.tile_spec import SPARE, Side, TileSpec


def gathered_tokens(schedule: Schedule | ScheduleFacts | None, spec: TileSpec) -> int:
    """Tokens of the pieces that an entry is gathered from along the minor axis."""
    if schedule is None:
        return spec.minor
    block = spec.block_sizes(schedule)[1]
    return min(spec.minor, block & -block)


def tile_entries(schedule: Schedule, side: Side, tokens: int) -> int:
    """Pairs of a tile of `tokens` queries and a key block that have something allowed, or by
    columns of a tile of `tokens` keys and a query block.
    """
    lists, size, n = schedule.rows, schedule.block_q, schedule.n_q
    n_others = -(-schedule.n_k // schedule.block_k)
    if side == "cols":
        lists, size, n = schedule.cols, schedule.block_k, schedule.n_k
        n_others = -(-schedule.n_q // schedule.block_q)
    n_blocks, n_tiles = -(-n // size), -(-n // tokens)
    block = torch.arange(len(lists.mid), device=lists.mid.device)
    block = block.repeat_interleave(lists.ptr.diff())
    first = (block % n_blocks * size)[:, None]  # token of a block
    last = torch.clamp(first + size, max=n) - 1
    most = (tokens - gcd(size, tokens) + size - 1) // tokens + 1  # tiles that a block lies in
    tile = first // tokens + torch.arange(most, device=first.device)
    place = (block // n_blocks * n_tiles)[:, None] + tile
    place = place * n_others + lists.idx[:, None]
    return len(torch.unique(place[tile <= last // tokens]))


def indivisible(facts: ScheduleFacts, spec: TileSpec) -> str | None:
    """Why the blocks of a selection cannot be cut into the tiles of a kernel, or None."""
    tile_q, tile_k = (spec.major, spec.minor) if spec.by_rows else (spec.minor, spec.major)
    if not facts.block_q % tile_q and not facts.block_k % tile_k:
        return None
    return (
        f"the blocks of a selection must divide by its tiles of {tile_q} queries x {tile_k}"
        f" keys, they are {facts.block_q} x {facts.block_k}"
    )


def tile_lists(schedule: Schedule | None, spec: TileSpec, device: torch.device | str) -> TileLists:
    """Return the work list of a schedule (None: dense attention), from the cache.

    That of a dynamic schedule is made on the device, without waiting for it and without the cache,
    unless the schedule brings it along. `indivisible` says which ones that is possible for.
    """
    if schedule is not None and schedule.dynamic:
        made = (lists for lists in schedule.lists if spec.matches(lists))
        return next(made, None) or dynamic_lists(schedule, spec)
    key = ("tile lists", device if schedule is None else schedule.key, spec)
    lists = cache.get(key)
    if lists is None:
        lists = persistent(
            lambda: _dense(spec, device) if schedule is None else _refined(schedule, spec), device
        )
        cache.put(key, lists, lists.tensors)
    return lists


def _dense(spec: TileSpec, device: torch.device | str) -> TileLists:
    """All items share one list: all minor tiles, those that stick out of the end first."""
    n_minor = spec.tokens[1]
    n_blocks, rest = -(-n_minor // spec.minor), n_minor % spec.minor
    block = torch.arange(spec.group * n_blocks, device=device)
    ragged = (block % n_blocks == n_blocks - 1) & (rest > 0)
    block += block // n_blocks
    order = torch.sort(~ragged, stable=True).indices
    idx = torch.zeros(len(block) + SPARE, 1, dtype=torch.int32, device=device)
    idx[: len(block), 0] = block[order].int()
    bit = torch.full((len(block) + SPARE,), FULL, dtype=torch.int32, device=device)
    n_partial = spec.group if rest else 0
    bit[:n_partial] = 0
    inside = torch.arange(spec.minor, device=device).view(-1, 8) < rest
    eights = (inside * (1 << torch.arange(8, device=device))).sum(1).to(torch.uint8)
    bits = fragments(eights.expand(1, spec.major, -1))

    begin = torch.zeros(1, spec.n_tiles, dtype=torch.int64, device=device)
    n, partials = torch.full_like(begin, len(block)), torch.full_like(begin, n_partial)
    work = ordered(begin, n, partials, spec.copies(1), spec.sms)
    return spec.lists(work, idx, bit, bits, 1, 1, partial=n_partial > 0)


def _refined(schedule: Schedule, spec: TileSpec) -> TileLists:
    """Pieces of the schedule, several of them to an entry, partial ones first."""
    piece = gathered_tokens(schedule, spec)
    gather = spec.minor // piece
    list_heads = spec.list_heads(schedule.heads)
    n_lists = schedule.batch * list_heads * spec.n_tiles
    n_pieces = -(-spec.tokens[1] // piece)  # of one head
    cells, tile, minor, signature = _pieces(schedule, spec, piece)
    device = tile.device
    width = spec.group * (n_pieces + 1)
    block = spec.block_sizes(schedule)[1]
    falling, bands = locality(tile, minor, n_lists, width, piece, block, spec)
    tile, n_lists = tile * bands + minor * bands // width, n_lists * bands

    # pieces in order: by tile, partial before full, ascending
    full = (signature == FULL).all(1)
    order = torch.argsort((tile * 2 + full) * width + minor)
    tile, minor, signature, full = (x[order] for x in (tile, minor, signature, full))
    count = torch.bincount(tile, minlength=n_lists)
    partials = torch.bincount(tile[~full], minlength=n_lists)

    # pieces that are missing at the end of a list go between the partial and the full ones
    n = (count + gather - 1) // gather
    missing = n * gather - count
    n_partial = (partials + missing + gather - 1) // gather
    begin, n_entries = n.cumsum(0) - n, int(n.sum())
    place = torch.arange(len(tile), device=device) - (count.cumsum(0) - count)[tile]
    place += torch.where(full, missing[tile], 0) + begin[tile] * gather
    idx = torch.zeros((n_entries + SPARE) * gather, dtype=torch.int32, device=device)
    idx[: n_entries * gather] = n_pieces
    idx[place] = minor.int()

    bit = torch.full((n_entries + SPARE,), FULL, dtype=torch.int32, device=device)
    own = torch.arange(n_lists, device=device).repeat_interleave(n)
    is_partial = torch.arange(n_entries, device=device) - begin[own] < n_partial[own]
    row = is_partial.cumsum(0) - 1  # of a partial entry among all of them
    pieces = torch.full(
        (int(n_partial.sum()) * gather, signature.shape[1]), EMPTY,
        dtype=torch.int32, device=device,
    )  # fmt: skip
    entry = place // gather
    chosen = is_partial[entry]
    pieces[row[entry[chosen]] * gather + place[chosen] % gather] = signature[chosen]
    unique, which = same_rows(pieces.view(-1, gather * signature.shape[1]))
    bit[:n_entries][is_partial] = which.int()
    bits = fragments(compose(cells, unique.view(-1, gather, signature.shape[1])))
    if not len(bits):
        bits = torch.zeros(1, spec.major, 4, dtype=torch.int32, device=device)

    slices = schedule.batch * list_heads
    lines = [x.view(slices, spec.n_tiles, bands) for x in (begin, n, n_partial)]
    if bands > 1:
        work = banded(*lines, copies=spec.copies(slices), sms=spec.sms)
    else:
        lines = [x[..., 0] for x in lines]
        work = ordered(*lines, spec.copies(slices), spec.sms, falling=falling)
    return spec.lists(
        work, idx.view(-1, gather), bit, bits, schedule.batch, list_heads, partial=len(pieces) > 0
    )


def _pieces(
    schedule: Schedule, spec: TileSpec, piece: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the cells of the bit tiles, and the non-empty pieces of major x piece tokens.

    cells: uint8 (cells, cell_major, piece / 8). For each piece, in no order: tile (int64, the
    number of its list), minor (int64, its place in the list), signature (int32, the cells stacked
    in it).
    """
    block_major, block_minor = spec.block_sizes(schedule)
    side = schedule.rows if spec.by_rows else schedule.cols
    n_major, n_minor = spec.tokens
    cell = gcd(spec.major, block_major)
    majors, minors = block_major // cell, block_minor // piece
    tables = cell_bytes(schedule, spec.by_rows, cell, piece)
    device = tables.device

    n_rows = -(-n_major // block_major)
    line = torch.arange(len(side.mid), device=device).repeat_interleave(side.ptr.diff())
    slice_, block = line // n_rows, line % n_rows
    major = block[:, None, None] * majors + torch.arange(majors, device=device)[:, None]
    minor = side.idx.long()[:, None, None] * minors + torch.arange(minors, device=device)
    code = _codes(tables, side.tile, major, n_major, cell)
    taken = code != EMPTY
    major, minor, slice_ = (x.expand_as(code)[taken] for x in (major, minor, slice_[:, None, None]))
    code = code[taken]

    places = -(-n_minor // piece) + 1  # of a head, one of them beyond the end
    mask_batch = slice_ // schedule.heads
    if schedule.heads > 1:
        head = slice_ % schedule.heads
        list_slice = mask_batch * (schedule.heads // spec.group) + head // spec.group
        minor = minor + head % spec.group * places
    else:
        list_slice = mask_batch
        copy = torch.arange(spec.group, device=device)[:, None] * places
        minor = (minor + copy).flatten()
        major, code, list_slice = (x.repeat(spec.group) for x in (major, code, list_slice))

    stacked = spec.major // cell
    tile = list_slice * spec.n_tiles + major // stacked
    cells = tables.flatten(0, 2)
    if stacked == 1:
        return cells, tile, minor, code[:, None]
    width = spec.group * places
    key, which = torch.unique(tile * width + minor, return_inverse=True)
    tile, minor = key // width, key % width
    # what lies beyond the end may count as allowed
    start = torch.arange(0, spec.major, cell, device=device)
    start = start + (tile % spec.n_tiles)[:, None] * spec.major
    signature = torch.where(start >= n_major, FULL, EMPTY).int()
    signature[which, major % stacked] = code
    return cells, tile, minor, signature


def _codes(tables: Tensor, tile: Tensor, major: Tensor, n_major: int, cell: int) -> Tensor:
    """int32 (blocks, majors, minors): the cell of `tables` (flat) that each cell of a block is, or
    full or empty; major tokens beyond n_major count as what the others are.
    """
    tiles, majors, minors = tables.shape[:3]
    number = torch.arange(tiles * majors * minors, dtype=torch.int32, device=tables.device)

    def classify(rows: Tensor, number: Tensor) -> Tensor:
        some, every = (rows != 0).flatten(-2).any(-1), (rows == 255).flatten(-2).all(-1)
        return torch.where(some, torch.where(every, FULL, number), EMPTY).int()

    number = number.view(tiles, majors, minors)
    whole = classify(tables, number)
    full = torch.full((1, majors, minors), FULL, dtype=torch.int32, device=tables.device)
    code = torch.cat([whole, full])[tile.long()]  # tile -1 is full
    rest = n_major % cell
    if rest:
        last = n_major // cell
        cut = classify(tables[:, last % majors, :, :rest], number[:, last % majors])
        cut = torch.cat([cut, full[:, 0]])[tile.long()]
        code = torch.where(major == last, cut[:, None], code)
    return code
