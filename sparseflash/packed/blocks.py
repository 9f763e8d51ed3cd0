"""Masks of spans: their block codes and bit tiles, in plain torch.

Shapes are known to the host, so nothing waits and torch.compile traces it.
"""

from functools import reduce

import torch
import torch.nn.functional as F
from torch import Tensor

from sparseflash.dynamic.selection import Selection, number_tiles
from sparseflash.operators.twin import twin
from sparseflash.schedule.bits import interval_bits

Blocks = tuple[Tensor, Tensor, Tensor]  # codes and bits of a `Selection`, and whether they fit

_CHUNK = 2**26  # pairs of tokens that are compared at a time


def _block_shapes(spans, n_other, block_q, block_k, room, columns):
    batch, n = spans.shape[2:]
    n_q, n_k = (n_other, n) if columns else (n, n_other)
    codes = spans.new_empty((batch, 1, -(-n_q // block_q), -(-n_k // block_k)))
    bits = spans.new_empty((room, block_q, -(-block_k // 32)))
    return codes, bits, spans.new_empty((), dtype=torch.bool)


@twin(
    "packed",
    "(Tensor spans, SymInt n_other, SymInt block_q, SymInt block_k, SymInt room, bool columns)"
    " -> (Tensor, Tensor, Tensor)",
    _block_shapes,
)
def span_blocks(
    spans: Tensor, n_other: int, block_q: int, block_k: int, room: int, columns: bool
) -> Blocks:
    """Return the block mask of spans: queries see keys, or by columns, keys are seen by queries.

    By columns, blocks below one another with the same pairs in all rows share a tile.

    Args:
        spans: int32 (spans, 2, batch, n), apart from each other.
        n_other: tokens of the other side.
        room: tiles, of all batch entries. The last of the results, bool (), is False where they
            are not enough.
    """
    return (_columns if columns else _rows)(spans, n_other, block_q, block_k, room)


def _rows(spans: Tensor, n_k: int, block_q: int, block_k: int, room: int) -> Blocks:
    batch, n_q = spans.shape[2:]
    rows, cols = -(-n_q // block_q), -(-n_k // block_k)
    lines = _lines(spans, block_q)
    touched, filled = counts(lines, n_k, block_k, cols)
    query = torch.arange(rows * batch, device=touched.device) % rows * block_q
    existing = (n_q - query).clamp(max=block_q)[:, None]
    some, every = touched > 0, filled == existing
    partial = some & ~every
    codes, cell = number_tiles(some, partial, room)
    line, col = cell // cols, cell % cols
    parts = [
        interval_bits(first[line], stop[line], col * block_k, block_k)
        for first, stop in lines.unbind()
    ]
    return codes.view(batch, 1, rows, cols), reduce(torch.bitwise_or, parts), partial.sum() <= room


def _columns(spans: Tensor, n_q: int, block_q: int, block_k: int, room: int) -> Blocks:
    batch, n = spans.shape[2:]
    rows, cols = -(-n_q // block_q), -(-n // block_k)
    lines = _lines(spans, block_k)
    touched, filled = counts(lines, n_q, block_q, rows)  # (batch * cols, rows)
    begin = torch.arange(batch * cols, device=spans.device) % cols * block_k
    last = (begin + block_k).clamp(max=n) - 1  # keys
    partial = (touched > 0) & (filled <= (last - begin)[:, None])
    # Rows of blocks that see the same keys as the rows above them: no key begins or ends in them,
    # and as many are seen.
    even = partial & (touched == filled)
    same = even[:, 1:] & even[:, :-1] & (touched[:, 1:] == touched[:, :-1])
    new = partial & ~F.pad(same, (1, 0))
    codes, cell = number_tiles(touched > 0, partial, room, new)
    codes = codes.view(batch, 1, cols, rows).transpose(2, 3).contiguous()
    return codes, _bits(lines, cell // rows, cell % rows, block_q, block_k), new.sum() <= room


def _lines(spans: Tensor, block: int) -> Tensor:
    """(spans, 2, lines, block); the span of a token that does not exist is empty."""
    missing = -spans.shape[3] % block
    return F.pad(spans, (0, missing)).unflatten(3, (-1, block)).flatten(2, 3)


def _bits(lines: Tensor, line: Tensor, row: Tensor, block_q: int, block_k: int) -> Tensor:
    """int32 (tiles, block_q, words) of the tiles in these lines of keys and rows of blocks."""
    query = torch.arange(block_q, device=lines.device, dtype=torch.int32)
    shift = torch.arange(32, device=lines.device, dtype=torch.int32)
    step, found = max(1, _CHUNK // (block_q * block_k)), []
    for begin in range(0, len(line), step):
        own, below = line[begin : begin + step], row[begin : begin + step]
        at = (below[:, None] * block_q + query).int()[:, :, None]
        parts = [
            (first[own][:, None] <= at) & (at < stop[own][:, None])
            for first, stop in lines.unbind()
        ]
        seen = F.pad(reduce(torch.bitwise_or, parts), (0, -block_k % 32)).unflatten(2, (-1, 32))
        found.append((seen.int() << shift).sum(3, dtype=torch.int32))
    return torch.cat(found)


def counts(lines: Tensor, n: int, block: int, cols: int) -> tuple[Tensor, Tensor]:
    """int32 (lines, cols) each: tokens of a line whose spans touch a block, and fill it.

    lines: spans (spans, 2, lines, tokens), apart from each other, within n tokens on the other
        side.
    """
    count = 0
    for first, stop in lines.unbind():
        low, high = first // block, -(-stop // block)
        inner = -(-first // block)
        outer = torch.where(stop == n, cols, stop // block)  # a block ends with the tokens
        there = (first < stop).int()
        place = torch.cat([low, high, inner + cols + 1, outer.maximum(inner) + cols + 1], 1)
        step = torch.cat([there, -there, there, -there], 1)
        ends = step.new_zeros(len(step), 2 * cols + 2)
        count = ends.scatter_add(1, place.long(), step) + count
    ends = torch.as_tensor(count, device=lines.device).unflatten(1, (2, -1))
    touched, filled = ends.cumsum(2)[..., :-1].unbind(1)
    return touched, filled


def from_spans(
    spans: Tensor, block_size: tuple[int, int], room: int, max_blocks: int, *,
    n_k: int | None = None, columns: bool = False,
) -> Selection:  # fmt: skip
    """Return the mask of n x n_k tokens in which queries see these spans of keys; n_k is n by
    default.

    Args:
        spans: int32 (spans, 2, batch, n), see spans.py. By columns they are of the keys: the
            queries that see them. Blocks below one another then share tiles.
        block_size: (block_q, block_k).
        room: a bound on the tiles of all batch entries. More of them fail an assertion on the
            device: a wrong mask would be worse.
        max_blocks: a bound on the non-empty blocks of all batch entries.
    """
    n = spans.shape[3]
    n_k = n if n_k is None else n_k
    codes, bits, fits = span_blocks(spans, n if columns else n_k, *block_size, room, columns)
    if room < codes.numel():
        message = f"more than {room} partial blocks: the offsets are not those of a packing"
        torch._assert_async(fits, message)  # pyright: ignore
    owned = 0 if columns else room
    return Selection(codes, bits, n, n_k, block_size, max_blocks, owned)


def touching(n: int, block_size: tuple[int, int]) -> int:
    """Blocks on the diagonal of n x n tokens and below it."""
    block_q, block_k = block_size
    return sum(-(-min(end, n) // block_k) for end in range(block_q, n + block_q, block_q))
