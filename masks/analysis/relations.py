"""One layer as a relation between queries and keys: which rows of bits a query gathers."""

from dataclasses import replace
from typing import Protocol

import numpy as np

from masks.analysis.bitsets import Ranges, Words
from masks.analysis.graph import fold
from masks.analysis.loads import cover
from masks.analysis.segments import Segments, union
from masks.runs import Bools, Grid, Ints, expand
from masks.tiles import unpack_bits

MOST_INTERVALS = 1 << 24  # of keys that a query sees, over all queries


class Relation(Protocol):
    """A set of (query unit, key unit) pairs; a unit is a block or a token."""

    def gather(self, states: Words) -> Words:
        """What every query unit takes in, from the states of the query units (rows of bits)."""
        ...

    def seen_from(self, queries: Bools) -> Bools:
        """The query units whose tokens these query units see."""
        ...


class Overlap:
    """Query blocks and key blocks that share tokens."""

    def __init__(self, grid: Grid):
        self.rows_of = grid.k_first // grid.block_q, grid.k_last // grid.block_q  # of a key block
        self.cols_of = grid.q_first // grid.block_k, grid.q_last // grid.block_k + 1
        self.same = grid.block_q == grid.block_k

    def to_keys(self, states: Words, whole: bool) -> Words:
        """States of key blocks: of what any query block there has, or (`whole`) all of them."""
        if self.same:
            return states
        first, last = self.rows_of
        combine = np.bitwise_and if whole else np.bitwise_or
        result = states[first]
        for step in range(1, int((last - first).max()) + 1):
            combine(result, states[np.minimum(first + step, last)], out=result)
        return result


class BlockRelation:
    """Blocks (I, J) of a set, in any head."""

    def __init__(self, segments: Segments, whole: bool):
        graph = fold(segments)
        self.grid, self.graph, self.whole = graph.grid, graph, whole
        self.overlap = Overlap(self.grid)
        self.ranges = Ranges(graph.row, graph.first, graph.stop, self.grid.rows)

    def gather(self, states: Words) -> Words:
        return self.ranges.union(self.overlap.to_keys(states, self.whole))

    def seen_from(self, queries: Bools) -> Bools:
        mine = self.graph.where(queries[self.graph.row])
        keys = np.flatnonzero(cover(self.grid, mine.s, mine.first, mine.stop)[0])
        first, last = self.overlap.rows_of
        result = np.zeros(self.grid.rows, bool)
        result[expand(first[keys], last[keys] + 1)[1]] = True
        return result


class TokenRelation:
    """Allowed pairs of tokens, in any head: full blocks block by block, the others in intervals."""

    def __init__(self, segments: Segments):
        whole = fold(segments.where(segments.full))
        grid = self.grid = whole.grid
        self.whole = whole
        self.blocks = Ranges(whole.row, whole.first, whole.stop, grid.rows)
        self.query, self.first, self.stop = _intervals(segments.where(~segments.full))
        self.tokens = Ranges(self.query, self.first, self.stop, grid.n_q)

    def gather(self, states: Words) -> Words:
        grid = self.grid
        out = self.tokens.union(states)
        if len(self.whole.row):
            padded = np.zeros((grid.cols * grid.block_k, states.shape[1]), np.uint64)
            padded[: grid.n_k] = states
            of_blocks = np.bitwise_or.reduce(
                padded.reshape(grid.cols, grid.block_k, states.shape[1]), axis=1
            )
            out |= np.repeat(self.blocks.union(of_blocks), grid.block_q, axis=0)[: grid.n_q]
        return out

    def seen_from(self, queries: Bools) -> Bools:
        grid = self.grid
        rows = np.add.reduceat(queries, grid.q_first) > 0
        mine = self.whole.where(rows[self.whole.row])
        keys = cover(grid, mine.s, mine.first, mine.stop)[0] > 0
        kept = queries[self.query]
        change = np.bincount(self.first[kept], minlength=grid.n_k + 1)
        change -= np.bincount(self.stop[kept], minlength=grid.n_k + 1)
        return np.repeat(keys, grid.block_k)[: grid.n_k] | (np.cumsum(change)[:-1] > 0)


def _intervals(partial: Segments) -> tuple[Ints, Ints, Ints]:
    """(query, first, stop): the intervals of keys that partial blocks allow, in any head."""
    grid = partial.grid
    of, col = expand(partial.first, partial.stop)
    tile, row = partial.tile[of], partial.row[of]
    tiles, which = np.unique(tile, return_inverse=True)
    inside = [_tile_intervals(unpack_bits(partial.bits[t : t + 1], grid.block_k)[0]) for t in tiles]
    counts = np.array([len(query) for query, _, _ in inside], np.int64)
    total = int(counts[which].sum())
    if total > MOST_INTERVALS:
        raise ValueError(
            f"the exact reach would take {total} intervals of keys, and {MOST_INTERVALS} is the "
            "most: take a shorter length, or exact=False"
        )
    before = np.cumsum(counts) - counts
    of, place = expand(before[which], (before + counts)[which])
    query, first, stop = (
        np.concatenate([*column, np.zeros(0, np.int64)]) for column in zip(*inside, strict=True)
    ) if inside else (np.zeros(0, np.int64),) * 3  # fmt: skip
    origin = grid.k_first[col[of]]
    return union(
        grid.q_first[row[of]] + query[place], origin + first[place], origin + stop[place], grid.n_k
    )


def _tile_intervals(tile: Bools) -> tuple[Ints, Ints, Ints]:
    """(query, first, stop) of the stretches of ones in every row."""
    edges = np.diff(tile.astype(np.int8), axis=1, prepend=0, append=0)
    query, first = np.nonzero(edges == 1)
    return query, first, np.nonzero(edges == -1)[1]


def covering_blocks(segments: Segments) -> Segments:
    """The blocks of which every existing query sees some key."""
    grid = segments.grid
    kept = segments.full.copy()
    cut = np.flatnonzero(~segments.full)
    exists = np.arange(grid.block_q) < (grid.q_last - grid.q_first + 1)[segments.row[cut], None]
    kept[cut] = (segments.facts.sees[segments.tile[cut]] | ~exists).all(axis=1)
    return segments.where(kept)


def complete_crossings(segments: Segments) -> Segments:
    """The blocks on the diagonal that allow all of their causal pairs, one column a segment."""
    grid = segments.grid
    crosses = grid.k_last[segments.stop - 1] > grid.q_first[segments.row]
    near = segments.where(crosses & (grid.k_first[segments.first] <= grid.q_last[segments.row]))
    low = np.maximum(near.first, grid.q_first[near.row] // grid.block_k)
    high = np.minimum(near.stop, grid.q_last[near.row] // grid.block_k + 1)
    of, col = expand(low, np.maximum(low, high))
    near = near.where(of)
    near = replace(near, first=col, stop=col + 1)
    kept = near.full.copy()
    i, j = np.arange(grid.block_q)[:, None], np.arange(grid.block_k)
    first, last = grid.q_first[near.row], grid.q_last[near.row]
    kinds = np.stack([near.tile, first - grid.k_first[col], last - first], axis=1)[~kept]
    kinds, which = np.unique(kinds, axis=0, return_inverse=True)
    complete = np.zeros(len(kinds), bool)
    for n, (tile, offset, most) in enumerate(kinds.tolist()):
        allowed = unpack_bits(near.bits[tile : tile + 1], grid.block_k)[0]
        complete[n] = (allowed | (j > i + offset) | (i > most)).all()
    kept[~kept] = complete[which.ravel()]
    return near.where(kept)
