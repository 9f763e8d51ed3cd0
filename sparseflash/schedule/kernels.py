"""Triton kernels that cut the lists and the bits of a schedule into the tiles of a kernel."""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from sparseflash.kernels.common.launch import launch
from sparseflash.schedule.blocks import from_tensors
from sparseflash.schedule.tile_spec import SPARE, TileSpec

_SIZE = 256  # entries at a time
_LINES = 64  # rows of bits of a program


def cut_schedule(
    tensors: Sequence[Tensor], numbers: Sequence[int], fields: Sequence[int]
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Two launches: one for the lists, one for the bits. See `dynamic_tiles.py`."""
    schedule, spec = from_tensors(tensors, numbers), TileSpec.of_ints(fields)
    block_major, block_minor = spec.block_sizes(schedule)
    n_major, n_minor = spec.tokens
    majors, minors = block_major // spec.major, block_minor // spec.minor
    side = schedule.rows if spec.by_rows else schedule.cols
    per_head = spec.group > 1 and schedule.heads > 1
    n_rows, n_entries = -(-n_major // block_major), len(side.idx)
    slices = len(side.mid) // n_rows // (spec.group if per_head else 1)
    capacity = n_entries * (1 if per_head else spec.group)
    total = capacity * majors * minors + SPARE
    integers = {"dtype": torch.int32, "device": side.ptr.device}
    items = torch.empty(slices, spec.n_tiles, 8, **integers)
    idx, bit = torch.empty(total, 1, **integers), torch.empty(total, **integers)
    n_lists = slices * n_rows
    parts = max(1, min(8, -(-n_minor // block_minor) // (4 * _SIZE)))
    launch(
        cut_lists, (n_lists * parts + -(-total // _SIZE),), *side, items, idx, bit,
        n_lists, n_rows, spec.n_tiles, -(-n_minor // spec.minor), capacity, n_lists * parts,
        MAJORS=majors, MINORS=minors, GROUP=spec.group, PER_HEAD=per_head, PARTS=parts,
        SIZE=_SIZE, SPARE=SPARE,
    )  # fmt: skip
    if not schedule.n_partial:
        return items, idx, bit, torch.zeros(1, spec.major, 4, **integers)
    source = schedule.bits.contiguous()
    tiles, block_q, words = source.shape
    bits = torch.empty(tiles * majors * minors, spec.major, 4, **integers)
    n_lines = len(bits) * spec.major
    launch(
        cut_bits, (-(-n_lines // _LINES),),
        source, bits, n_lines, BY_ROWS=spec.by_rows, BLOCK_Q=block_q, WORDS=words,
        MAJOR=spec.major, MINOR=spec.minor, MAJORS=majors, MINORS=minors, SIZE=_LINES,
    )  # fmt: skip
    return items, idx, bit, bits


@triton.jit(
    do_not_specialize=("n_lists", "n_rows", "n_tiles", "n_pieces", "capacity", "list_programs")
)
def cut_lists(
    Ptr, Mid, Idx, Tile, Items, OutIdx, OutBit,
    n_lists, n_rows, n_tiles, n_pieces, capacity, list_programs,
    MAJORS: tl.constexpr, MINORS: tl.constexpr, GROUP: tl.constexpr, PER_HEAD: tl.constexpr,
    PARTS: tl.constexpr, SIZE: tl.constexpr, SPARE: tl.constexpr,
):  # fmt: skip
    """Items and entries of every list: PARTS programs for each of n_lists lists of the result.

    Further programs fill what no list holds, from the last entry up to the capacity. PER_HEAD: the
    GROUP heads of a list have lists of their own in the schedule; otherwise they share one.
    """
    pid = tl.program_id(0)
    if pid < list_programs:
        _cut_list(
            Ptr, Mid, Idx, Tile, Items, OutIdx, OutBit, pid // PARTS, pid % PARTS,
            n_rows, n_tiles, n_pieces, capacity, MAJORS, MINORS, GROUP, PER_HEAD, PARTS, SIZE,
        )  # fmt: skip
    else:
        COPIES: tl.constexpr = 1 if PER_HEAD else GROUP
        HEADS: tl.constexpr = GROUP if PER_HEAD else 1
        live = COPIES * tl.load(Ptr + n_lists * HEADS)
        place = (pid - list_programs).to(tl.int64) * SIZE + tl.arange(0, SIZE)  # [SIZE]
        end = capacity.to(tl.int64) * (MAJORS * MINORS)
        dead = (place >= end) | (place // MINORS % tl.maximum(capacity, 1) >= live)
        dead = dead & (place < end + SPARE)
        tl.store(OutIdx + place, tl.zeros([SIZE], tl.int32), mask=dead)
        tl.store(OutBit + place, tl.full([SIZE], -1, tl.int32), mask=dead)


@triton.jit
def _cut_list(
    Ptr, Mid, Idx, Tile, Items, OutIdx, OutBit, own, part, n_rows, n_tiles, n_pieces, capacity,
    MAJORS: tl.constexpr, MINORS: tl.constexpr, GROUP: tl.constexpr, PER_HEAD: tl.constexpr,
    PARTS: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    """Partial entries of all heads, then their full ones."""
    slice_, row = own // n_rows, own % n_rows
    HEADS: tl.constexpr = GROUP if PER_HEAD else 1
    COPIES: tl.constexpr = 1 if PER_HEAD else GROUP
    first = slice_ * HEADS * n_rows  # list of the first head
    begin = tl.load(Ptr + first)
    n = tl.zeros([], tl.int64)
    n_partial = tl.zeros([], tl.int64)
    for head in range(HEADS):
        start = tl.load(Ptr + first + head * n_rows + row)
        begin += start - tl.load(Ptr + first + head * n_rows)
        n += tl.load(Ptr + first + head * n_rows + row + 1) - start
        n_partial += tl.load(Mid + first + head * n_rows + row) - start
    begin, n, n_partial = COPIES * begin, COPIES * n, COPIES * n_partial

    if part == 0:
        M: tl.constexpr = triton.next_power_of_2(MAJORS)
        major = tl.arange(0, M)[:, None]  # [M, 1]
        column = tl.arange(0, 8)[None, :]  # [1, 8]
        tile = row * MAJORS + major
        at = begin * MINORS + major.to(tl.int64) * capacity * MINORS
        value = tl.where(column == 0, tile.to(tl.int64), 0)  # [M, 8]
        value = tl.where(column == 1, at, value)
        value = tl.where(column == 2, n * MINORS, value)
        value = tl.where(column == 3, n_partial * MINORS, value)
        value = tl.where(column == 4, -1, value)
        to = Items + (slice_.to(tl.int64) * n_tiles + tile) * 8 + column
        tl.store(to, value.to(tl.int32), mask=(major < MAJORS) & (tile < n_tiles))

    partial_at, full_at = begin, begin + n_partial
    for head in range(GROUP):
        source = first + row
        if PER_HEAD:
            source += head * n_rows
        start, middle = tl.load(Ptr + source), tl.load(Mid + source)
        end = tl.load(Ptr + source + 1)
        shift = head * (n_pieces + 1)
        step = start + part * SIZE
        while step < end:
            entry = step + tl.arange(0, SIZE)  # [SIZE]
            there = entry < end
            block = tl.load(Idx + entry, mask=there, other=0)
            bits = tl.load(Tile + entry, mask=there, other=-1)
            full = entry >= middle
            to = tl.where(full, full_at + entry - middle, partial_at + entry - start)
            for major in tl.static_range(MAJORS):
                for minor in tl.static_range(MINORS):
                    place = (to + major * capacity.to(tl.int64)) * MINORS + minor
                    piece = tl.minimum(block * MINORS + minor, n_pieces) + shift
                    cell = (bits * MAJORS + major) * MINORS + minor
                    tl.store(OutIdx + place, piece, mask=there)
                    tl.store(OutBit + place, tl.where(bits >= 0, cell, -1), mask=there)
            step += PARTS * SIZE
        partial_at += middle - start
        full_at += end - middle


@triton.jit(do_not_specialize=("total",))
def cut_bits(
    Bits, Out, total,
    BY_ROWS: tl.constexpr, BLOCK_Q: tl.constexpr, WORDS: tl.constexpr,
    MAJOR: tl.constexpr, MINOR: tl.constexpr, MAJORS: tl.constexpr, MINORS: tl.constexpr,
    SIZE: tl.constexpr,
):  # fmt: skip
    """Store the bits of kernel tiles as a lane of a tensor-core accumulator holds them.

    Bits int32 (tiles, BLOCK_Q, WORDS) -> Out int32 (total, 4), MAJOR rows for every kernel tile.
    Minor token 8 * g + 2 * c + e is bit 2 * g + e of word c.
    """
    line = tl.program_id(0).to(tl.int64) * SIZE + tl.arange(0, SIZE)  # [SIZE]
    there = line < total
    cell, own = line // MAJOR, line % MAJOR
    tile = cell // (MAJORS * MINORS)
    major = cell // MINORS % MAJORS * MAJOR + own  # token of the block
    minor = cell % MINORS * MINOR
    lane = tl.arange(0, 4)[None, :]  # [1, 4]
    out = tl.zeros([SIZE, 4], tl.uint32)
    if BY_ROWS:
        EIGHTS: tl.constexpr = MINOR // 8 if MINOR < 32 else 4  # of a word
        shift = (minor % 32).to(tl.uint32)
        base = Bits + (tile * BLOCK_Q + major) * WORDS + minor // 32
        for word in tl.static_range((MINOR + 31) // 32):
            value = tl.load(base + word, mask=there, other=0).to(tl.uint32, bitcast=True) >> shift
            for eight in tl.static_range(EIGHTS):
                pair = (value[:, None] >> (8 * eight + 2 * lane).to(tl.uint32)) & 3  # [SIZE, 4]
                out |= pair << (2 * (4 * word + eight))
    else:
        shift = (major % 32).to(tl.uint32)[:, None]
        base = Bits + (tile * BLOCK_Q + minor) * WORDS + major // 32
        for bit in tl.static_range(MINOR // 4):
            token = 8 * (bit // 2) + bit % 2 + 2 * lane  # [1, 4]
            value = tl.load(base[:, None] + token * WORDS, mask=there[:, None], other=0)
            out |= ((value.to(tl.uint32, bitcast=True) >> shift) & 1) << bit
    to = Out + line[:, None] * 4 + lane
    tl.store(to, out.to(tl.int32, bitcast=True), mask=there[:, None])
