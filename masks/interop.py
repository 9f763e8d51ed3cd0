"""Block masks in the form of FlexAttention (torch 2.6 and later), and back, exactly.

FlexAttention's lists are square: for every query block the numbers of all key blocks, the listed
ones first, and again for every key block. A block that the end of the sequence cuts is never full
there.
"""

import textwrap
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from masks.block_mask import BlockMask
from masks.checks import argument_places, block_sizes, to_numpy
from masks.runs import Bools, Grid, Ints, quotient
from masks.tiles import EMPTY, FULL, Tiles, pack_bits

__all__ = ["from_flex", "to_flex"]

LINES_AT_ONCE = 1024
GIB = 1 << 30


def to_flex(
    blocks: BlockMask,
    device: Any = None,
    mask_mod: Callable[..., Any] | None = None,
    *,
    limit_gib: float = 8,
) -> Any:
    """FlexAttention's BlockMask, with the same lists as `create_block_mask` makes.

    Args:
        device: of its tensors; the CPU by default.
        mask_mod: the formula (b, h, q, k) -> bool of the same mask. It is called for partial
            blocks, and for all of them where FlexAttention runs without torch.compile. By default
            a lookup of the bit tiles, which works for any mask; a formula may be faster.
        limit_gib: the most memory that the lists may take. There are four of int32, each of batch *
            heads * rows * cols, and a table for the lookup. A million tokens in blocks of 128 take
            1.3 GiB without heads.

    Raises:
        ValueError: more memory would be needed, or mask_mod takes other arguments.
    """
    import torch
    from torch.nn.attention.flex_attention import BlockMask as FlexMask

    if not isinstance(blocks, BlockMask):
        raise ValueError(f"blocks is {shown(blocks)}: give a BlockMask, such as mask.build(n)")
    check_mask_mod(mask_mod)
    arrays = 5 if mask_mod is None else 4
    check_size("FlexAttention's square lists", 4 * arrays * blocks.grid.size, limit_gib)
    layout = blocks.layout()
    if blocks.n_q % blocks.block_size[0]:
        np.minimum(layout[:, :, -1, :], 1, out=layout[:, :, -1, :])
    if blocks.n_k % blocks.block_size[1]:
        np.minimum(layout[..., -1], 1, out=layout[..., -1])
    lists = {}
    for name, chosen in (("", layout == 1), ("full_", layout == 2)):
        for side, kind in (("kv", chosen), ("q", chosen.swapaxes(-1, -2))):
            counts, order = _ordered(kind)
            lists[f"{name}{side}_num_blocks"] = torch.from_numpy(counts).to(device)
            lists[f"{name}{side}_indices"] = torch.from_numpy(order).to(device)
    return FlexMask(
        seq_lengths=(blocks.n_q, blocks.n_k),
        BLOCK_SIZE=blocks.block_size,
        mask_mod=tile_lookup(blocks, device) if mask_mod is None else mask_mod,
        **lists,
    )


def tile_lookup(blocks: BlockMask, device: Any = None) -> Callable[..., Any]:
    """Return a mask_mod (b, h, q, k) -> bool of any block mask, which torch.compile can trace.

    It has no branch: two tiles stand in front, an empty and a full one, so every code is an index.
    With `clamp` in its place, FlexAttention's kernel needed more shared memory than an H100 has,
    and torch 2.11 could not write it for FlashAttention-4.
    """
    import torch

    ends = np.zeros((2, *blocks.bits.shape[1:]), np.uint32)
    ends[1] = ~ends[0]
    tiles = np.concatenate([ends, blocks.bits]).view(np.int32)
    code = torch.from_numpy(blocks.codes() - EMPTY).to(device)
    words = torch.from_numpy(tiles).to(device)
    (block_q, block_k), batch, heads = blocks.block_size, blocks.batch, blocks.heads

    def mask_mod(b: Any, h: Any, q: Any, k: Any) -> Any:
        tile = code[b % batch, h % heads, q // block_q, k // block_k]
        column = k % block_k
        word = words[tile, q % block_q, column // 32]
        return (word >> (column % 32)) & 1 == 1

    return mask_mod


def from_flex(flex_mask: Any) -> BlockMask:
    """Return the exact block mask of a FlexAttention BlockMask.

    Full blocks are taken from the lists. `mask_mod` is called for the partial blocks, some at a
    time, on the device of the lists; a block found full or empty is stored as such. FlexAttention
    calls every block at a ragged end partial; here it is full when all of its existing tokens are
    allowed.

    Raises:
        ValueError: block sizes other than multiples of 16 up to 256, or lists that contradict each
            other.
    """
    if not hasattr(flex_mask, "kv_num_blocks"):
        raise ValueError(f"flex_mask is {shown(flex_mask)}: give a BlockMask of FlexAttention")
    n_q, n_k = (int(n) for n in flex_mask.seq_lengths)
    batch, heads = (1, 1, *flex_mask.kv_num_blocks.shape)[-3:-1]  # a sliced mask may lack them
    block_q, block_k = block_sizes(flex_mask.BLOCK_SIZE)
    tiles = Tiles(Grid(n_q, n_k, block_q, block_k, batch, heads))
    x = _listed(tiles.grid, flex_mask.kv_num_blocks, flex_mask.kv_indices)
    codes, full = _evaluate(flex_mask.mask_mod, tiles, x, flex_mask.kv_indices.device), x[:0]
    if flex_mask.full_kv_num_blocks is not None:
        full = _listed(tiles.grid, flex_mask.full_kv_num_blocks, flex_mask.full_kv_indices)
    x, codes = np.append(x, full), np.append(codes, np.full(len(full), FULL, np.int32))
    order = np.argsort(x, kind="stable")
    x, codes = x[order], codes[order]
    if (x[1:] == x[:-1]).any():
        raise ValueError("a block is listed twice: give each non-empty block once")
    return BlockMask.of_blocks(tiles, x, codes)


def _ordered(chosen: Bools) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
    """Return counts (..., rows), and columns (..., rows, cols), the chosen ones first."""
    lines = np.ascontiguousarray(~chosen).reshape(-1, chosen.shape[-1])
    order = np.empty(lines.shape, np.int32)
    for i in range(0, len(lines), LINES_AT_ONCE):  # argsort gives int64
        order[i : i + LINES_AT_ONCE] = np.argsort(lines[i : i + LINES_AT_ONCE], kind="stable")
    return chosen.sum(-1, dtype=np.int32), order.reshape(chosen.shape)


def _evaluate(
    mask_mod: Callable[..., Any], tiles: Tiles, x: Ints, device: Any
) -> NDArray[np.int32]:
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


def _listed(grid: Grid, counts: Any, indices: Any) -> Ints:
    """Positions of the blocks in padded lists: counts (.., rows), indices (.., rows, width)."""
    counts, indices = to_numpy(counts), to_numpy(indices)
    if counts.shape[-1] != grid.rows:
        raise ValueError(
            f"the lists have {counts.shape[-1]} query blocks, but {grid.n_q} queries need "
            f"{grid.rows}: give the lengths that the lists were made for"
        )
    chosen = np.arange(indices.shape[-1]) < counts[..., None]
    line = np.broadcast_to(np.arange(counts.size).reshape(*counts.shape, 1), indices.shape)
    line, col = line[chosen], indices[chosen]
    if len(col) and not 0 <= col.min() <= col.max() < grid.cols:
        raise ValueError(
            f"blocks {col.min()} to {col.max()} are listed: give 0 to {grid.cols - 1}, because "
            f"there are {grid.n_k} keys in blocks of {grid.block_k}"
        )
    return line.astype(np.int64) * grid.cols + col


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
