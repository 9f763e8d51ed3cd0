"""Layers as relations between blocks, and walks through them: which keys every query has seen.

A block may be a single token. What a query has seen is a row of bits, one for each key.
"""

from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from masks.runs import Bools, Grid, Ints, expand
from masks.segments import Segments, merged
from masks.tiles import unpack_bits

CHUNK_BYTES = 2 << 20  # of bits at a time, so that they stay in the cache
RANGES_AT_ONCE = 1 << 10  # of which the words stay in the cache
MOST_LAYERS = 256  # where no number is given

Words = NDArray[np.uint64]


class Relation:
    """One layer: which blocks every block of queries sees, in any head.

    Args:
        whole: where block_q and block_k differ, a key block has what all query blocks with its
            tokens have, and not what any of them has.
    """

    def __init__(self, segments: Segments, whole: bool = False):
        graph = merged(segments)
        self.grid, self.whole = graph.grid, whole
        self.ranges = Ranges(graph.row, graph.first, graph.stop, self.grid.rows)

    def gather(self, states: Words) -> Words:
        """Return what every query block takes in, from the states of the query blocks."""
        grid = self.grid
        if grid.block_q == grid.block_k:
            return self.ranges.union(states)
        first, last = grid.k_first // grid.block_q, grid.k_last // grid.block_q
        combine = np.bitwise_and if self.whole else np.bitwise_or
        keys = states[first]
        for step in range(1, int((last - first).max()) + 1):
            combine(keys, states[np.minimum(first + step, last)], out=keys)
        return self.ranges.union(keys)


class Seen(NamedTuple):
    """The end of a walk."""

    counts: list[int]  # wanted pairs seen after every layer
    settled: bool  # more layers would change nothing
    found: Words  # (rows, W) the wanted key blocks that each query block has seen
    by: Ints  # (cols,) query blocks that want the key block and have seen it


@dataclass(frozen=True)
class Walk:
    """A walk through layers.

    Attributes:
        wanted: (rows,), how many key blocks from the first one on each query block should see.
        relations: one a layer, repeated.
        own: whether a query block has its own tokens from the start.
        gained: for every relation, keys that a layer adds whatever the states.
        counted: for every relation, keys that count as seen from its layer on, but are not part of
            the states.
    """

    grid: Grid
    wanted: Ints
    relations: list[Relation]
    own: bool = True
    gained: tuple["Ranges", ...] = ()
    counted: tuple["Ranges", ...] = ()

    def run(self, layers: int | None) -> Seen:
        """Walk `layers` layers, or until nothing changes, in chunks of keys."""
        cols = self.grid.cols
        width = max(64, CHUNK_BYTES // (8 * len(self.wanted)) * 64)
        chunks = [(begin, min(begin + width, cols)) for begin in range(0, cols, width)]
        histories, still, found = zip(
            *(self._chunk(begin, end, layers) for begin, end in chunks), strict=True
        )
        length = max(map(len, histories))
        counts = [sum(h[min(i, len(h) - 1)] for h in histories) for i in range(length)]
        by = np.concatenate([_columns(words) for words in found])[:cols]
        return Seen(counts, all(still), np.concatenate(found, axis=1), by)

    def _chunk(self, begin: int, end: int, layers: int | None) -> tuple[list[int], bool, Words]:
        """(pairs seen after every layer, whether they are final, bits seen) of some keys."""
        grid = self.grid
        target = prefixes(np.minimum(self.wanted, end), begin, end)
        total = int(count_ones(target).sum())
        states = np.zeros_like(target)
        if self.own:
            first, last = grid.q_first // grid.block_k, grid.q_last // grid.block_k
            states = ranges_of_ones(first, last + 1, begin, end)
        keys = np.arange(grid.cols)
        each = ranges_of_ones(keys, keys + 1, begin, end)
        gained, counted = ([one.union(each) for one in x] for x in (self.gained, self.counted))
        history: list[int] = []
        uniform, found, also = len(self.relations) == 1, states, np.zeros_like(states)
        for layer in range(MOST_LAYERS if layers is None else layers):
            which = layer % len(self.relations)
            new = self.relations[which].gather(states)
            new |= states
            if gained:
                new |= gained[which]
            if uniform and layer > 0 and np.array_equal(new, states):
                return history, True, found
            states = new
            if counted:
                also |= counted[which]
            found = (states | also) & target
            history.append(int(count_ones(found).sum()))
            if history[-1] == total:
                return history, True, found
        return history, False, found


def _columns(words: Words) -> Ints:
    """(64 W,): ones in every column."""
    return np.add.reduce(unpack(words).view(np.uint8), axis=0, dtype=np.uint32).astype(np.int64)


def possibly(stack: list[Segments], causal: bool) -> Walk:
    """From above: any allowed pair of a block stands for all of its pairs. Exact for tokens."""
    grid = stack[0].grid
    return Walk(grid, _wanted(grid, causal), [Relation(segments) for segments in stack])


def surely(stack: list[Segments], causal: bool) -> Walk:
    """From below: the blocks (I, J) where every query of I has seen every key of J.

    One layer does that for a full block. It also does it for (I, J) if each query of I sees some
    key of a block K, and every query of K had seen all of J. With `causal`, a block on the diagonal
    counts if one layer allows all of its causal pairs.
    """
    grid = stack[0].grid
    relations = [Relation(_covering_blocks(segments), whole=True) for segments in stack]
    gained = tuple(Relation(segments.where(segments.full)).ranges for segments in stack)
    crossing = tuple(Relation(_complete_crossings(segments)).ranges for segments in stack)
    counted = crossing if causal else ()
    return Walk(grid, _wanted(grid, causal), relations, False, gained, counted)


def _wanted(grid: Grid, causal: bool) -> Ints:
    return grid.q_last // grid.block_k + 1 if causal else np.full(grid.rows, grid.cols)


def _covering_blocks(segments: Segments) -> Segments:
    """Return the blocks of which every existing query sees some key."""
    grid = segments.grid
    kept = segments.full.copy()
    cut = np.flatnonzero(~segments.full)
    exists = np.arange(grid.block_q) < (grid.q_last - grid.q_first + 1)[segments.row[cut], None]
    kept[cut] = (segments.facts.sees[segments.tile[cut]] | ~exists).all(axis=1)
    return segments.where(kept)


def _complete_crossings(segments: Segments) -> Segments:
    """Return the blocks on the diagonal that allow all causal pairs, one column a segment."""
    grid = segments.grid
    low = np.maximum(segments.first, grid.q_first[segments.row] // grid.block_k)
    high = np.minimum(segments.stop, grid.q_last[segments.row] // grid.block_k + 1)
    of, col = expand(low, high)
    near = replace(segments.where(of), first=col, stop=col + 1)
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


# ---- rows of bits as 64-bit words ----


class Ranges:
    """out[row] = the union of the rows first..stop - 1, for many (row, first, stop).

    The cost goes with the number of ranges, not with their lengths: the union of 2**k to
    2**(k + 1) - 1 rows is that of two ranges of 2**k rows, which may overlap.
    """

    def __init__(self, row: Ints, first: Ints, stop: Ints, rows: int):
        self.rows = rows
        self.levels: list[list[tuple[Ints, Ints, Ints, Ints]]] = []  # by k, in portions
        exponent = np.frexp(stop - first)[1] - 1
        order = np.lexsort((row, exponent))
        row, first, second = row[order], first[order], (stop - (1 << exponent))[order]
        ends = np.cumsum(np.bincount(exponent)).tolist()
        for begin, end in zip([0, *ends], ends, strict=False):
            self.levels.append([])
            for at in range(begin, end, RANGES_AT_ONCE):
                part = slice(at, min(at + RANGES_AT_ONCE, end))
                heads = np.flatnonzero(np.diff(row[part], prepend=-1))
                self.levels[-1].append((row[part][heads], heads, first[part], second[part]))

    def union(self, words: Words) -> Words:
        """(rows, W) from the rows of `words` (N, W)."""
        out = np.zeros((self.rows, words.shape[1]), np.uint64)
        for k, level in enumerate(self.levels):
            if k:  # words[i] now is the union of 2**k rows from i on
                half = 1 << (k - 1)
                words = words[:-half] | words[half:]
            for row, heads, first, second in level:
                found = words.take(first, axis=0)
                if k:
                    found |= words.take(second, axis=0)
                out[row] |= np.bitwise_or.reduceat(found, heads, axis=0)
        return out


def prefixes(lengths: Ints, begin: int, stop: int) -> Words:
    """(N, W): bits begin..stop - 1 (multiples of 64) of rows whose first `lengths` bits are 1."""
    bits = np.clip(lengths[:, None] - np.arange(begin, stop, 64), 0, 64).astype(np.uint64)
    ones = np.uint64(0xFFFFFFFFFFFFFFFF)
    return np.where(bits == 0, np.uint64(0), ones >> (np.uint64(64) - np.maximum(bits, 1)))


def ranges_of_ones(first: Ints, stop: Ints, begin: int, end: int) -> Words:
    """(N, W): bits begin..end - 1 of rows with ones from first to stop - 1."""
    return prefixes(stop, begin, end) & ~prefixes(first, begin, end)


def count_ones(words: Words) -> Ints:
    """(N,): ones in every row."""
    if hasattr(np, "bitwise_count"):
        return np.bitwise_count(words).sum(axis=1, dtype=np.int64)
    return unpack(words).sum(axis=1)  # NumPy 1


def unpack(words: Words) -> Bools:
    """(N, 64 W), least bit first."""
    bits = np.unpackbits(words.astype("<u8", copy=False).view(np.uint8), axis=1, bitorder="little")
    return bits.view(np.bool_)
