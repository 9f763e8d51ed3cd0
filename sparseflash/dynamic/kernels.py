"""Triton kernels of selections: lists from block codes, and masks cut at the ends of sequences."""

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from masks import BlockLists
from sparseflash.cache import on_clear
from sparseflash.kernels.common.launch import Launch, launch

EMPTY = tl.constexpr(-2)
_BY_ROW, _BY_COL = (4, 256), (8, 128)  # lists, and entries at a time, of a program
_LISTS = 4096  # placed at a time


def block_lists(codes: Tensor, n_tiles: int, max_blocks: int, *cut: bool) -> tuple[Tensor, ...]:
    """Three launches: count, place, fill. See `lists.py`."""
    slices, rows, cols = codes.shape
    n_rows, n_cols = slices * rows, slices * cols
    row_programs, col_programs = slices * -(-rows // _BY_ROW[0]), slices * -(-cols // _BY_COL[0])
    total, partial = torch.empty((2, n_rows + n_cols), dtype=torch.int32, device=codes.device)
    places = [torch.empty(n, dtype=torch.int64, device=codes.device)
              for n in (n_rows + 1, n_rows, n_cols + 1, n_cols)]  # fmt: skip
    entries = [torch.empty(max_blocks, dtype=torch.int32, device=codes.device) for _ in range(4)]
    by_row, by_col = BlockLists(*places[:2], *entries[:2]), BlockLists(*places[2:], *entries[2:])
    partials = n_tiles > 0 or any(cut)
    sizes = (*cut, partials, *_BY_ROW, *_BY_COL)
    grid = (row_programs + col_programs,)
    launch(
        count_blocks, grid, codes, total, partial, rows, cols, n_tiles, row_programs, n_rows,
        *sizes,
    )  # fmt: skip
    launch(
        place_lists, (2,),
        total, partial, *places, n_rows, n_cols, PARTIALS=partials, SIZE=_LISTS,
        num_warps=8,
    )  # fmt: skip
    launch(fill_lists, grid, codes, *by_row, *by_col, rows, cols, n_tiles, row_programs, *sizes)
    return *by_row, *by_col


_CELLS = 1024  # codes of a program
_ROWS = 32  # rows of bits of a program


def cut_blocks(blocks: Any, lengths: Tensor) -> tuple[Tensor, Tensor]:
    """One launch for `lengths.cut_torch`, given a `lengths.Cuttable`."""
    lengths = lengths.contiguous()
    codes, tiles, column = blocks.codes, blocks.bits, blocks.column
    batch, (n_blocks, slots) = len(lengths), column.shape
    heads, (known, block, words) = codes.shape[1], tiles.shape
    known -= 1
    device, size = lengths.device, heads * n_blocks * n_blocks
    out = torch.empty(batch, heads, n_blocks, n_blocks, dtype=torch.int32, device=device)
    bits = torch.empty(known + batch * slots, block, words, dtype=torch.int32, device=device)
    programs = batch * -(-size // _CELLS)
    launch(
        _cut, (programs + len(bits) * (block // _ROWS),),
        lengths, codes, blocks.place, tiles, column, blocks.prefix,
        out, bits, size, n_blocks, slots, known, programs,
        BLOCK=block, WORDS=words, CELLS=_CELLS, ROWS=_ROWS,
    )  # fmt: skip
    return out, bits


@triton.jit(do_not_specialize=("size", "n_blocks", "slots", "known", "programs"))
def _cut(
    Lengths, Codes, Place, Tiles, Column, Prefix, OutCodes, OutBits,
    size, n_blocks, slots, known, programs,
    BLOCK: tl.constexpr, WORDS: tl.constexpr, CELLS: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Make codes in the first programs, `size` for every sequence, and bits in the others."""
    pid = tl.program_id(0)
    if pid < programs:
        steps = tl.cdiv(size, CELLS)
        b = pid // steps
        cell = pid % steps * CELLS + tl.arange(0, CELLS)  # [CELLS]
        length = tl.load(Lengths + b)
        row, col = cell // n_blocks % n_blocks, cell % n_blocks
        code = tl.load(Codes + cell, mask=cell < size, other=EMPTY)
        place = tl.load(Place + cell, mask=cell < size, other=EMPTY)
        cut = tl.maximum(place + known + b * slots, EMPTY)
        code = tl.where(length - col * BLOCK >= BLOCK, code, cut)
        code = tl.where((length > row * BLOCK) & (length > col * BLOCK), code, EMPTY)
        tl.store(OutCodes + b.to(tl.int64) * size + cell, code, mask=cell < size)
    else:
        line = (pid - programs).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]  # [ROWS, 1]
        tile, query = line // BLOCK, line % BLOCK
        word = tl.arange(0, WORDS)[None, :]  # [1, WORDS]
        new = tile >= known
        made = tl.where(new, tile - known, 0)
        last = tl.load(Lengths + made // slots)
        last = tl.minimum(last, n_blocks * BLOCK) - 1
        last = tl.maximum(tl.where(last < 0, last + n_blocks * BLOCK, last), 0)  # unused, not wild
        own = tl.load(Column + last // BLOCK * slots + made % slots)
        source = tl.where(new, own, tile)
        bits = tl.load(Tiles + (source * BLOCK + query) * WORDS + word)
        seen = tl.load(Prefix + last % BLOCK * WORDS + word)
        tl.store(OutBits + line * WORDS + word, tl.where(new, bits & seen, bits))


def keep_rows(
    tensors: Sequence[Tensor], kinds: Sequence[tuple[Any, ...]], lengths: Tensor,
    starts: Tensor | None, lse: Tensor | None, lowest: float,
) -> list[Tensor]:  # fmt: skip
    """One launch for `lengths._Kept`, which has the arguments."""
    outs = []
    for x, (_, extra, *_) in zip(tensors, kinds, strict=True):
        if extra:  # tokens outermost, as a projection lays them out
            batch, heads, n, width = x.shape
            outs.append(x.new_empty(batch, n, heads, width + extra).transpose(1, 2))
        else:
            outs.append(torch.empty_like(x))

    def arguments():
        sizes, shapes, programs = [], [], 0
        for x, out, (own, *_) in zip(tensors, outs, kinds, strict=True):
            batch, heads, n = x.shape[:3]
            width, columns = (1, 1) if x.ndim == 3 else (x.shape[3], out.shape[3])
            sizes += *x.stride()[:3], x.stride(-1), *out.stride()[:3], batch * heads, heads, n
            shapes += own, min(width, columns), columns, triton.next_power_of_2(columns)
            programs = max(programs, batch * heads * -(-n // _ROWS))
        values = tuple(value for kind in kinds for value in kind[2:])
        given = lengths, starts, lse, tuple(sizes), values, lowest
        options = {"SHAPES": tuple(shapes), "ROWS": _ROWS}
        return (programs,), (tuple(tensors), tuple(outs), *given), options

    layout = [(x.dtype, x.shape, x.stride()) for x in tensors]
    layout = kinds, lowest, starts is None, lse is None, tensors[0].device, *layout
    _launch_rows((*tensors, *outs, lengths, starts, lse), arguments, layout=layout)
    return outs


@triton.jit
def _keep_rows(
    Xs, Outs, Lengths, Starts, Lse, sizes, values, lowest, SHAPES: tl.constexpr, ROWS: tl.constexpr
):
    for i in tl.static_range(len(SHAPES) // 4):
        _keep(
            Xs[i], Outs[i], Lengths, Starts, Lse, sizes[10 * i : 10 * i + 10],
            values[3 * i], values[3 * i + 1], values[3 * i + 2], lowest, SHAPES[4 * i],
            SHAPES[4 * i + 1], SHAPES[4 * i + 2], SHAPES[4 * i + 3], ROWS,
        )  # fmt: skip


@triton.jit
def _keep(
    X, Out, Lengths, Starts, Lse, sizes, real, hidden, fill, lowest, OWN: tl.constexpr,
    WIDTH: tl.constexpr, COLUMNS: tl.constexpr, BLOCK_D: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    x_b, x_h, x_n, x_d, out_b, out_h, out_n, n_bh, heads, n = sizes
    steps = tl.cdiv(n, ROWS)
    bh = (tl.program_id(0) // steps).to(tl.int64)
    token = (tl.program_id(0) % steps).to(tl.int64) * ROWS + tl.arange(0, ROWS)  # [ROWS]
    there = token < tl.where(bh < n_bh, n, 0)
    b, h, kept = tl.minimum(bh, n_bh - 1) // heads, bh % heads, there
    if OWN:
        kept = kept & (token < tl.load(Lengths + b))
        if Starts is not None:
            kept = kept & (token >= tl.load(Starts + b))
    if Lse is not None:
        lse = tl.load(Lse + bh * n + token, mask=there, other=0.0)
        kept = kept & ((lse > lowest) | (lse != lse))  # a NaN shows
    column = tl.arange(0, BLOCK_D)[None, :]  # [1, BLOCK_D]
    kept, there, token = kept[:, None], there[:, None], token[:, None]
    x = X + b * x_b + h * x_h + token * x_n + column * x_d
    x = tl.load(x, mask=kept & (column < WIDTH), other=0.0)  # [ROWS, BLOCK_D]
    x = tl.where(kept, x, fill)
    if COLUMNS > WIDTH:
        x = tl.where(column < WIDTH, x, tl.where(kept, real, hidden))
    to = Out + b * out_b + h * out_h + token * out_n + column
    tl.store(to, x, mask=there & (column < COLUMNS))


_launch_rows = Launch(_keep_rows, static=False)
on_clear(_launch_rows._repeats.clear)


@triton.jit
def block_codes(
    Codes, s, line0, entry0, rows, cols, n_tiles,
    CUT_Q: tl.constexpr, CUT_K: tl.constexpr, BY_ROW: tl.constexpr,
    LINES: tl.constexpr, ENTRIES: tl.constexpr,
):  # fmt: skip
    """Codes and entry numbers of a patch of slice s, so that neighbours in memory are neighbours in
    the patch: [LINES, ENTRIES] for the lists by row, [ENTRIES, LINES] for those by column.

    A full block that the end of the sequence cuts takes one of the three edge tiles.
    """
    line = line0 + tl.arange(0, LINES)
    entry = entry0 + tl.arange(0, ENTRIES)
    row = line[:, None] if BY_ROW else entry[:, None]
    col = entry[None, :] if BY_ROW else line[None, :]
    there = (row < rows) & (col < cols)
    code = tl.load(Codes + (s * rows + row) * cols + col, mask=there, other=-2)
    if CUT_Q or CUT_K:
        cut = tl.zeros_like(code)
        if CUT_Q:
            cut += tl.where(row == rows - 1, 2, 0)
        if CUT_K:
            cut += tl.where(col == cols - 1, 1, 0)
        code = tl.where((code == -1) & (cut > 0), n_tiles + cut - 1, code)
    return code, (col if BY_ROW else row)


@triton.jit(do_not_specialize=("rows", "cols", "n_tiles", "row_programs", "n_row_lists"))
def count_blocks(
    Codes, Total, Partial, rows, cols, n_tiles, row_programs, n_row_lists,
    CUT_Q: tl.constexpr, CUT_K: tl.constexpr, PARTIALS: tl.constexpr, ROW_LINES: tl.constexpr,
    ROW_ENTRIES: tl.constexpr, COL_LINES: tl.constexpr, COL_ENTRIES: tl.constexpr,
):  # fmt: skip
    """Non-empty and partial blocks of every list: those by row first, then those by column.

    PARTIALS: whether there may be partial blocks; without, half of the work is left out.
    """
    pid = tl.program_id(0)
    if pid < row_programs:
        _count(
            Codes, Total, Partial, rows, cols, n_tiles, pid,
            CUT_Q, CUT_K, PARTIALS, True, ROW_LINES, ROW_ENTRIES,
        )  # fmt: skip
    else:
        _count(
            Codes, Total + n_row_lists, Partial + n_row_lists, rows, cols, n_tiles,
            pid - row_programs, CUT_Q, CUT_K, PARTIALS, False, COL_LINES, COL_ENTRIES,
        )  # fmt: skip


@triton.jit
def _count(
    Codes, Total, Partial, rows, cols, n_tiles, pid,
    CUT_Q: tl.constexpr, CUT_K: tl.constexpr, PARTIALS: tl.constexpr, BY_ROW: tl.constexpr,
    LINES: tl.constexpr, ENTRIES: tl.constexpr,
):  # fmt: skip
    n_lines = rows if BY_ROW else cols
    n_entries = cols if BY_ROW else rows
    patches = tl.cdiv(n_lines, LINES)
    s = (pid // patches).to(tl.int64)
    line0 = pid % patches * LINES
    AXIS: tl.constexpr = 1 if BY_ROW else 0
    total = tl.zeros([LINES], tl.int32)
    partial = tl.zeros([LINES], tl.int32)
    for entry0 in range(0, n_entries, ENTRIES):
        code, _ = block_codes(
            Codes, s, line0, entry0, rows, cols, n_tiles, CUT_Q, CUT_K, BY_ROW, LINES, ENTRIES
        )
        total += tl.sum((code != -2).to(tl.int32), AXIS)  # [LINES]
        if PARTIALS:
            partial += tl.sum((code >= 0).to(tl.int32), AXIS)
    line = line0 + tl.arange(0, LINES)
    tl.store(Total + s * n_lines + line, total, mask=line < n_lines)
    if PARTIALS:
        tl.store(Partial + s * n_lines + line, partial, mask=line < n_lines)


@triton.jit(do_not_specialize=("n_row_lists", "n_col_lists"))
def place_lists(
    Total, Partial, RowPtr, RowMid, ColPtr, ColMid, n_row_lists, n_col_lists,
    PARTIALS: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    """Where lists begin and their full blocks do: one program for either direction."""
    if tl.program_id(0) == 0:
        _place(Total, Partial, RowPtr, RowMid, n_row_lists, PARTIALS, SIZE)
    else:
        _place(
            Total + n_row_lists, Partial + n_row_lists, ColPtr, ColMid, n_col_lists, PARTIALS, SIZE
        )


@triton.jit
def _place(Total, Partial, Ptr, Mid, n, PARTIALS: tl.constexpr, SIZE: tl.constexpr):
    before = tl.zeros([], tl.int64)
    for start in range(0, n, SIZE):
        i = start + tl.arange(0, SIZE)
        total = tl.load(Total + i, mask=i < n, other=0)  # [SIZE]
        begin = before + tl.cumsum(total, 0) - total
        tl.store(Ptr + i, begin, mask=i < n)
        if PARTIALS:
            begin += tl.load(Partial + i, mask=i < n, other=0)
        tl.store(Mid + i, begin, mask=i < n)
        before += tl.sum(total, 0)
    tl.store(Ptr + n, before)


@triton.jit(do_not_specialize=("rows", "cols", "n_tiles", "row_programs"))
def fill_lists(
    Codes, RowPtr, RowMid, RowIdx, RowTile, ColPtr, ColMid, ColIdx, ColTile,
    rows, cols, n_tiles, row_programs,
    CUT_Q: tl.constexpr, CUT_K: tl.constexpr, PARTIALS: tl.constexpr, ROW_LINES: tl.constexpr,
    ROW_ENTRIES: tl.constexpr, COL_LINES: tl.constexpr, COL_ENTRIES: tl.constexpr,
):  # fmt: skip
    """Write the entries of all lists, partial blocks first."""
    pid = tl.program_id(0)
    if pid < row_programs:
        _fill(
            Codes, RowPtr, RowMid, RowIdx, RowTile, rows, cols, n_tiles, pid,
            CUT_Q, CUT_K, PARTIALS, True, ROW_LINES, ROW_ENTRIES,
        )  # fmt: skip
    else:
        _fill(
            Codes, ColPtr, ColMid, ColIdx, ColTile, rows, cols, n_tiles, pid - row_programs,
            CUT_Q, CUT_K, PARTIALS, False, COL_LINES, COL_ENTRIES,
        )  # fmt: skip


@triton.jit
def _fill(
    Codes, Ptr, Mid, Idx, Tile, rows, cols, n_tiles, pid,
    CUT_Q: tl.constexpr, CUT_K: tl.constexpr, PARTIALS: tl.constexpr, BY_ROW: tl.constexpr,
    LINES: tl.constexpr, ENTRIES: tl.constexpr,
):  # fmt: skip
    n_lines = rows if BY_ROW else cols
    n_entries = cols if BY_ROW else rows
    patches = tl.cdiv(n_lines, LINES)
    s = (pid // patches).to(tl.int64)
    line0 = pid % patches * LINES
    AXIS: tl.constexpr = 1 if BY_ROW else 0
    line = line0 + tl.arange(0, LINES)
    own = s * n_lines + line
    full_at = tl.load(Mid + own, mask=line < n_lines, other=0)  # [LINES]
    if PARTIALS:
        partial_at = tl.load(Ptr + own, mask=line < n_lines, other=0)
    for entry0 in range(0, n_entries, ENTRIES):
        code, entry = block_codes(
            Codes, s, line0, entry0, rows, cols, n_tiles, CUT_Q, CUT_K, BY_ROW, LINES, ENTRIES
        )
        full = (code == -1).to(tl.int32)
        to = tl.expand_dims(full_at, AXIS) + tl.cumsum(full, AXIS) - 1
        full_at += tl.sum(full, AXIS)
        if PARTIALS:
            partial = (code >= 0).to(tl.int32)
            partial_to = tl.expand_dims(partial_at, AXIS) + tl.cumsum(partial, AXIS) - 1
            to = tl.where(code >= 0, partial_to, to)
            partial_at += tl.sum(partial, AXIS)
        entry = tl.broadcast_to(entry, code.shape)
        tl.store(Idx + to, entry, mask=code != -2)
        tl.store(Tile + to, code, mask=code != -2)
