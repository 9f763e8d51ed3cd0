"""What the analyses read of a block mask: its non-empty runs cut at row ends, and its bit tiles."""

from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from masks.block_lists import FULL, row_segments
from masks.checks import integer
from masks.runs import Bools, Grid, Ints
from masks.tiles import unpack_bits
from masks.types import BlockMask

TILES_AT_ONCE = 512  # unpacked: bounds the memory
FARTHEST = 1 << 40  # stands for "none" where a distance is sought; beyond any number of tokens


class TileFacts(NamedTuple):
    """Of every bit tile (T,), and of its queries (T, block_q) and keys (T, block_k)."""

    pairs: Ints  # allowed ones
    sees: Bools  # query i sees a key
    seen: Bools  # key j is seen
    back: Ints  # largest i - j
    ahead: Ints  # largest j - i


@dataclass(frozen=True)
class Segments:
    """Blocks first..stop - 1 of (slice s, block row) are not empty; ascending by (s, row, first).

    Attributes:
        grid: the geometry, with as many slices as `s` tells apart.
        s, row, first, stop: int64 (S,).
        tile: int32 (S,), the code as in `BlockMask.tiles`.
        bits: the tiles, as in `BlockMask.bits`.
    """

    grid: Grid
    s: Ints
    row: Ints
    first: Ints
    stop: Ints
    tile: NDArray[np.int32]
    bits: NDArray[np.uint32]

    @classmethod
    def of(cls, blocks: BlockMask, batch: int | None = None, head: int | None = None) -> "Segments":
        """The segments of all slices, or of one batch entry, one head, or both."""
        grid = blocks.grid
        line, first, length, tile = row_segments(grid, blocks.starts, blocks.tiles)
        s, row = np.divmod(line, grid.rows)
        kept = np.ones(len(s), bool)
        for name, index, of, extent in (
            ("batch", batch, s // grid.heads, grid.batch),
            ("head", head, s % grid.heads, grid.heads),
        ):
            if index is not None:
                kept &= of == integer(name, index, min=0, max=extent - 1)
        b, h = np.divmod(s, grid.heads)
        if batch is not None:
            b, grid = np.zeros_like(b), replace(grid, batch=1)
        if head is not None:
            h, grid = np.zeros_like(h), replace(grid, heads=1)
        s = b * grid.heads + h
        return cls(grid, s, row, first, first + length, tile, blocks.bits).where(kept)

    @property
    def length(self) -> Ints:
        return self.stop - self.first

    @property
    def line(self) -> Ints:
        """(slice, block row) as one number."""
        return self.s * self.grid.rows + self.row

    @property
    def full(self) -> Bools:
        return self.tile == FULL

    @cached_property
    def facts(self) -> TileFacts:
        return tile_facts(self.bits, self.grid.block_k)

    def where(self, kept: Bools | Ints) -> "Segments":
        """Some of the segments."""
        return replace(
            self,
            s=self.s[kept],
            row=self.row[kept],
            first=self.first[kept],
            stop=self.stop[kept],
            tile=self.tile[kept],
        )


def tile_facts(bits: NDArray[np.uint32], block_k: int) -> TileFacts:
    """One look at every tile."""
    count, block_q = len(bits), bits.shape[1]
    facts = TileFacts(
        np.zeros(count, np.int64),
        np.zeros((count, block_q), bool),
        np.zeros((count, block_k), bool),
        np.zeros(count, np.int64),
        np.zeros(count, np.int64),
    )
    i = np.arange(block_q)
    for begin in range(0, count, TILES_AT_ONCE):
        part = slice(begin, begin + TILES_AT_ONCE)
        tiles = unpack_bits(bits[part], block_k)
        sees = tiles.any(axis=2)
        facts.pairs[part] = np.count_nonzero(tiles, axis=(1, 2))
        facts.sees[part], facts.seen[part] = sees, tiles.any(axis=1)
        lowest, highest = tiles.argmax(axis=2), block_k - 1 - tiles[:, :, ::-1].argmax(axis=2)
        facts.back[part] = np.where(sees, i - lowest, -FARTHEST).max(axis=1)
        facts.ahead[part] = np.where(sees, highest - i, -FARTHEST).max(axis=1)
    return facts


def union(group: Ints, first: Ints, stop: Ints, width: int) -> tuple[Ints, Ints, Ints]:
    """Intervals [first, stop) within [0, width) of each group, joined where they meet.

    Returns:
        (group, first, stop): disjoint, with gaps between them, ascending.
    """
    begin, end = group * (width + 1) + first, group * (width + 1) + stop
    order = np.argsort(begin, kind="stable")
    begin, end = begin[order], np.maximum.accumulate(end[order])
    heads = np.flatnonzero(np.append(True, begin[1:] > end[:-1])[: len(begin)])
    tails = np.append(heads[1:], len(begin))[: len(heads)] - 1
    group, first = np.divmod(begin[heads], width + 1)
    return group, first, end[tails] - group * (width + 1)


def ranges(marked: Bools) -> tuple[tuple[int, int], ...]:
    """(first, last) of every stretch of True."""
    edges = np.flatnonzero(np.diff(marked, prepend=False, append=False))
    return tuple((a, b - 1) for a, b in edges.reshape(-1, 2).tolist())
