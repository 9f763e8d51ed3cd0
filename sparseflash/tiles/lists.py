"""The mask as a kernel with tiles of its own walks over it: work items, entries and their bits.

The blocks of a schedule are cut where they are larger than the tiles of a kernel, and merged where
they are smaller: along the major axis into the union of what their tokens attend to, along the
minor axis by gathering.
"""

from typing import Literal

import torch
from torch import Tensor

from sparseflash.lasting import make_lasting
from sparseflash.schedule import Cache, Schedule
from sparseflash.tiles.bits import cell_bytes, compose, fragments, same_rows
from sparseflash.tiles.make import EMPTY, FULL, SPARE, Make
from sparseflash.tiles.order import ordered
from sparseflash.tiles.tile_lists import TileLists

Side = Literal["rows", "cols"]


def granularity(schedule: Schedule | None, by: Side, major: int, minor: int) -> tuple[int, int]:
    """Tokens of a piece along the minor axis, and how many of them make an entry."""
    if schedule is None:
        return minor, 1
    block = schedule.block_k if by == "rows" else schedule.block_q
    piece = min(minor, block & -block)
    return piece, minor // piece


def expressible(schedule: Schedule | None, by: Side, major: int, minor: int) -> str | None:
    """Why `tile_lists` cannot bring a schedule into tiles of major x minor, or None."""
    if schedule is None or not schedule.dynamic:
        return None
    blocks = schedule.block_q, schedule.block_k
    tiles = (major, minor) if by == "rows" else (minor, major)
    if not blocks[0] % tiles[0] and not blocks[1] % tiles[1]:
        return None
    return (
        f"the blocks of a selection must divide by its tiles of {tiles[0]} queries x {tiles[1]}"
        f" keys, they are {blocks[0]} x {blocks[1]}"
    )


def tile_lists(
    schedule: Schedule | None,
    *,
    by: Side,
    major: int,
    minor: int,
    n_q: int,
    n_k: int,
    batch: int,
    heads: int,
    kv_heads: int,
    sms: int,
    device: torch.device | str,
) -> TileLists:
    """The lists of a schedule (None: dense attention), from a bounded cache.

    major, minor: powers of two, minor at most 128. batch, heads, kv_heads: of q and k.
    sms: multiprocessors to be filled. `expressible` tells which schedules this is for; one that is
    dynamic is turned into lists on the device, without waiting for it and without the cache, unless
    it brings them along.
    """
    make = Make(by == "rows", major, minor, n_q, n_k, batch, heads, kv_heads, sms)
    if schedule is not None and schedule.dynamic:
        from sparseflash.tiles.dynamic import dynamic_lists

        brought = (lists for lists in schedule.lists if make.gave(lists))
        return next(brought, None) or dynamic_lists(schedule, make)
    # the entry keeps the schedule, so that no other can take its addresses
    names = (
        ("dense", device)
        if schedule is None
        else (schedule.rows.ptr.data_ptr(), schedule.bits.data_ptr())
    )
    key = (*names, *make)
    found = _cache.get(key)
    if found is None:
        pieces = granularity(schedule, by, major, minor)
        lists = make_lasting(
            lambda: _dense(make, device) if schedule is None else _refined(schedule, make, *pieces),
            device,
        )
        found = lists, schedule
        tensors = [x for x in lists if isinstance(x, Tensor)]
        if schedule is not None:
            tensors += [*schedule.rows, *schedule.cols, schedule.bits]
        _cache.put(key, found, size=sum(t.nbytes for t in tensors))
    return found[0]


def _dense(make: Make, device: torch.device | str) -> TileLists:
    """All items share one list: all minor tiles, those that stick out of the end first."""
    n_minor = make.tokens[1]
    n_blocks, rest = -(-n_minor // make.minor), n_minor % make.minor
    block = torch.arange(make.group * n_blocks, device=device)
    ragged = (block % n_blocks == n_blocks - 1) & (rest > 0)
    block += block // n_blocks
    order = torch.sort(~ragged, stable=True).indices
    idx = torch.zeros(len(block) + SPARE, 1, dtype=torch.int32, device=device)
    idx[: len(block), 0] = block[order].int()
    bit = torch.full((len(block) + SPARE,), FULL, dtype=torch.int32, device=device)
    n_partial = make.group if rest else 0
    bit[:n_partial] = 0
    inside = torch.arange(make.minor, device=device).view(-1, 8) < rest
    eights = (inside * (1 << torch.arange(8, device=device))).sum(1).to(torch.uint8)
    bits = fragments(eights.expand(1, make.major, -1))

    begin = torch.zeros(1, make.n_tiles, dtype=torch.int64, device=device)
    n, partials = torch.full_like(begin, len(block)), torch.full_like(begin, n_partial)
    work = ordered(begin, n, partials, make.copies(1), make.sms)
    return make.lists(work, idx, bit, bits, 1, 1, partial=n_partial > 0)


def _refined(schedule: Schedule, make: Make, piece: int, gather: int) -> TileLists:
    """Pieces of the schedule, `gather` of them to an entry, partial ones first."""
    list_heads = make.list_heads(schedule.heads)
    n_lists = schedule.batch * list_heads * make.n_tiles
    n_pieces = -(-make.tokens[1] // piece)  # of one head
    cells, tile, minor, signature = _pieces(schedule, make, piece)
    device = tile.device

    # pieces in order: by tile, partial before full, ascending
    full = (signature == FULL).all(1)
    width = make.group * (n_pieces + 1)
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
        bits = torch.zeros(1, make.major, 4, dtype=torch.int32, device=device)

    slices = schedule.batch * list_heads
    begin, n, n_partial = (x.view(slices, make.n_tiles) for x in (begin, n, n_partial))
    work = ordered(begin, n, n_partial, make.copies(slices), make.sms)
    return make.lists(
        work, idx.view(-1, gather), bit, bits, schedule.batch, list_heads, partial=len(pieces) > 0
    )


def _pieces(schedule: Schedule, make: Make, piece: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The cells of the bit tiles, and the non-empty pieces of major x piece tokens.

    cells: uint8 (cells, cell_major, piece / 8). For each piece, in no order: tile (int64, the
    number of its list), minor (int64, its place in the list), signature (int32, the cells stacked
    in it).
    """
    block_major, block_minor = make.blocks(schedule)
    side = schedule.rows if make.by_rows else schedule.cols
    n_major, n_minor = make.tokens
    cell = min(make.major, block_major & -block_major)
    majors, minors = block_major // cell, block_minor // piece
    tables = cell_bytes(schedule, make.by_rows, cell, piece)
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
        list_slice = mask_batch * (schedule.heads // make.group) + head // make.group
        minor = minor + head % make.group * places
    else:
        list_slice = mask_batch
        copy = torch.arange(make.group, device=device)[:, None] * places
        minor = (minor + copy).flatten()
        major, code, list_slice = (x.repeat(make.group) for x in (major, code, list_slice))

    stacked = make.major // cell
    tile = list_slice * make.n_tiles + major // stacked
    cells = tables.flatten(0, 2)
    if stacked == 1:
        return cells, tile, minor, code[:, None]
    width = make.group * places
    key, which = torch.unique(tile * width + minor, return_inverse=True)
    tile, minor = key // width, key % width
    # what lies beyond the end may count as allowed
    start = torch.arange(0, make.major, cell, device=device)
    start = start + (tile % make.n_tiles)[:, None] * make.major
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


_cache: Cache[tuple[TileLists, Schedule | None]] = Cache(max_count=64, max_bytes=2**29)
