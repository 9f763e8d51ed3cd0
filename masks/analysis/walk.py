"""Walks through layers: which keys every query has seen, as rows of bits, key by key in chunks."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from masks.analysis.bitsets import Words, count_ones, prefixes, ranges_of_ones, unpack
from masks.analysis.relations import (
    BlockRelation,
    Overlap,
    Relation,
    TokenRelation,
    complete_crossings,
    covering_blocks,
)
from masks.analysis.segments import Segments, ranges
from masks.runs import Grid, Ints, expand

CHUNK_BYTES = 2 << 20  # of bits that are looked at together: they stay in the cache
MOST_LAYERS = 256  # where nobody says how many


class Seen(NamedTuple):
    """The end of a walk."""

    counts: list[int]  # wanted pairs seen after every layer
    settled: bool  # more layers would change nothing
    keys: Ints  # (queries,) wanted keys that each has seen
    by: Ints  # (keys,) queries that want it and have seen it


@dataclass(frozen=True)
class Walk:
    """Layers of relations over the units of one side, blocks or tokens.

    Attributes:
        wanted: (queries,), how many keys from the first one on each query should see.
        n_keys: key units.
        relations: one a layer, taken in turn.
        own: (first, stop) of the keys that every query has from the start; None for nothing.
        gained: (begin, end) -> for every relation, bits that a layer adds whatever the states.
        counted: (begin, end) -> bits that count as seen, but are no part of the states.
        by_token: whether units are tokens.
    """

    grid: Grid
    wanted: Ints
    n_keys: int
    relations: list[Relation]
    own: tuple[Ints, Ints] | None
    gained: Callable[[int, int], list[Words]] | None = None
    counted: Callable[[int, int], Words] | None = None
    by_token: bool = False

    def run(self, layers: int | None) -> Seen:
        """Walk `layers` layers, or until nothing changes, in chunks of keys."""
        width = max(64, CHUNK_BYTES // (8 * len(self.wanted)) * 64)
        histories, settled, by = [], True, []
        keys, wanted_by = np.zeros(len(self.wanted), np.int64), self.wanted_by()
        for begin in range(0, self.n_keys, width):
            end = min(begin + width, self.n_keys)
            history, still, found = self._chunk(begin, end, layers)
            histories.append(history)
            settled &= still
            keys += count_ones(found)
            complete = history[-1] == int(wanted_by[begin:end].sum())
            by.append(wanted_by[begin:end] if complete else _columns(found)[: end - begin])
        length = max(map(len, histories))
        counts = [sum(h[min(i, len(h) - 1)] for h in histories) for i in range(length)]
        return Seen(counts, settled, keys, np.concatenate(by))

    def _chunk(self, begin: int, end: int, layers: int | None) -> tuple[list[int], bool, Words]:
        target = prefixes(np.minimum(self.wanted, end), begin, end)
        total = int(count_ones(target).sum())
        states = np.zeros_like(target)
        if self.own:
            states = ranges_of_ones(*self.own, begin, end)
        gained = self.gained(begin, end) if self.gained else None
        counted = self.counted(begin, end) if self.counted else None
        history: list[int] = []
        uniform, found = len(self.relations) == 1, states
        for layer in range(MOST_LAYERS if layers is None else layers):
            which = layer % len(self.relations)
            new = self.relations[which].gather(states)
            new |= states
            if gained:
                new |= gained[which]
            still = uniform and layer > 0 and np.array_equal(new, states)
            if still:
                return history, True, found
            states = new
            found = states & target if counted is None else (states | counted) & target
            history.append(int(count_ones(found).sum()))
            if history[-1] == total:
                return history, True, found
        return history, False, found

    def wanted_by(self) -> Ints:
        """(keys,): how many queries want each key."""
        lengths = np.bincount(self.wanted, minlength=self.n_keys + 1)
        return np.cumsum(lengths[::-1])[::-1][1:]

    def tokens_of(self, query: int) -> tuple[int, int]:
        """First and last token of a query unit."""
        if self.by_token:
            return query, query
        return int(self.grid.q_first[query]), int(self.grid.q_last[query])

    def missing(self, query: int, layers: int) -> tuple[tuple[int, int], ...]:
        """Ranges of key tokens that a query unit wants and has not seen after so many layers."""
        queries = np.zeros(len(self.wanted), bool)
        queries[query] = True
        for layer in reversed(range(layers)):
            queries |= self.relations[layer % len(self.relations)].seen_from(queries)
        if self.by_token:
            return ranges(~queries[: self.wanted[query]])
        first, stop = (a[queries] for a in Overlap(self.grid).cols_of)
        seen = np.zeros(self.n_keys, bool)
        seen[expand(first, stop)[1]] = True
        tokens = np.repeat(~seen[: self.wanted[query]], self.grid.block_k)
        return ranges(tokens[: self.grid.n_k])


def _columns(words: Words) -> Ints:
    """(64 W,): ones in every column."""
    return np.add.reduce(unpack(words).view(np.uint8), axis=0, dtype=np.uint32).astype(np.int64)


def by_tokens(stack: list[Segments], causal: bool) -> Walk:
    """Exactly."""
    grid, n = stack[0].grid, stack[0].grid.n_k
    one = np.arange(n)
    wanted = one + 1 if causal else np.full(n, n)
    relations: list[Relation] = [TokenRelation(segments) for segments in stack]
    return Walk(grid, wanted, n, relations, (one, one + 1), by_token=True)


def by_blocks(stack: list[Segments], causal: bool) -> Walk:
    """From above: any allowed pair of a block stands for all of its pairs."""
    grid = stack[0].grid
    relations: list[Relation] = [BlockRelation(segments, whole=False) for segments in stack]
    own = Overlap(grid).cols_of
    return Walk(grid, _wanted_blocks(grid, causal), grid.cols, relations, own)


def surely(stack: list[Segments], causal: bool) -> Walk:
    """From below: the blocks (I, J) where every query of I has seen every key of J.

    A layer does that for a full block; and for (I, J) when each query of I sees some key of a
    block K, and every query of K had seen all of J. With `causal`, a block on the diagonal counts
    when all of its causal pairs are allowed at once.
    """
    grid = stack[0].grid
    relations: list[Relation] = [BlockRelation(covering_blocks(s), whole=True) for s in stack]
    full = [BlockRelation(s.where(s.full), whole=False).ranges for s in stack]
    keys = np.arange(grid.cols)

    def gained(begin: int, end: int) -> list[Words]:
        own = ranges_of_ones(keys, keys + 1, begin, end)
        return [one.union(own) for one in full]

    crossing = [BlockRelation(complete_crossings(s), whole=False).ranges for s in stack]

    def counted(begin: int, end: int) -> Words:
        own = ranges_of_ones(keys, keys + 1, begin, end)
        return np.bitwise_or.reduce([one.union(own) for one in crossing])

    wanted = _wanted_blocks(grid, causal)
    more = counted if causal else None
    return Walk(grid, wanted, grid.cols, relations, None, gained, more)


def _wanted_blocks(grid: Grid, causal: bool) -> Ints:
    return grid.q_last // grid.block_k + 1 if causal else np.full(grid.rows, grid.cols)
