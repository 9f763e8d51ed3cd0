"""The schedule of a selection, made on its device without waiting for it."""

import torch
import torch.nn.functional as F
from torch import Tensor

from masks import BlockLists
from masks.tiles import FULL
from sparseflash.cache import are_fake, cached
from sparseflash.checks import check_extents
from sparseflash.dynamic.selection import Selection, of_heads, to_device
from sparseflash.operators.twin import twin
from sparseflash.schedule.bits import interval_bits
from sparseflash.schedule.blocks import Schedule


@torch.no_grad()
def schedule_from_selection(
    selection: Selection, n_q: int, n_k: int, batch: int, heads: int, device: torch.device | str,
    kv_heads: int | None = None,
) -> Schedule:  # fmt: skip
    """Return the schedule of `selection` for q (batch, heads, n_q, D) and k of n_k keys on
    `device`.

    A selection of `kv_heads` heads is that of the key heads, which their query heads share.

    Only the device knows the number of blocks. `idx` and `tile` have room for
    `selection.max_blocks` entries, and `ptr` tells where the lists end; `n_partial` is that bound
    too, or 0 where no block can be partial. The host does not wait, so that a CUDA graph can
    capture it.

    Raises ValueError for a selection of other extents or on another device.
    """
    check_extents(selection, n_q, n_k, batch, heads, kv_heads)
    selection = of_heads(selection, heads)
    wanted = torch.device(device)
    if selection.device.type != wanted.type or wanted.index not in (None, selection.device.index):
        raise ValueError(f"the selection is on {selection.device}, q on {wanted}: select from q")
    block_q, block_k = selection.block_size
    cut = bool(n_q % block_q), bool(n_k % block_k)
    traced = torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active()
    edges = (edge_bits if traced or are_fake() else _known_edges)(
        n_q, n_k, selection.block_size, selection.device
    )
    if not len(selection.bits):
        bits = edges
    else:
        bits = torch.cat([selection.bits, edges]) if any(cut) else selection.bits
    codes = selection.codes.contiguous().flatten(0, 1)
    made = block_lists(codes, len(selection.bits), selection.max_blocks, *cut)
    by_row, by_col = BlockLists(*made[:4]), BlockLists(*made[4:])
    n_partial = selection.max_blocks if len(selection.bits) or any(cut) else 0
    extents = (selection.batch, selection.heads, n_q, n_k)
    return Schedule(by_row, by_col, bits, block_q, block_k, *extents, n_partial)


@cached
def _known_edges(n_q: int, n_k: int, block_size: tuple[int, int], device: torch.device) -> Tensor:
    return to_device(edge_bits(n_q, n_k, block_size, torch.device("cpu")).numpy(), device)


def edge_bits(n_q: int, n_k: int, block_size: tuple[int, int], device: torch.device) -> Tensor:
    """int32 (3, block_q, words): all of a block cut by the last key, the last query, and both."""
    block_q, block_k = block_size
    last_q, last_k = n_q % block_q or block_q, n_k % block_k or block_k
    row = torch.arange(block_q, device=device)
    stop = torch.stack(
        [
            torch.where(row < q, k, 0)
            for q, k in ((block_q, last_k), (last_q, block_k), (last_q, last_k))
        ]
    )
    return interval_bits(torch.zeros_like(stop), stop, row.new_zeros(3), block_k)


# an operator also because inductor of torch 2.11 fails on `_lists`
@twin(
    "dynamic",
    "(Tensor codes, SymInt n_tiles, SymInt max_blocks, bool cut_q, bool cut_k)"
    f" -> ({', '.join(['Tensor'] * 8)})",
)
def block_lists(
    codes: Tensor, n_tiles: int, max_blocks: int, cut_q: bool, cut_k: bool
) -> tuple[Tensor, ...]:
    """Return the tensors of two `BlockLists`, by row and by column, of codes (slices, rows, cols).

    cut_q, cut_k: whether the last query block, and the last key block, ends beyond the tokens.
    """
    edge = torch.zeros_like(codes[0])
    if cut_q:
        edge[-1] += 2
    if cut_k:
        edge[:, -1] += 1
    codes = torch.where((codes == FULL) & (edge > 0), n_tiles + edge - 1, codes)
    return *_lists(codes, max_blocks), *_lists(codes.transpose(1, 2), max_blocks)


def _lists(codes: Tensor, max_blocks: int) -> BlockLists:
    """Return the lists along the lines of codes (slices, lines, entries)."""
    codes = codes.flatten(0, 1)  # one line for each list
    partial, full = codes >= 0, codes == FULL
    n_partial = partial.sum(1)
    ptr = F.pad((n_partial + full.sum(1)).cumsum(0), (1, 0))
    mid = ptr[:-1] + n_partial
    place = torch.where(partial, ptr[:-1, None] + partial.cumsum(1), mid[:, None] + full.cumsum(1))
    place = torch.where(partial | full, place - 1, max_blocks).flatten()  # empty ones go to the end
    entry = torch.arange(codes.shape[1], dtype=torch.int32, device=codes.device)
    room = torch.zeros(max_blocks + 1, dtype=torch.int32, device=codes.device)
    # not in place: torch.vmap may have `place` for each entry, and one `room`
    idx, tile = (
        room.scatter(0, place, x.flatten())[:max_blocks] for x in (entry.expand_as(codes), codes)
    )
    return BlockLists(ptr, mid, idx, tile)
