"""The same mask for more tokens: only the new rows and columns are classified."""

import numpy as np

from masks.algebra import Mask
from masks.block_lists import row_segments
from masks.block_mask import BlockMask
from masks.build import resolve
from masks.checks import integer
from masks.runs import Grid, Ints
from masks.tiles import Tiles, assemble


def extend(mask: Mask, blocks: BlockMask, n_q: int, n_k: int) -> BlockMask:
    """`mask.build(n_q, n_k, ..)` from `blocks`, which `mask` built for no more tokens.

    Raises:
        ValueError: fewer tokens than `blocks` has, or a mask that looks at the length
            (`mask.prefix_stable` is False).
    """
    n_q = integer("n_q", n_q, least=blocks.n_q)
    n_k = integer("n_k", n_k, least=blocks.n_k)
    if not mask.prefix_stable:
        raise ValueError(f"{mask} is another mask at another length: build it anew")
    # Blocks that the end of the sequence cuts are no longer the same.
    rows = blocks.rows if n_q == blocks.n_q else blocks.n_q // blocks.block_size[0]
    cols = blocks.cols if n_k == blocks.n_k else blocks.n_k // blocks.block_size[1]
    extents = (*blocks.block_size, blocks.batch, blocks.heads)
    parts = [(blocks, 0, 0)]
    known_keys = min(n_k, cols * blocks.block_size[1])
    if cols < -(-n_k // blocks.block_size[1]):
        right = Grid(n_q, n_k, *extents, k_origin=cols * blocks.block_size[1])
        parts.append((resolve(mask.place(right), right), 0, cols))
    if rows < -(-n_q // blocks.block_size[0]) and known_keys:
        below = Grid(n_q, known_keys, *extents, q_origin=rows * blocks.block_size[0])
        parts.append((resolve(mask.place(below), below), rows, 0))

    grid = Grid(n_q, n_k, *extents)
    tiles, segments = Tiles(grid), []
    for number, (part, first_row, first_col) in enumerate(parts):
        x, length, tile = _segments(part, grid, first_row, first_col)
        if number == 0:  # of the old blocks, those that stay
            row, col = x // grid.cols % grid.rows, x % grid.cols
            kept = (row < rows) & (col < cols)
            x, tile = x[kept], tile[kept]
            length = np.minimum(length[kept], cols - col[kept])
        codes = tile.copy()
        numbers = tiles.codes(part.bits, np.zeros(len(part.bits), np.int64))
        codes[tile >= 0] = numbers[tile[tile >= 0]]
        segments.append((x, length, codes))
    x, length, codes = (np.concatenate(arrays) for arrays in zip(*segments, strict=True))
    order = np.argsort(x, kind="stable")
    return assemble(tiles, x[order], codes[order], length[order], text=mask.key)


def _segments(
    part: BlockMask, grid: Grid, first_row: int, first_col: int
) -> tuple[Ints, Ints, np.ndarray]:
    """(x, length, tile) of the non-empty runs of `part`, placed in `grid`."""
    line, first, length, tile = row_segments(part.grid, part.starts, part.tiles)
    s, row = np.divmod(line, part.rows)
    return (s * grid.rows + first_row + row) * grid.cols + first_col + first, length, tile
