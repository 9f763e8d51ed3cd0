"""The bits of kernel tiles: cut out of the bit tiles of a schedule, composed, packed for a kernel.

Bits travel as bytes along the minor axis: bit j of byte g is minor token 8 * g + j.
"""

import torch
from torch import Tensor

from sparseflash.schedule.blocks import Schedule, unpack_bits

_CHUNK = 2**25  # pairs of tokens that are unpacked at a time


def cell_bytes(schedule: Schedule, by_rows: bool, cell_major: int, cell_minor: int) -> Tensor:
    """uint8 (tiles, majors, minors, cell_major, cell_minor / 8): every bit tile cut into cells.

    By rows the queries are the major axis, else the keys.
    """
    if by_rows:
        n_minor = schedule.block_k
        packed = schedule.bits.contiguous().view(torch.uint8)[..., : n_minor // 8]
    else:
        n_minor = schedule.block_q
        packed = transposed(schedule.bits, schedule.block_k)
    tiles, n_major = packed.shape[:2]
    cells = packed.reshape(
        tiles, n_major // cell_major, cell_major, n_minor // cell_minor, cell_minor // 8
    )
    return cells.transpose(2, 3).contiguous()


def transposed(bits: Tensor, block_k: int) -> Tensor:
    """uint8 (tiles, block_k, block_q / 8): query 8 * g + j of a key is bit j of byte g."""
    tiles, block_q, _ = bits.shape
    place = torch.arange(8, dtype=torch.uint8, device=bits.device)[:, None]
    packed = torch.empty(tiles, block_k, block_q // 8, dtype=torch.uint8, device=bits.device)
    for some in _chunks(tiles, block_q * block_k):
        queries = unpack_bits(bits[some], block_k).to(torch.uint8)
        eights = queries.unflatten(1, (-1, 8)) << place  # (tiles, bytes, 8, keys)
        packed[some] = eights.sum(2, dtype=torch.uint8).transpose(1, 2)
    return packed


def interval_bits(first: Tensor, stop: Tensor, start: Tensor, block_k: int) -> Tensor:
    """int32 (T, block_q, words): row i has first[t, i]..stop[t, i] of the keys from start[t] on."""
    word = torch.arange(0, block_k, 32, device=start.device)
    width = (block_k - word).clamp(max=32)
    base = (start[:, None] + word)[:, None]  # (T, 1, words)
    low, high = ((end[..., None] - base).clamp(min=0).minimum(width) for end in (first, stop))
    return ((1 << high) - (1 << low)).to(torch.int32)


def _chunks(n: int, pairs: int) -> list[slice]:
    """Slices of range(n), of about _CHUNK pairs of tokens where each of n has `pairs`."""
    step = max(1, _CHUNK // pairs)
    return [slice(first, first + step) for first in range(0, n, step)]


def compose(cells: Tensor, signature: Tensor) -> Tensor:
    """uint8 (n, major, minor / 8) of kernel tiles that are put together from cells.

    cells: uint8 (cells, cell_major, cell_minor / 8).
    signature: int (n, pieces, cells of a piece), pieces along the minor axis and the cells of one
    along the major; the number of a cell, -1 where everything is allowed, -2 where nothing is.
    """
    n, pieces, stacked = signature.shape
    _, cell_major, width = cells.shape
    constant = torch.zeros(2, cell_major, width, dtype=torch.uint8, device=cells.device)
    constant[1] = 255  # -1 is the last one
    found = torch.cat([cells, constant])[signature.long()]
    return found.permute(0, 2, 3, 1, 4).reshape(n, stacked * cell_major, pieces * width)


def fragments(packed: Tensor) -> Tensor:
    """int32 (n, major, 4) from bytes uint8 (n, major, minor / 8), for minor up to 128.

    Minor token 8 * g + 2 * c + e is bit 2 * g + e of word c: what a lane of a tensor-core
    accumulator holds of a row lies in one word.
    """
    n, major, eights = packed.shape
    lane = torch.arange(0, 8, 2, dtype=torch.int32, device=packed.device)
    place = torch.arange(0, 2 * eights, 2, dtype=torch.int32, device=packed.device)[:, None]
    words = torch.empty(n, major, 4, dtype=torch.int32, device=packed.device)
    for some in _chunks(n, 8 * major * eights):
        pairs = (packed[some, :, :, None].int() >> lane) & 3
        torch.sum(pairs << place, 2, dtype=torch.int32, out=words[some])
    return words


def same_rows(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Return the different rows of an int matrix, and for each row which of them it is; no row
    twice.

    A hash tells the rows apart; rows of one hash are then compared in full.
    """
    if rows.shape[1] == 1:
        key = rows[:, 0].long()
    else:
        generator = torch.Generator().manual_seed(0)
        odds = torch.randint(-(2**62), 2**62, (rows.shape[1],), generator=generator) * 2 + 1
        key = (rows * odds.to(rows.device)).sum(1)
    unique, which = torch.unique(key, return_inverse=True)
    first = torch.empty_like(unique)
    first[which] = torch.arange(len(which), device=rows.device)
    if not torch.equal(rows[first][which], rows):  # two rows of one hash
        return rows, torch.arange(len(rows), device=rows.device)
    return rows[first], which
