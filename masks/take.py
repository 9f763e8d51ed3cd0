"""The mask of some blocks of another: cut, reordered or in larger blocks."""

from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from masks import runs as rl
from masks.block_lists import EMPTY, FULL, row_segments
from masks.checks import block_sizes, integer
from masks.runs import Grid, Ints, compact, quotient, ranges
from masks.tiles import Tiles, assemble, edge_tiles, pack_bits, unpack_bits
from masks.types import BlockData, BlockMask


class Blocks(NamedTuple):
    """The non-empty blocks of a mask, one by one, ascending by slice, row and column.

    A slice is b * heads + h.
    """

    slice: Ints  # (nnz,)
    row: Ints  # (nnz,)
    col: Ints  # (nnz,)
    tile: NDArray[np.int32]  # (nnz,) FULL = -1, or the number of the bit tile

    def where(self, kept: NDArray) -> "Blocks":
        """Return the blocks that are kept: bools, or indices."""
        return Blocks(self.slice[kept], self.row[kept], self.col[kept], self.tile[kept])


def blocks_of(mask: BlockMask) -> Blocks:
    """Return the non-empty blocks of a mask; O(nnz) memory."""
    line, first, length, tile = row_segments(mask.grid, mask.starts, mask.tiles)
    s, row = quotient(line, mask.rows)
    s, row, tile = (np.repeat(x, length) for x in (s, row, tile))
    return Blocks(s, row, ranges(first, length), tile)


def moved(
    mask: BlockMask, blocks: Blocks, n_q: int, n_k: int, cut: Ints | None = None,
    slices: tuple[int, int] | None = None,
) -> BlockData:  # fmt: skip
    """Return the mask of n_q queries and n_k keys that has the blocks of `mask` in new places.

    Args:
        blocks: their new rows and columns, in any order, no place twice. `tile` is that of `mask`.
        n_q, n_k: tokens. A block that the new end cuts must have been cut so before.
        cut: (nnz,), how many of its keys a block has; all of them where None. A full block with
            fewer keys becomes a partial one, so that it may lie anywhere.
        slices: (batch, heads) of the new mask, whose slices the blocks have; as before by default.
    """
    block_q, block_k = mask.block_size
    rows, cols = -(-n_q // block_q), -(-n_k // block_k)
    tile, bits = blocks.tile.astype(np.int64), mask.bits
    if cut is not None and (short := (tile == FULL) & (cut < block_k)).any():
        for width in np.unique(cut[short]).tolist():
            edge = edge_tiles(block_q, width, mask.block_size)[-1:]
            same = np.flatnonzero((bits == edge).all((1, 2)))
            tile[short & (cut == width)] = same[0] if len(same) else len(bits)
            bits = bits if len(same) else np.concatenate([bits, edge])
    x = (blocks.slice * rows + blocks.row) * cols + blocks.col
    if (x[1:] < x[:-1]).any():
        order = np.argsort(x, kind="stable")
        x, tile = x[order], tile[order]
    first = np.flatnonzero(np.append(True, (np.diff(x) != 1) | (np.diff(tile) != 0))[: len(x)])
    stop = np.append(x[first[1:] - 1], x[-1:]) + 1  # runs of neighbours with equal tiles
    x, tile = x[first], tile[first]
    bits, tile = _renumbered(bits, tile)
    batch, heads = slices or (mask.batch, mask.heads)
    size = batch * heads * rows * cols
    starts = np.append(0, np.stack([x, stop], axis=1))
    codes = np.append(EMPTY, np.stack([tile, np.full_like(tile, EMPTY)], axis=1))
    starts, codes = compact(starts, codes.astype(np.int32), size)
    return BlockData(n_q, n_k, mask.block_size, batch, heads, starts, codes, bits, "")


def take(mask: BlockMask, rows: ArrayLike, cols: ArrayLike) -> BlockData:
    """See `BlockMask.take`."""
    blocks = blocks_of(mask)
    tokens, places = [], []
    for name, chosen, n, size, count in (
        ("rows", rows, mask.n_q, mask.block_size[0], mask.rows),
        ("cols", cols, mask.n_k, mask.block_size[1], mask.cols),
    ):
        chosen = np.asarray(chosen)
        if chosen.ndim != 1 or not chosen.size or not np.issubdtype(chosen.dtype, np.integer):
            raise ValueError(f"{name} is {chosen!r}: give (R,) numbers of blocks, at least one")
        if chosen.min() < 0 or chosen.max() >= count or len(np.unique(chosen)) < len(chosen):
            raise ValueError(f"{name} must be different numbers from 0 to {count - 1}")
        widths = np.minimum((chosen + 1) * size, n) - chosen * size
        if (widths[:-1] < size).any():
            raise ValueError(f"{name}: the last block has {n % size} tokens, it must stay the last")
        place = np.full(count, -1)
        place[chosen] = np.arange(len(chosen))
        tokens.append(int(widths.sum()))
        places.append(place)
    row, col = places[0][blocks.row], places[1][blocks.col]
    kept = blocks._replace(row=row, col=col).where((row >= 0) & (col >= 0))
    return moved(mask, kept, *tokens)


def _renumbered(bits: NDArray, tile: NDArray) -> tuple[NDArray, NDArray]:
    """Return the tiles that are used, numbered by their first appearance, and their codes."""
    used, first = np.unique(tile[tile >= 0], return_index=True)
    used = used[np.argsort(first)]
    number = np.full(len(bits) + 1, FULL)  # the last entry is that of a full block, -1
    number[used] = np.arange(len(used))
    return bits[used], number[tile]


BLOCKS_AT_ONCE = 1 << 15


def crop(blocks: BlockMask, n_q: int, n_k: int | None = None) -> BlockData | None:
    """See `BlockMask.crop`; None where nothing is cut."""
    n_q = integer("n_q", n_q, min=1, max=blocks.n_q)
    n_k = integer("n_k", n_q if n_k is None else n_k, min=1, max=blocks.n_k)
    if (n_q, n_k) == (blocks.n_q, blocks.n_k):
        return None
    block_q, block_k = blocks.block_size
    grid = Grid(n_q, n_k, block_q, block_k, blocks.batch, blocks.heads)
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
