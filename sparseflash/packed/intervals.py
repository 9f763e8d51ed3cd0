"""The block mask of intervals: every query sees a few stretches of keys.

Plain torch with shapes that the host knows, so it waits for nothing and torch.compile traces it.
"""

from collections.abc import Sequence
from functools import reduce

import torch
import torch.nn.functional as F
from torch import Tensor

from sparseflash.select.selection import Selection, number_tiles
from sparseflash.tiles.bits import interval_bits

Span = tuple[Tensor, Tensor]  # int (batch, tokens) each: the first token that is seen, and the end


def from_intervals(
    spans: Sequence[Span], n_k: int, block_size: tuple[int, int], room: int, max_blocks: int
) -> Selection:
    """The mask in which query q sees the keys first[b, q] <= k < stop[b, q] of every span.

    Args:
        spans: they may touch or overlap, in the order of their firsts. An end outside of 0..n_k is
            cut off, and a span that ends before it begins is empty.
        n_k: keys.
        block_size: (block_q, block_k).
        room: a bound on the partial blocks of all batch entries. More of them fail an assertion.
        max_blocks: a bound on the non-empty blocks of all batch entries.
    """
    block_q, block_k = block_size
    batch, n_q = spans[0][0].shape
    rows, cols = -(-n_q // block_q), -(-n_k // block_k)
    missing = rows * block_q - n_q  # queries that do not exist see nothing
    lines = [
        (F.pad(first, (0, missing)).view(-1, block_q), F.pad(stop, (0, missing)).view(-1, block_q))
        for first, stop in _apart(spans, n_k)
    ]
    touched, filled = counts(lines, n_k, block_k, cols)
    query = torch.arange(rows * batch, device=touched.device) % rows * block_q
    existing = (n_q - query).clamp(max=block_q)[:, None]
    some, every = touched > 0, filled == existing
    partial = some & ~every
    if room < partial.numel():
        check_room(partial.sum(), room)
    codes, cell = number_tiles(some, partial, room)
    line, col = cell // cols, cell % cols
    parts = [
        interval_bits(first[line], stop[line], col * block_k, block_k) for first, stop in lines
    ]
    bits = reduce(torch.bitwise_or, parts)
    codes = codes.view(batch, 1, rows, cols)
    return Selection(codes, bits, n_q, n_k, block_size, max_blocks, owned=room)


def check_room(found: Tensor, room: int) -> None:
    """Fails on the device for more partial blocks than room: a wrong mask would be worse."""
    message = f"more than {room} partial blocks: the offsets are not those of a packing"
    torch._assert_async(found <= room, message)  # pyright: ignore


def touching(n: int, block_size: tuple[int, int]) -> int:
    """Blocks on the diagonal of n x n tokens and below it."""
    block_q, block_k = block_size
    return sum(-(-min(end, n) // block_k) for end in range(block_q, n + block_q, block_q))


def _apart(spans: Sequence[Span], n: int) -> list[Span]:
    """The same within 0..n, and no two of a token touch: what they share belongs to the later."""
    found: list[Span] = []
    for first, stop in spans:
        first, stop = (end.clamp(0, n).int() for end in (first, stop))
        stop = stop.maximum(first)
        if found:
            before, end = found[-1]
            empty = first == stop
            join = (before < end) & (empty | (end >= first))
            first, stop = (
                torch.where(join, before, first),
                torch.where(join, torch.where(empty, end, end.maximum(stop)), stop),
            )
            found[-1] = before, torch.where(join, before, end)
        found.append((first, stop))
    return found


def counts(lines: Sequence[Span], n: int, block: int, cols: int) -> tuple[Tensor, Tensor]:
    """int32 (lines, cols) each: tokens of a line whose spans touch a block, and fill it.

    lines: spans (lines, tokens), apart from each other, within n tokens on the other side.
    """
    count = 0
    for first, stop in lines:
        low, high = first // block, -(-stop // block)
        inner = -(-first // block)
        outer = torch.where(stop == n, cols, stop // block)  # a block ends with the tokens
        there = (first < stop).int()
        place = torch.cat([low, high, inner + cols + 1, outer.maximum(inner) + cols + 1], 1)
        step = torch.cat([there, -there, there, -there], 1)
        ends = step.new_zeros(len(step), 2 * cols + 2)
        count = ends.scatter_add(1, place.long(), step) + count
    touched, filled = torch.as_tensor(count).unflatten(1, (2, -1)).cumsum(2)[..., :-1].unbind(1)
    return touched, filled
