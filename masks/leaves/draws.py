"""Draws without global state, and bases of the patterns that are graphs of token blocks.

A draw is a hash of (seed, layer, head, row), the same on every platform. A distributed run draws
the same in every process, and asking for one row draws no other.
"""

from collections.abc import Iterable
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from masks.algebra import Mask
from masks.checks import flag, integer
from masks.leaves.token_blocks import TokenBlocks
from masks.runs import Bools, Ints, distinct, quotient, ranges

Words = NDArray[np.uint64]

DRAWS_AT_ONCE = 1 << 20  # bounds the memory of `choose`
GOLDEN, HALF = np.uint64(0x9E3779B97F4A7C15), np.uint64(32)


class Stream(NamedTuple):
    """What a draw depends on, apart from the row."""

    seed: int
    per_head: bool
    per_layer: bool
    layer: int | None

    @classmethod
    def of(cls, seed: Any, per_head: Any, per_layer: Any, layer: Any) -> "Stream":
        """Return the checked arguments of a pattern."""
        seed = integer("seed", seed, min=0, max=(1 << 64) - 1)
        if layer is not None:
            layer = integer("layer", layer, min=0)
            if not per_layer:
                raise ValueError(f"layer is {layer}: a layer needs per_layer=True")
        return cls(seed, flag("per_head", per_head), flag("per_layer", per_layer), layer)

    def word(self, head: int) -> Words:
        """(1,) the hash that all draws of a head begin with."""
        word = mix(np.array([self.seed], np.uint64))
        if self.layer is not None:
            word = mix(word ^ np.uint64(self.layer))
        return mix(word ^ np.uint64(head))

    def keys(self, head: int, rows: Ints) -> Words:
        """(R,) a hash for every row."""
        return mix(self.word(head) ^ rows.astype(np.uint64))


class Drawn(TokenBlocks):
    """Base of the patterns of token blocks that draw."""

    source: Stream  # not `draw`, which is the method of all masks

    @property
    def per_head(self) -> bool:  # type: ignore[override]
        return self.source.per_head

    @property
    def period(self) -> int:  # type: ignore[override]
        return 0 if self.per_head else 1

    @property
    def per_layer(self) -> bool:  # type: ignore[override]
        return self.source.per_layer and self.source.layer is None

    def _layer(self, index: int) -> Mask:
        return self.again(layer=index)


def choose(keys: Words, count: Ints, n: Ints) -> tuple[Ints, Ints]:
    """count[i] distinct values of 0..n[i]-1 for every row, all sets equally likely.

    Args:
        keys: (R,) hashes of the rows.
        count, n: (R,) with 0 <= count <= n < 2**32.

    Returns:
        (i, value), ascending: row i has drawn the value.
    """
    drawn = np.minimum(count, n - count)  # beyond one half it is the complement that is drawn
    group = 2 * drawn + (drawn < count)
    values = np.empty(count.sum(), np.int64)
    begin = np.cumsum(count) - count
    for kind in np.unique(group).tolist():
        members = np.flatnonzero(group == kind)
        step = max(1, DRAWS_AT_ONCE // (int(n[members].max()) if kind % 2 else kind + 8))
        for at in range(0, len(members), step):
            rows = members[at : at + step]
            chosen = _draw(keys[rows], kind // 2, n[rows])
            if kind % 2:
                kept = np.arange(n[rows].max()) < n[rows, None]
                np.put_along_axis(kept, chosen, False, axis=1)
                chosen = np.nonzero(kept)[1]
            values[ranges(begin[rows], count[rows])] = chosen.ravel()
    return np.repeat(np.arange(len(keys)), count), values


def permutation(key: Words, n: int) -> Ints:
    """(n,) 0..n-1 in the order of their hashes with `key`, of shape (1,)."""
    return np.argsort(mix(key ^ np.arange(n, dtype=np.uint64)), kind="stable")


def _draw(keys: Words, count: int, n: Ints) -> Ints:
    """(R, count) ascending: the first `count` distinct values in the stream of each key.

    The values of row i lie in 0..n[i]-1. By symmetry every set is equally likely. `count` is at
    most n / 2.
    """
    result = np.empty((len(keys), count), np.int64)
    if not count:
        return result
    # So many draws hold `count` different values on average, and somewhat more in most rows.
    mean = float(np.max(-n * np.log1p(-count / n)))
    todo, length = np.arange(len(keys)), int(mean + 4 * mean**0.5) + 4
    while len(todo):
        chosen, value = _first(keys[todo, None], count, n[todo, None], length)
        done = chosen.any(axis=1)
        result[todo[done]] = value[chosen].reshape(-1, count)
        todo, length = todo[~done], 2 * length
    return result


def _first(keys: Words, count: int, n: Ints, length: int) -> tuple[Bools, NDArray]:
    """(chosen, value) of `length` draws of each row, sorted: the first `count` distinct ones are
    chosen, and none where there are fewer.
    """
    place = np.arange(length, dtype=np.uint64)
    drawn = mix(keys + place * GOLDEN)
    drawn >>= HALF
    drawn *= n.astype(np.uint64)
    drawn >>= HALF
    # Sorted by value, then by place in the stream: the first of equal values came first.
    bits = length.bit_length()
    drawn <<= np.uint64(bits)
    drawn |= place
    if int(n.max()) << bits <= 1 << 32:
        drawn = drawn.astype(np.uint32)
    drawn.sort(axis=1)
    word = drawn.dtype.type
    place = drawn & word((1 << bits) - 1)
    drawn >>= word(bits)
    again = np.zeros(drawn.shape, bool)
    np.equal(drawn[:, 1:], drawn[:, :-1], out=again[:, 1:])
    at = np.flatnonzero(again)
    row, spot = at // length, place.ravel()[at].astype(np.int64)
    needed, last = np.full(len(keys), count), None  # places of the stream
    while last is None or (needed != last).any():
        last = needed
        needed = count + np.bincount(row[spot < last[row]], minlength=len(keys))
    chosen = place < np.where(needed <= length, needed, 0)[:, None].astype(word)
    chosen.ravel()[at] = False
    return chosen, drawn


def mix(x: Words) -> Words:
    """Return the output function of SplitMix64 (Steele, Lea and Flood, 2014), after one step."""
    x = x + GOLDEN
    x ^= x >> np.uint64(30)
    x *= np.uint64(0xBF58476D1CE4E5B9)
    x ^= x >> np.uint64(27)
    x *= np.uint64(0x94D049BB133111EB)
    x ^= x >> np.uint64(31)
    return x


class Adjacency(NamedTuple):
    """Neighbours of the nodes of a graph: those of node i are idx[ptr[i]:ptr[i + 1]], ascending."""

    ptr: Ints  # (n + 1,)
    idx: Ints  # (E,)

    @classmethod
    def of(cls, n: int, a: Ints, b: Ints) -> "Adjacency":
        """Return the undirected graph of n nodes with the edges (a, b) and all loops."""
        loops = np.arange(n)
        key = distinct(np.concatenate([a * n + b, b * n + a, loops * n + loops]))
        return cls(np.searchsorted(key, np.arange(n + 1) * n), key % n)

    def rows(self, nodes: Ints) -> tuple[Ints, Ints]:
        """(i, neighbour) of nodes[i], ascending."""
        count = self.ptr[nodes + 1] - self.ptr[nodes]
        i = np.repeat(np.arange(len(nodes)), count)
        return i, self.idx[ranges(self.ptr[nodes], count)]


class Graph(Drawn):
    """An undirected graph whose nodes are the key token blocks, with a loop at every node.

    Query token block I is node I. Beyond the keys, where n_q > n_k, it begins at node 0 again.
    """

    def edges(self, head: int, n: int) -> tuple[Ints, Ints]:
        """Both ends of every edge of the graph with n nodes, once or in both directions."""
        raise NotImplementedError

    def pairs(self, head: int, rows: Ints, n_cols: int) -> tuple[Ints, Ints]:
        return _adjacency(self, head, n_cols).rows(rows % n_cols)


@lru_cache(maxsize=32)
def _adjacency(graph: Graph, head: int, n: int) -> Adjacency:
    return Adjacency.of(n, *graph.edges(head, n))


def union(spans: Iterable[tuple[Ints, Ints, Ints]], n_cols: int) -> tuple[Ints, Ints]:
    """(i, col) ascending, all different: the columns that spans (i, first, stop) give to rows i.

    Spans may overlap and reach beyond the columns; stop <= first is none.
    """
    keys = []
    for i, first, stop in spans:
        first, stop = np.maximum(first, 0), np.minimum(stop, n_cols)
        i, first, stop = np.broadcast_arrays(i, first, stop)
        keys.append(ranges(i * n_cols + first, np.maximum(stop - first, 0)))
    i, col = quotient(distinct(np.concatenate(keys)), n_cols)
    return i, col
