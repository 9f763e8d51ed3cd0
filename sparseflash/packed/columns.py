"""The block mask of columns: every key is seen by the queries from its own token to some end.

Plain torch with shapes that the host knows, so it waits for nothing and torch.compile traces it.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from masks.block_lists import EMPTY, FULL
from sparseflash.packed.intervals import check_room, counts
from sparseflash.select.selection import Selection

_CHUNK = 2**26  # pairs of tokens that are compared at a time


def from_ends(stop: Tensor, block_size: tuple[int, int], room: int, max_blocks: int) -> Selection:
    """The mask of n x n tokens in which key k is seen by the queries k <= q < stop[b, k].

    Blocks below one another with the same pairs in all rows share a tile.

    Args:
        stop: int (batch, n). An end beyond n is cut off; a key with an end up to itself is unseen.
        block_size: (block_q, block_k).
        room: a bound on the tiles of all batch entries. More of them fail an assertion.
        max_blocks: a bound on the non-empty blocks of all batch entries.
    """
    block_q, block_k = block_size
    batch, n = stop.shape
    rows, cols = -(-n // block_q), -(-n // block_k)
    key = torch.arange(n, dtype=torch.int32, device=stop.device).expand(batch, n)
    stop = stop.clamp(max=n).int().maximum(key)
    missing = cols * block_k - n  # keys that do not exist are seen by nobody
    first, stop = (F.pad(end, (0, missing)).view(-1, block_k) for end in (key, stop))
    touched, filled = counts([(first, stop)], n, block_q, rows)  # (batch * cols, rows)
    begin = torch.arange(batch * cols, device=stop.device) % cols * block_k
    last = (begin + block_k).clamp(max=n) - 1  # keys
    partial = (touched > 0) & (filled <= (last - begin)[:, None])
    # Rows of blocks that see the same keys as the rows above them: no key begins or ends in them,
    # and as many are seen. None begins with the first row either, since the next key would follow.
    even = partial & (touched == filled)
    same = even[:, 1:] & even[:, :-1] & (touched[:, 1:] == touched[:, :-1])
    number = (partial & ~F.pad(same, (1, 0))).flatten().cumsum(0, dtype=torch.int32)
    if room < number.numel():
        check_room(number[-1], room)
    tile = torch.arange(1, room + 1, dtype=torch.int32, device=stop.device)
    cell = torch.searchsorted(number, tile).clamp(max=number.numel() - 1)
    number = (number.view_as(partial) - 1).clamp(max=room - 1)
    codes = torch.where(partial, number, torch.where(touched > 0, FULL, EMPTY)).int()
    codes = codes.view(batch, 1, cols, rows).transpose(2, 3).contiguous()
    bits = _bits(stop, cell // rows, cell % rows, cols, block_size)
    return Selection(codes, bits, n, n, block_size, max_blocks)


def _bits(
    stop: Tensor, line: Tensor, row: Tensor, cols: int, block_size: tuple[int, int]
) -> Tensor:
    """int32 (tiles, block_q, words) of the tiles in these lines of keys and rows of blocks."""
    block_q, block_k = block_size
    query, key = (torch.arange(size, device=stop.device, dtype=torch.int32) for size in block_size)
    shift = torch.arange(32, device=stop.device, dtype=torch.int32)
    step, found = max(1, _CHUNK // (block_q * block_k)), []
    for begin in range(0, len(line), step):
        own, below = line[begin : begin + step], row[begin : begin + step]
        at = (below[:, None] * block_q + query).int()[:, :, None]
        begins = ((own % cols)[:, None] * block_k + key).int()[:, None]
        seen = (begins <= at) & (at < stop[own][:, None])
        seen = F.pad(seen, (0, -block_k % 32)).unflatten(2, (-1, 32))
        found.append((seen.int() << shift).sum(3, dtype=torch.int32))
    return torch.cat(found)
