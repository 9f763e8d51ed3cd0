"""Boolean arrays as block masks."""

import hashlib
from typing import Any

import numpy as np
from numpy.typing import NDArray

from masks import runs as rl
from masks.block_lists import EMPTY, FULL
from masks.checks import block_sizes, integer
from masks.runs import Bools, Grid
from masks.tiles import Tiles, assemble, pack_bits
from masks.types import BlockData


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
