"""Lists of the blocks of a selection, by the kernels that count, place and fill."""

import torch
from torch import Tensor

from sparseflash.kernels.device import on
from sparseflash.kernels.launch import launch
from sparseflash.kernels.tl.lists import count_blocks, fill_lists, place_lists
from sparseflash.schedule import BlockLists

_BY_ROW, _BY_COL = (4, 256), (8, 128)  # lists, and entries at a time, of a program
_LISTS = 4096  # placed at a time


def block_lists(
    codes: Tensor, n_tiles: int, max_blocks: int, cut: tuple[bool, bool]
) -> tuple[BlockLists, BlockLists]:
    """`schedule.lists_torch` by row and by column, in three kernels: count, place, fill."""
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
    with on(codes.device):
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
    return by_row, by_col
