"""The same mask for fewer tokens, or in larger blocks: from the runs, without an N x N array."""

import numpy as np
from numpy.typing import NDArray

from masks import runs as rl
from masks.block_lists import EMPTY, FULL, row_segments
from masks.checks import block_sizes, integer
from masks.runs import Grid, Ints, quotient, ranges
from masks.tiles import Tiles, assemble, pack_bits, unpack_bits
from masks.types import BlockData, BlockMask

BLOCKS_AT_ONCE = 1 << 15


def crop(blocks: BlockMask, n_q: int, n_k: int | None = None) -> BlockData | None:
    """See `BlockMask.crop`; None where nothing is cut."""
    n_q = integer("n_q", n_q, min=1, max=blocks.n_q)
    n_k = integer("n_k", n_q if n_k is None else n_k, min=1, max=blocks.n_k)
    if (n_q, n_k) == (blocks.n_q, blocks.n_k):
        return None
    grid = Grid(n_q, n_k, *blocks.block_size, blocks.batch, blocks.heads)
    line, first, length, tile = row_segments(blocks.grid, blocks.starts, blocks.tiles)
    s, row = quotient(line, blocks.rows)
    kept = (row < grid.rows) & (first < grid.cols)
    s, row, first, tile = s[kept], row[kept], first[kept], tile[kept]
    length = np.minimum(length[kept], grid.cols - first)

    # The end of the keys cuts the last column alone: it becomes a segment of its own.
    last = (first + length == grid.cols) & (length > 1) & (tile >= 0)
    length[last] -= 1
    s, row, tile = np.append(s, s[last]), np.append(row, row[last]), np.append(tile, tile[last])
    length = np.append(length, np.ones(last.sum(), np.int64))
    first = np.append(first, np.full(last.sum(), grid.cols - 1))
    x = (s * grid.rows + row) * grid.cols + first
    order = np.argsort(x, kind="stable")
    x, length, row, first = (a[order] for a in (x, length, row, first))

    tiles, codes = Tiles(grid), tile[order]
    partial = codes >= 0
    cut = grid.cut(row[partial], first[partial])
    codes[partial] = tiles.codes_of(blocks.bits, codes[partial].astype(np.int64), cut)
    text = f"({blocks.text})[:{n_q}, :{n_k}]" if blocks.text else ""
    return assemble(tiles, x, codes, length, text=text)


def coarsen(blocks: BlockMask, block_size: int | tuple[int, int]) -> BlockData | None:
    """See `BlockMask.coarsen`; None where the sizes stay the same."""
    sizes = block_sizes(block_size)
    for new, old in zip(sizes, blocks.block_size, strict=True):
        if new % old:
            raise ValueError(f"block_size is {sizes}: give multiples of {blocks.block_size}")
    if sizes == blocks.block_size:
        return None
    grid = Grid(blocks.n_q, blocks.n_k, *sizes, blocks.batch, blocks.heads)
    starts, codes = _coarse_runs(blocks, grid)
    length = np.diff(starts, append=grid.size)
    full, mixed = codes == rl.FULL, codes == rl.MIXED
    tiles, x = Tiles(grid), ranges(starts[mixed], length[mixed])
    new = [
        _merged(blocks, tiles, x[i : i + BLOCKS_AT_ONCE]) for i in range(0, len(x), BLOCKS_AT_ONCE)
    ]
    x = np.concatenate([starts[full], x])
    length = np.concatenate([length[full], np.ones(len(x) - full.sum(), np.int64)])
    codes = np.concatenate([np.full(full.sum(), FULL, np.int32), *new])
    order = np.argsort(x, kind="stable")
    return assemble(tiles, x[order], codes[order], length[order], text=blocks.text)


def _coarse_runs(blocks: BlockMask, grid: Grid) -> rl.Runs:
    """Codes of the coarse blocks, by the allowed area; MIXED where a fine one is partial."""
    fine = blocks.grid
    line, first, length, tile = row_segments(fine, blocks.starts, blocks.tiles)
    s, row = quotient(line, fine.rows)
    begin, end = fine.k_first[first], fine.k_last[first + length - 1] + 1  # tokens
    left, right = begin // grid.block_k, (end - 1) // grid.block_k
    pieces = (  # of a run: in its first coarse column, in those between, and in its last
        (left, left + 1, np.minimum(end, (left + 1) * grid.block_k) - begin),
        (left + 1, np.maximum(left + 1, right), np.full_like(left, grid.block_k)),
        (right, right + (left < right), end - right * grid.block_k),
    )
    line = s * grid.rows + row * fine.block_q // grid.block_q
    height = fine.q_last[row] - fine.q_first[row] + 1
    area = [np.where(tile == FULL, height * width, 1) for *_, width in pieces]
    firsts, stops = (np.concatenate([piece[i] for piece in pieces]) for i in (0, 1))
    return rl.from_cover(grid, np.tile(line, 3), firsts, stops, np.concatenate(area))


def _merged(blocks: BlockMask, tiles: Tiles, x: Ints) -> NDArray[np.int32]:
    """(T,) codes of the coarse blocks at `x`, each made of fine ones."""
    fine, grid = blocks.grid, tiles.grid
    factor_q, factor_k = grid.block_q // fine.block_q, grid.block_k // fine.block_k
    s, row, col = grid.split(x)
    inner_row = row[:, None, None] * factor_q + np.arange(factor_q)[:, None]
    inner_col = col[:, None, None] * factor_k + np.arange(factor_k)
    inside = (inner_row < fine.rows) & (inner_col < fine.cols)
    at = np.where(inside, (s[:, None, None] * fine.rows + inner_row) * fine.cols + inner_col, 0)
    inner = np.where(inside, blocks.tiles[np.searchsorted(blocks.starts, at, "right") - 1], EMPTY)

    columns = np.column_stack([grid.cut(row, col), inner.reshape(len(x), -1)])
    kinds, kind = np.unique(columns, axis=0, return_inverse=True)
    codes = np.empty(len(kinds), np.int32)
    for part in tiles.parts(len(kinds)):
        inner = kinds[part, 1:].reshape(-1, factor_q, factor_k)
        allowed = np.zeros((*inner.shape, *blocks.block_size), bool)
        allowed[inner == FULL] = True
        allowed[inner >= 0] = unpack_bits(blocks.bits[inner[inner >= 0]], fine.block_k)
        allowed = allowed.swapaxes(2, 3).reshape(len(inner), grid.block_q, grid.block_k)
        codes[part] = tiles.codes(pack_bits(allowed), kinds[part, 0])
    return codes[kind.ravel()]
