"""Helpers of the conversions: blocks of one slice, checked lists, tokens of partial blocks."""

import textwrap
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from masks.arrays import to_numpy
from masks.block_lists import FULL, row_segments
from masks.block_mask import BlockMask as Built
from masks.checks import argument_places, integer
from masks.runs import Grid, Ints, quotient, ranges
from masks.tiles import Tiles, assemble, pack_bits
from masks.types import BlockData, BlockMask

GIB = 1 << 30


def block_codes(blocks: BlockMask) -> NDArray[np.int32]:
    """(batch, heads, rows, cols): EMPTY, FULL, or the number of the block's bit tile."""
    lengths = np.diff(blocks.starts, append=blocks.grid.size)
    shape = (blocks.batch, blocks.heads, blocks.rows, blocks.cols)
    return np.repeat(blocks.tiles, lengths).reshape(shape)


class SliceLists(NamedTuple):
    """CSR of one slice, the key blocks of a row ascending whatever their kind."""

    ptr: Ints  # (rows + 1,)
    idx: NDArray[np.int32]  # (nnz,) key blocks
    tile: NDArray[np.int32]  # (nnz,) number of the bit tile, -1 for full


def slice_lists(blocks: BlockMask, batch: int, head: int) -> SliceLists:
    """Return the non-empty key blocks of every query block of one slice."""
    batch = integer("batch", batch, min=0, max=blocks.batch - 1)
    head = integer("head", head, min=0, max=blocks.heads - 1)
    grid = Grid(blocks.n_q, blocks.n_k, *blocks.block_size)
    begin = (batch * blocks.heads + head) * grid.size
    low = np.searchsorted(blocks.starts, begin, "right") - 1
    high = np.searchsorted(blocks.starts, begin + grid.size)
    starts = np.maximum(blocks.starts[low:high] - begin, 0)
    row, first, length, tile = row_segments(grid, starts, blocks.tiles[low:high])
    counts = np.bincount(row, length, blocks.rows).astype(np.int64)
    idx = ranges(first, length, np.int32)
    return SliceLists(np.append(0, np.cumsum(counts)), idx, np.repeat(tile, length))


def evaluate(mask_mod: Callable[..., Any], tiles: Tiles, x: Ints, device: Any) -> NDArray[np.int32]:
    """(T,) codes of the blocks at `x`, from FlexAttention's mask_mod(b, h, q, k) token by token."""
    import torch
    from torch.nn.attention.flex_attention import create_mask

    grid = tiles.grid
    s, row, col = grid.split(x)
    b, h = quotient(s, grid.heads)
    corner = [b, h, row * grid.block_q, col * grid.block_k]
    codes = np.empty(len(x), np.int32)
    for part in tiles.parts(len(x)):
        batch, head, q, k = (torch.from_numpy(a[part]).to(device) for a in corner)

        # Blocks take the place of batch entries. Tokens beyond the end stand for the last ones.
        def of_block(i, _, dq, dk, batch=batch, head=head, q=q, k=k):
            last_q, last_k = grid.n_q - 1, grid.n_k - 1
            return mask_mod(
                batch[i], head[i], (q[i] + dq).clamp(max=last_q), (k[i] + dk).clamp(max=last_k)
            )

        allowed = create_mask(of_block, len(q), 1, grid.block_q, grid.block_k, device=device)
        allowed = allowed[:, 0].to(torch.bool).cpu().numpy()
        codes[part] = tiles.codes(pack_bits(allowed), grid.cut(row[part], col[part]))
    return codes


def listed(grid: Grid, counts: Any, indices: Any) -> Ints:
    """Positions of the blocks in padded lists: counts (.., rows), indices (.., rows, width)."""
    counts, indices = to_numpy(counts), to_numpy(indices)
    if counts.shape[-1] != grid.rows:
        raise ValueError(
            f"the lists have {counts.shape[-1]} query blocks, but {grid.n_q} queries need "
            f"{grid.rows}: give the lengths that the lists were made for"
        )
    chosen = np.arange(indices.shape[-1]) < counts[..., None]
    line = np.broadcast_to(np.arange(counts.size).reshape(*counts.shape, 1), indices.shape)
    return positions(grid, line[chosen], indices[chosen])


def from_lists(
    grid: Grid,
    partial: tuple[Any, Any],
    full: tuple[Any, Any],
    codes_of: Callable[[Tiles, Ints], NDArray[np.int32]],
) -> BlockData:
    """Return the block mask of lists (counts, indices), None where there are none of full blocks.

    Args:
        codes_of: (tiles, positions) -> codes of the listed partial blocks.
    """
    tiles, x = Tiles(grid), listed(grid, *partial)
    whole = np.zeros(0, np.int64) if full[0] is None else listed(grid, *full)
    codes = np.append(codes_of(tiles, x), np.full(len(whole), FULL, np.int32))
    return assemble(tiles, *in_order(np.append(x, whole), codes))


def positions(grid: Grid, line: Ints, col: NDArray) -> Ints:
    """Flattened positions of listed blocks. Raises ValueError for a block outside the grid."""
    if len(col) and not 0 <= col.min() <= col.max() < grid.cols:
        raise ValueError(
            f"blocks {col.min()} to {col.max()} are listed: give 0 to {grid.cols - 1}, because "
            f"there are {grid.n_k} keys in blocks of {grid.block_k}"
        )
    return line.astype(np.int64) * grid.cols + col


def in_order(x: Ints, codes: NDArray[np.int32]) -> tuple[Ints, NDArray[np.int32]]:
    """Ascending positions with their codes. Raises ValueError for a block that is listed twice."""
    order = np.argsort(x, kind="stable")
    x, codes = x[order], codes[order]
    if (x[1:] == x[:-1]).any():
        raise ValueError("a block is listed twice: give each non-empty block once")
    return x, codes


def check_built(blocks: Any) -> None:
    """Raise ValueError for what is no block mask of `masks`, such as a mask without a length."""
    if not isinstance(blocks, Built):
        raise ValueError(f"blocks is {shown(blocks)}: give a BlockMask, such as mask.build(n)")


def check_fields(name: str, value: Any, field: str, wanted: str) -> None:
    """Raise ValueError for what has no such field."""
    if not hasattr(value, field):
        raise ValueError(f"{name} is {shown(value)}: give {wanted}")


def shown(value: Any) -> str:
    """Return the value in at most 80 characters, with its type."""
    return f"{textwrap.shorten(str(value), 80)!r}, of type {type(value).__name__}"


def check_mask_mod(mask_mod: Callable[..., Any] | None) -> None:
    """Raise ValueError where mask_mod cannot be called with the numbers (b, h, q, k)."""
    places = ("b", "h", "q", "k")
    if mask_mod is None:
        return
    name = getattr(mask_mod, "__qualname__", type(mask_mod).__name__)
    if not callable(mask_mod):
        raise ValueError(f"mask_mod is {shown(mask_mod)}: give a function (b, h, q, k) -> bool")
    order = argument_places(mask_mod, name, places, "FlexAttention gives a mask_mod these four")
    if order != places:
        raise ValueError(
            f"mask_mod is {name} of ({', '.join(order)}): FlexAttention calls it with (b, h, q, k),"
            " so give the parameters that order"
        )


def check_size(what: str, nbytes: int, limit_gib: float) -> None:
    """Raise ValueError if `nbytes` is more than `limit_gib`."""
    if nbytes > limit_gib * GIB:
        raise ValueError(
            f"{what} would take {nbytes / GIB:.1f} GiB, more than limit_gib={limit_gib}: take a "
            "larger block_size or fewer tokens or heads, or raise limit_gib"
        )
