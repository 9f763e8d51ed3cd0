"""Segments: the non-empty runs of a block mask cut at row ends, lists of their blocks, and exact
counts of what they hold.
"""

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from masks.checks import integer
from masks.runs import Bools, Grid, Ints, distinct, expand, quotient
from masks.tiles import EMPTY, FULL, unpack_bits
from masks.types import BlockMask

PAIRS_AT_ONCE = 1 << 17  # of (line, tile): bounds the memory
TILES_AT_ONCE = 512  # unpacked: bounds the memory
FARTHEST = 1 << 40  # stands for "none" where a distance is sought; beyond any number of tokens
MOST_INTERVALS = 1 << 25  # of keys that a query sees, over all queries; whole blocks have fewer


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
        grid: the geometry, with as many slices as `s` distinguishes.
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
        """Return the segments of all slices, or of one batch entry, one head, or both."""
        grid = blocks.grid
        line, first, length, tile = row_segments(grid, blocks.starts, blocks.tiles)
        s, row = quotient(line, grid.rows)
        b, h = quotient(s, grid.heads)
        kept = np.ones(len(s), bool)
        if batch is not None:
            kept &= b == integer("batch", batch, min=0, max=grid.batch - 1)
            b, grid = np.zeros_like(b), replace(grid, batch=1)
        if head is not None:
            kept &= h == integer("head", head, min=0, max=grid.heads - 1)
            h, grid = np.zeros_like(h), replace(grid, heads=1)
        s = b * grid.heads + h
        return cls(grid, s, row, first, first + length, tile, blocks.bits).where(kept)

    @property
    def length(self) -> Ints:
        return self.stop - self.first

    @property
    def col(self) -> Ints:
        """The column, where a segment is one block."""
        return self.first

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

    def blocks(self) -> "Segments":
        """Return the blocks one by one, each a segment of its own; O(non-empty blocks) memory."""
        of, col = expand(self.first, self.stop)
        return replace(self.where(of), first=col, stop=col + 1)

    def at(self, row: Ints, col: Ints) -> "Segments":
        """Return single blocks in new rows and columns."""
        return replace(self, row=row, first=col, stop=col + 1)

    def where(self, kept: Bools | Ints) -> "Segments":
        """Return some of the segments."""
        names = ("s", "row", "first", "stop", "tile")
        return replace(self, **{name: getattr(self, name)[kept] for name in names})


def row_segments(
    grid: Grid, starts: Ints, tiles: NDArray, *, empty: int = EMPTY
) -> tuple[Ints, Ints, Ints, NDArray]:
    """Non-empty runs, cut where a block row ends: (line, first column, length, tile), ascending."""
    lines = np.arange(grid.slices * grid.rows, dtype=np.int64) * grid.cols
    cuts = distinct(np.concatenate([starts, lines]))
    tile = tiles[np.searchsorted(starts, cuts, "right") - 1]
    length = np.diff(cuts, append=grid.size)
    kept = tile != empty
    line, first = quotient(cuts[kept], grid.cols)
    return line, first, length[kept], tile[kept]


class BlockLists(NamedTuple):
    """One list for every line: a (slice, query block) of CSR, a (slice, key block) of CSC.

    A list holds its partial blocks first, then its full ones, each kind ascending. The fields are
    arrays of NumPy, or tensors on a device. There are ptr[-1] blocks; from a selection, `idx` and
    `tile` may be longer, and the rest means nothing.
    """

    ptr: Any  # int64 (lines + 1,) line r has the entries ptr[r]..ptr[r + 1]
    mid: Any  # int64 (lines,) ptr[r]..mid[r] are partial, mid[r]..ptr[r + 1] full
    idx: Any  # int32 (nnz,) key block of CSR, query block of CSC
    tile: Any  # int32 (nnz,) number of the bit tile, -1 for full


def block_lists(segments: Segments, by_row: bool) -> BlockLists:
    """Return the non-empty blocks as CSR, or as CSC."""
    blocks, grid = segments.blocks(), segments.grid
    line, idx, n = blocks.line, blocks.col, grid.slices * grid.rows
    if not by_row:
        line, idx, n = blocks.s * grid.cols + blocks.col, blocks.row, grid.slices * grid.cols
    order = np.argsort(line * 2 + blocks.full, kind="stable")
    ptr = np.append(0, np.cumsum(np.bincount(line, minlength=n)))
    mid = ptr[:-1] + np.bincount(line[~blocks.full], minlength=n)
    return BlockLists(ptr, mid, idx[order].astype(np.int32), blocks.tile[order])


def tile_facts(bits: NDArray[np.uint32], block_k: int) -> TileFacts:
    """Return the facts of every tile."""
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


def merged(segments: Segments) -> Segments:
    """One slice with the blocks of all slices, each as if full, in the longest runs.

    A layer passes on what any of its heads sees.
    """
    row, first, stop = union(segments.row, segments.first, segments.stop, segments.grid.cols)
    grid = replace(segments.grid, batch=1, heads=1)
    return _full(grid, row, first, stop, segments.bits)


def by_token(segments: Segments) -> Segments:
    """Return the pairs of tokens that any slice allows, as blocks of one token.

    Raises:
        ValueError: more than `MOST_INTERVALS` intervals of keys.
    """
    grid = segments.grid
    whole, partial = merged(segments.where(segments.full)), segments.where(~segments.full)
    inside = [_stretches(tile, grid.block_k) for tile in segments.bits]
    counts = np.array([len(query) for query, _, _ in inside], np.int64)
    heights = grid.q_last[whole.row] - grid.q_first[whole.row] + 1
    total = int(heights.sum() + (counts[partial.tile] * partial.length).sum())
    if total > MOST_INTERVALS:
        raise ValueError(
            f"the exact reach would take {total} intervals of keys, and {MOST_INTERVALS} is the "
            "most: take a shorter length, or exact=False"
        )
    of, query = expand(grid.q_first[whole.row], grid.q_last[whole.row] + 1)
    rows, firsts = [query], [grid.k_first[whole.first][of]]
    stops = [grid.k_last[whole.stop - 1][of] + 1]
    of, col = expand(partial.first, partial.stop)
    order = np.argsort(partial.tile[of], kind="stable")
    row, col, tile = partial.row[of][order], col[order], partial.tile[of][order]
    bounds = np.searchsorted(tile, np.arange(len(inside) + 1))
    for (query, first, stop), begin, end in zip(inside, bounds[:-1], bounds[1:], strict=True):
        here = slice(begin, end)
        origin = grid.k_first[col[here], None]
        rows.append((grid.q_first[row[here], None] + query).ravel())
        firsts.append((origin + first).ravel())
        stops.append((origin + stop).ravel())
    row, first, stop = (np.concatenate(column) for column in (rows, firsts, stops))
    row, first, stop = union(row, first, stop, grid.n_k)
    return _full(Grid(grid.n_q, grid.n_k, 1, 1), row, first, stop, segments.bits[:0])


def _stretches(tile: NDArray[np.uint32], block_k: int) -> tuple[Ints, Ints, Ints]:
    """(query, first, stop) of the stretches of ones in every row of a tile."""
    ones = unpack_bits(tile, block_k).astype(np.int8)
    edges = np.diff(ones, axis=1, prepend=0, append=0)
    query, first = np.nonzero(edges == 1)
    return query, first, np.nonzero(edges == -1)[1]


def _full(grid: Grid, row: Ints, first: Ints, stop: Ints, bits: NDArray[np.uint32]) -> Segments:
    """Full segments of one slice."""
    tile = np.full(len(row), FULL, np.int32)
    return Segments(grid, np.zeros_like(row), row, first, stop, tile, bits)


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
    group, first = quotient(begin[heads], width + 1)
    return group, first, end[tails] - group * (width + 1)


def ranges(marked: Bools) -> tuple[tuple[int, int], ...]:
    """(first, last) of every stretch of True."""
    edges = np.flatnonzero(np.diff(marked, prepend=False, append=False))
    return tuple((a, b - 1) for a, b in edges.reshape(-1, 2).tolist())


class Load(NamedTuple):
    """Non-empty blocks of a query block (forward) or of a key block (backward)."""

    min: int
    mean: float
    max: int

    @property
    def imbalance(self) -> float:
        """max / mean; 0 where nothing is allowed."""
        return self.max / self.mean if self.mean else 0.0

    @classmethod
    def of(cls, counts: NDArray) -> "Load":
        return cls(int(counts.min()), float(counts.mean()), int(counts.max()))


def cover(lines: int, cols: int, line: Ints, first: Ints, stop: Ints) -> Ints:
    """(lines, cols): how many of the column intervals [first, stop) of a line hold a column."""
    size = lines * (cols + 1)
    change = np.bincount(line * (cols + 1) + first, minlength=size)
    change -= np.bincount(line * (cols + 1) + stop, minlength=size)
    return np.cumsum(change.reshape(lines, cols + 1), axis=1)[:, :-1]


def area(segments: Segments) -> int:
    """Pairs of existing tokens in the blocks."""
    grid = segments.grid
    height = grid.q_last - grid.q_first + 1
    keys = grid.k_last[segments.stop - 1] + 1 - grid.k_first[segments.first]
    return int((height[segments.row] * keys).sum())


def allowed_pairs(segments: Segments) -> int:
    """Return the allowed pairs of tokens."""
    partial = segments.where(~segments.full)
    cut = (partial.length * segments.facts.pairs[partial.tile]).sum()
    return area(segments.where(segments.full)) + int(cut)


def seeing(segments: Segments) -> Bools:
    """(slices, n_q): whether the query sees any key."""
    grid, partial = segments.grid, segments.where(~segments.full)
    whole = np.zeros(grid.slices * grid.rows, bool)
    whole[segments.line[segments.full]] = True
    sees = _tokens(whole, partial.line, partial.tile, segments.facts.sees)
    return sees.reshape(grid.slices, -1)[:, : grid.n_q]


def seen(segments: Segments) -> Bools:
    """(slices, n_k): whether any query sees the key."""
    grid, partial = segments.grid, segments.where(~segments.full)
    full = segments.where(segments.full)
    whole = cover(grid.slices, grid.cols, full.s, full.first, full.stop).ravel() > 0
    of, col = expand(partial.first, partial.stop)
    place = partial.s[of] * grid.cols + col
    found = _tokens(whole, place, partial.tile[of], segments.facts.seen)
    return found.reshape(grid.slices, -1)[:, : grid.n_k]


def _tokens(whole: Bools, line: Ints, tile: NDArray, facts: Bools) -> Bools:
    """(lines, block): True in whole lines, elsewhere the facts of any tile in the line."""
    out = np.repeat(whole[:, None], facts.shape[1], axis=1)
    count = max(1, len(facts))
    pairs = np.unique(line * count + tile)
    for begin in range(0, len(pairs), PAIRS_AT_ONCE):
        here, which = quotient(pairs[begin : begin + PAIRS_AT_ONCE], count)
        starts = np.flatnonzero(np.diff(here, prepend=-1))
        out[here[starts]] |= np.logical_or.reduceat(facts[which], starts)
    return out
