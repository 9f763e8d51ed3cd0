"""Block masks of arrays, and of some blocks of another one in a new order."""

import hashlib
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from masks import runs as rl
from masks.block_lists import EMPTY, FULL, row_segments
from masks.checks import block_sizes, integer
from masks.runs import Bools, Grid, Ints, compact, quotient, ranges
from masks.tiles import Tiles, assemble, edge_tiles, pack_bits
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


# ---- from arrays ----


def to_numpy(array: Any) -> NDArray:
    """Return a NumPy array of an array or of a tensor on any device."""
    return np.asarray(array.detach().cpu() if hasattr(array, "detach") else array)


def read_array(array: Any) -> tuple[Bools, str]:
    """Return (a read-only copy (batch, heads, n_q, n_k), its text) of what `mask_from` takes."""
    data = np.array(to_numpy(array))
    if data.dtype != bool:
        kind = type(array).__name__ if data.dtype == object else data.dtype
        raise ValueError(f"array is {kind}: give booleans, True where allowed")
    if data.ndim not in (2, 3, 4) or data.size == 0:
        raise ValueError(
            f"array has shape {data.shape}: give (n_q, n_k), (heads, n_q, n_k) "
            "or (batch, heads, n_q, n_k), none of them 0"
        )
    digest = hashlib.sha256(np.packbits(data).data).hexdigest()
    data = np.ascontiguousarray(data.reshape((1,) * (4 - data.ndim) + data.shape))
    data.flags.writeable = False
    return data, f"mask_from({data.shape}, sha256='{digest}')"


def from_array(array: Any, block_size: int | tuple[int, int]) -> BlockData:
    """Return the block mask of a boolean array; shapes and errors as in `mask_from`."""
    data, text = read_array(array)
    batch, heads, n_q, n_k = data.shape
    grid = Grid(n_q, n_k, *block_sizes(block_size), batch, heads)
    tiles, codes = Tiles(grid), []
    for line in range(grid.slices * grid.rows):
        s, row = divmod(line, grid.rows)
        tokens = data[s // heads, s % heads, grid.q_first[row] : grid.q_last[row] + 1]
        padded = np.zeros((grid.block_q, grid.cols * grid.block_k), bool)
        padded[: len(tokens), :n_k] = tokens
        blocks = padded.reshape(grid.block_q, grid.cols, grid.block_k).swapaxes(0, 1)
        col = np.arange(grid.cols)
        codes.append(tiles.codes(pack_bits(blocks), grid.cut(np.full_like(col, row), col)))
    return assemble(tiles, np.arange(grid.size), np.concatenate(codes), text=text)


def from_layout(
    layout: Any, block_size: int | tuple[int, int], n_q: int | None, n_k: int | None
) -> BlockData:
    """Return the block mask of whole blocks; see `BlockMask.from_layout`."""
    data = to_numpy(layout)
    if data.dtype != bool and not np.issubdtype(data.dtype, np.integer):
        raise ValueError(f"layout is {data.dtype}: give booleans or integers, 0 for an empty block")
    if not data.size:
        raise ValueError(f"layout has shape {data.shape}: give at least one block")
    batch, heads, n_q, n_k, *sizes = layout_extents(data.shape, block_size, n_q, n_k)
    grid = Grid(n_q, n_k, sizes[0], sizes[1], batch, heads)
    codes = np.where(data.ravel() != 0, FULL, EMPTY).astype(np.int32)
    starts, codes = rl.compact(np.arange(grid.size), codes, grid.size)
    return BlockData.of(grid, starts, codes, Tiles(grid).bits, "")


def layout_extents(
    shape: tuple[int, ...], block_size: int | tuple[int, int], n_q: int | None, n_k: int | None
) -> tuple[int, int, int, int, int, int]:
    """Return batch, heads, n_q, n_k, block_q and block_k of a layout with this shape.

    Raises ValueError for a shape that is not (rows, cols), (heads, rows, cols) or (batch, heads,
    rows, cols), and for tokens that have another number of blocks.
    """
    if len(shape) not in (2, 3, 4):
        raise ValueError(
            f"layout has shape {tuple(shape)}: give (rows, cols), (heads, rows, cols) or"
            " (batch, heads, rows, cols)"
        )
    batch, heads, rows, cols = (1,) * (4 - len(shape)) + tuple(shape)
    sizes, tokens = block_sizes(block_size), []
    for name, n, block, count in zip(("n_q", "n_k"), (n_q, n_k), sizes, (rows, cols), strict=True):
        n = count * block if n is None else integer(name, n, min=0)
        if -(-n // block) != count:
            raise ValueError(
                f"{name} is {n}, {-(-n // block)} blocks of {block} tokens, and layout has {count}:"
                f" give {name} between {(count - 1) * block + 1} and {count * block}"
            )
        tokens.append(n)
    return batch, heads, tokens[0], tokens[1], *sizes
