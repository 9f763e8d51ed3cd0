"""The schedule of a selection, made on its device without waiting for it."""

# pyright: reportCallIssue=false, reportArgumentType=false
# To pyright a launch kernel[grid](...) is a call of the Python function, by its argument list.

from contextlib import nullcontext
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from masks.tiles import edge_tiles
from sparseflash.schedule import BlockLists, Schedule, check_extents
from sparseflash.select.selection import Selection
from sparseflash.select.static import to_device

_EMPTY, _FULL = -2, -1
_BY_ROW, _BY_COL = (4, 256), (8, 128)  # lists, and entries at a time, of a program


@torch.no_grad()
def schedule_from_selection(
    selection: Selection, n_q: int, n_k: int, batch: int, heads: int, device: torch.device | str
) -> Schedule:
    """The schedule of `selection` for q (batch, heads, n_q, D) and k of n_k keys on `device`.

    How many blocks there are is known to the device alone: `idx` and `tile` have room for
    `selection.most` entries, of which `ptr` names the first, and `n_partial` is that bound where
    there may be partial blocks at all. Waits for nothing, and can be captured in a CUDA graph.
    ValueError for a selection of other extents or on another device.
    """
    check_extents(selection, n_q, n_k, batch, heads)
    wanted = torch.device(device)
    if selection.device.type != wanted.type or wanted.index not in (None, selection.device.index):
        raise ValueError(f"the selection is on {selection.device}, q on {wanted}: select from q")
    block_q, block_k = selection.block_size
    cut = bool(n_q % block_q), bool(n_k % block_k)
    edges = _edges(n_q, n_k, selection.block_size, selection.device)
    if not len(selection.bits):
        bits = edges
    else:
        bits = torch.cat([selection.bits, edges]) if any(cut) else selection.bits
    codes = selection.codes.contiguous().flatten(0, 1)
    given = (codes, len(selection.bits), selection.most, cut)
    if codes.is_cuda:
        by_row, by_col = both_lists(*given)
    else:
        by_row, by_col = (lists_torch(*given, by_row=by_row) for by_row in (True, False))
    n_partial = selection.most if len(selection.bits) or any(cut) else 0
    extents = (selection.batch, selection.heads, n_q, n_k)
    return Schedule(by_row, by_col, bits, block_q, block_k, *extents, n_partial, dynamic=True)


@lru_cache(maxsize=32)
def _edges(n_q: int, n_k: int, block_size: tuple[int, int], device: torch.device) -> Tensor:
    """int32 (3, block_q, words): all of a block cut by the last key, the last query, and both."""
    return to_device(edge_tiles(n_q, n_k, block_size)[1:].view(np.int32), device)


def lists_torch(
    codes: Tensor, n_tiles: int, most: int, cut: tuple[bool, bool], *, by_row: bool
) -> BlockLists:
    """The lists by row, or by column, of codes (slices, rows, cols), in plain torch."""
    edge = torch.zeros_like(codes[0])
    if cut[0]:
        edge[-1] += 2
    if cut[1]:
        edge[:, -1] += 1
    codes = torch.where((codes == _FULL) & (edge > 0), n_tiles + edge - 1, codes)
    codes = codes if by_row else codes.transpose(1, 2)
    codes = codes.flatten(0, 1)  # one line for each list
    partial, full = codes >= 0, codes == _FULL
    n_partial = partial.sum(1)
    ptr = torch.zeros(len(codes) + 1, dtype=torch.int64, device=codes.device)
    torch.cumsum(n_partial + full.sum(1), 0, out=ptr[1:])
    mid = ptr[:-1] + n_partial
    place = torch.where(partial, ptr[:-1, None] + partial.cumsum(1), mid[:, None] + full.cumsum(1))
    place = torch.where(partial | full, place - 1, most).flatten()  # empty ones go to the end
    idx, tile = (torch.zeros(most + 1, dtype=torch.int32, device=codes.device) for _ in range(2))
    entry = torch.arange(codes.shape[1], dtype=torch.int32, device=codes.device)
    idx.scatter_(0, place, entry.expand_as(codes).flatten())
    tile.scatter_(0, place, codes.flatten())
    return BlockLists(ptr, mid, idx[:most], tile[:most])


def both_lists(
    codes: Tensor, n_tiles: int, most: int, cut: tuple[bool, bool]
) -> tuple[BlockLists, BlockLists]:
    """The lists by row and by column, in three kernels: count, place, fill."""
    from sparseflash.kernels.tl.lists import count_blocks, fill_lists, place_lists

    slices, rows, cols = codes.shape
    n_rows, n_cols = slices * rows, slices * cols
    row_programs, col_programs = slices * -(-rows // _BY_ROW[0]), slices * -(-cols // _BY_COL[0])
    total, partial = torch.empty((2, n_rows + n_cols), dtype=torch.int32, device=codes.device)
    # every tensor begins at a multiple of 16 bytes, whatever the extents
    lengths = (n_rows + 1, n_rows, n_cols + 1, n_cols)
    places = torch.empty(sum(n + n % 2 for n in lengths), dtype=torch.int64, device=codes.device)
    places = places.split([size for n in lengths for size in (n, n % 2)])[::2]
    row_idx, row_tile, col_idx, col_tile = torch.empty(
        (4, most + -most % 4), dtype=torch.int32, device=codes.device
    )[:, :most]
    by_row, by_col = (
        BlockLists(*places[:2], row_idx, row_tile),
        BlockLists(*places[2:], col_idx, col_tile),
    )
    partials = n_tiles > 0 or any(cut)
    sizes = (*cut, partials, *_BY_ROW, *_BY_COL)
    grid = (row_programs + col_programs,)
    with torch.cuda.device(codes.device) if codes.is_cuda else nullcontext():
        count_blocks[grid](codes, total, partial, rows, cols, n_tiles, row_programs, n_rows, *sizes)
        place_lists[(2,)](
            total, partial, *places, n_rows, n_cols, PARTIALS=partials, SIZE=4096, num_warps=8
        )
        fill_lists[grid](codes, *by_row, *by_col, rows, cols, n_tiles, row_programs, *sizes)
    return by_row, by_col
