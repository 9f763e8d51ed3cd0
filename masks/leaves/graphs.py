"""Bases of the patterns that are graphs of token blocks, and the lists that they work with."""

from collections.abc import Iterable
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from masks.leaves.draws import Drawn
from masks.runs import Ints, distinct, quotient, ranges


class Adjacency(NamedTuple):
    """Neighbours of the nodes of a graph: those of node i are idx[ptr[i]:ptr[i + 1]], ascending."""

    ptr: Ints  # (n + 1,)
    idx: Ints  # (E,)

    @classmethod
    def of(cls, n: int, a: Ints, b: Ints) -> "Adjacency":
        """Return the undirected graph of n nodes with the edges (a, b), and a loop at every
        node.
        """
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
