"""Bit tiles of partial blocks: `Tiles` classifies them (empty, full or partial), and numbers the
distinct ones.
"""

from collections.abc import Iterator
from math import prod

import numpy as np
from numpy.typing import NDArray

from masks.leaves.geometry import hashes
from masks.runs import Bools, Grid, Ints, quotient

EMPTY, FULL = -2, -1  # codes of blocks in a `BlockMask`; one >= 0 is the number of a bit tile

Words = NDArray[np.uint32]

PAIRS_AT_ONCE = 1 << 20  # bounds the memory for tiles that are not packed


def pack_bits(allowed: Bools) -> NDArray[np.uint32]:
    """Bool (T, block_q, block_k) -> uint32 (T, block_q, ceil(block_k / 32)), low bit first."""
    packed = np.packbits(allowed, axis=-1, bitorder="little")
    if padding := -packed.shape[-1] % 4:
        packed = np.pad(packed, ((0, 0), (0, 0), (0, padding)))
    return packed.view("<u4").astype(np.uint32, copy=False)


def unpack_bits(bits: NDArray[np.uint32], block_k: int) -> Bools:
    """uint32 (..., ceil(block_k / 32)) -> bool (..., block_k)."""
    bytes_ = np.ascontiguousarray(bits.astype("<u4", copy=False)).view(np.uint8)
    return np.unpackbits(bytes_, axis=-1, bitorder="little")[..., :block_k].view(bool)


def _between(size: int, first: int, stop: int) -> Bools:
    """(2, 2, size) the places of a block that exist, by whether it is cut before and behind."""
    at = np.arange(size)
    begins, ends = np.stack([at >= 0, at >= first]), np.stack([at < size, at < stop])
    return begins[:, None] & ends


def _any(bits: Words) -> Bools:
    """(T,) whether a tile has a bit."""
    words = bits.reshape(len(bits), prod(bits.shape[1:]))
    return np.bitwise_or.reduce(words.view(np.uint64), axis=1) != 0


class Tiles:
    """The distinct tiles of the partial blocks of a grid, numbered as they come."""

    def __init__(self, grid: Grid):
        self.grid = grid
        last_q = (grid.n_q - grid.q_origin - 1) % grid.block_q + 1
        last_k = (grid.n_k - grid.k_origin - 1) % grid.block_k + 1
        rows = _between(grid.block_q, max(-grid.q_origin, 0), last_q)
        cols = pack_bits(_between(grid.block_k, max(-grid.k_origin, 0), last_k))
        exists = np.where(rows[:, None, :, None, :, None], cols[:, None, :, None], np.uint32(0))
        self.exists = exists.reshape(16, *exists.shape[-2:])  # by Grid.cut
        self._numbers: dict[int | bytes, int] = {}  # by hash, or by content where hashes are equal
        self._tiles = np.empty((0, *self.exists.shape[1:]), np.uint32)  # the first of them count
        self._count = 0

    def parts(self, count: int, pairs: int = 0) -> Iterator[slice]:
        """`count` tiles in parts that are small enough to be unpacked, or so many pairs of each."""
        at_once = max(1, PAIRS_AT_ONCE // (pairs or self.grid.block_q * self.grid.block_k))
        return (slice(i, min(i + at_once, count)) for i in range(0, count, at_once))

    @property
    def bits(self) -> Words:
        """uint32 (T, block_q, words), as `BlockMask.bits`."""
        return self._tiles[: self._count]

    def codes(self, bits: Words, cut: Ints) -> NDArray[np.int32]:
        """(T,) codes of blocks with these bits, whose ends are cut as `Grid.cut` says.

        Bits of tokens that do not exist are dropped.
        """
        kinds = np.flatnonzero(np.bincount(cut))
        exists = self.exists[cut if len(kinds) > 1 else kinds]
        bits = bits & exists
        some, lacking = _any(bits), _any(bits ^ exists)
        codes = np.where(lacking, EMPTY, FULL).astype(np.int32)
        partial = np.flatnonzero(some & lacking)
        codes[partial] = self._number(bits if len(partial) == len(bits) else bits[partial])
        return codes

    def _number(self, bits: Words) -> Ints:
        """(T,) numbers of partial tiles."""
        known = self._numbers
        numbers = [known.setdefault(key, len(known)) for key in hashes(bits).tolist()]
        numbers = np.array(numbers, np.int64)
        others = self._add(bits, numbers)
        for i in others[_any(self._tiles[numbers[others]] ^ bits[others])].tolist():
            numbers[i] = known.setdefault(bits[i].tobytes(), len(known))
            self._add(bits[i : i + 1], numbers[i : i + 1])
        return numbers

    def _add(self, bits: Words, numbers: Ints) -> Ints:
        """Keep the tiles whose numbers are new, and return the places of the others."""
        if len(self._numbers) > len(self._tiles):
            room = np.empty((2 * len(self._numbers), *bits.shape[1:]), np.uint32)
            room[: self._count] = self.bits
            self._tiles = room
        new = numbers > np.maximum.accumulate(np.append(self._count - 1, numbers))[:-1]
        self._tiles[self._count : len(self._numbers)] = bits[new]
        self._count = len(self._numbers)
        return np.flatnonzero(~new)

    def codes_of(self, bits: Words, number: Ints, cut: Ints) -> NDArray[np.int32]:
        """(T,) codes of blocks with the bits `bits[number]`; equal ones are looked at once."""
        kinds, kind = np.unique(number.astype(np.int64) * 4 + cut, return_inverse=True)
        codes = np.empty(len(kinds), np.int32)
        for part in self.parts(len(kinds)):
            tile, cut = quotient(kinds[part], 4)
            codes[part] = self.codes(bits[tile], cut)
        return codes[kind]


def ordered(bits: Words, codes: NDArray[np.int32]) -> Words:
    """Return the tiles that are used, in the order of their appearance.

    `codes` becomes their numbers in it.
    """
    partial = codes >= 0
    used = codes[partial]
    first = np.full(len(bits), len(used))
    first[used[::-1]] = np.arange(len(used) - 1, -1, -1)  # the first place of each
    order = np.argsort(first, kind="stable")[: np.count_nonzero(first < len(used))]
    if (order == np.arange(len(order))).all():
        return bits[: len(order)]
    new = np.empty(len(bits), np.int32)
    new[order] = np.arange(len(order))
    codes[partial] = new[used]
    return bits[order]


def edge_tiles(n_q: int, n_k: int, block_size: tuple[int, int]) -> np.ndarray:
    """uint32 (4, block_q, words): all pairs that exist in an inner block, in one at the last key,
    at the last query, and at both.
    """
    return Tiles(Grid(n_q, n_k, *block_size)).exists[:4]
