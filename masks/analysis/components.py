"""Connected components of a mask as a graph, of blocks and of tokens."""

from typing import NamedTuple

import numpy as np

from masks.analysis.loads import cover
from masks.analysis.segments import Segments
from masks.runs import Bools, Ints, expand
from masks.tiles import unpack_bits

MOST_EDGES = 1 << 24  # of the token graph
MOST_TILES = 1 << 12

Edges = tuple[Ints, Ints]


def block_components(segments: Segments) -> Ints:
    """(rows,): a label for every query block, equal where blocks hang together.

    An edge is a block with any allowed pair, in any slice. In self-attention a query block and a
    key block that share tokens are one.
    """
    grid = segments.grid
    edges = _interval_edges(segments, np.arange(grid.rows), grid.rows + np.arange(grid.cols))
    if grid.n_q == grid.n_k:
        row, col = expand(grid.q_first // grid.block_k, grid.q_last // grid.block_k + 1)
        edges.append((row, grid.rows + col))
    return connected(grid.rows + grid.cols, edges)


def token_components(segments: Segments) -> Ints | None:
    """(n,): a label for every token, equal where tokens hang together; None where it costs much.

    With n_q != n_k, queries and keys are different tokens: (n_q + n_k,).
    """
    grid = segments.grid
    keys_from = 0 if grid.n_q == grid.n_k else grid.n_q
    partial = segments.where(~segments.full)
    tiles, count = np.unique(partial.tile, return_inverse=True)
    count = np.bincount(count, partial.length, len(tiles))  # occurrences of every tile
    if len(tiles) > MOST_TILES:
        return None
    ties = [_ties(unpack_bits(segments.bits[t : t + 1], grid.block_k)[0]) for t in tiles]
    if sum(n * len(tie.root) for n, tie in zip(count, ties, strict=True)) > MOST_EDGES:
        return None

    # Stretches of tokens that hang together, and edges between them; first of the full blocks.
    whole = segments.where(segments.full)
    q_first, k_first = grid.q_first[whole.row], keys_from + grid.k_first[whole.first]
    first, last = (
        [q_first, k_first],
        [grid.q_last[whole.row], keys_from + grid.k_last[whole.stop - 1]],
    )
    edges = [(q_first, k_first)]
    of, col = expand(partial.first, partial.stop)
    places = np.unique((partial.tile[of] * grid.rows + partial.row[of]) * grid.cols + col)
    line, col = np.divmod(places, grid.cols)
    tile, row = np.divmod(line, grid.rows)
    bounds = np.searchsorted(tile, np.append(tiles, len(segments.bits)))
    for tie, begin, end in zip(ties, bounds[:-1], bounds[1:], strict=True):
        query = row[begin:end, None] * grid.block_q
        key = keys_from + col[begin:end, None] * grid.block_k - grid.block_q
        a, b, root = (np.where(i < grid.block_q, query + i, key + i).ravel() for i in tie)
        first.append(a)
        last.append(b)
        edges.append((a, root))
    n = keys_from + grid.n_k
    tied = np.bincount(np.concatenate(first), minlength=n)
    tied -= np.bincount(np.concatenate(last), minlength=n)
    token = np.flatnonzero(np.cumsum(tied))  # this one and the next
    return connected(n, [*edges, (token, token + 1)])


class Ties(NamedTuple):
    """Stretches first..last of a tile's queries 0.. and keys block_q.., and their ties."""

    first: Ints
    last: Ints
    root: Ints


def _ties(tile: Bools) -> Ties:
    """Which tokens hang together through one tile."""
    i, j = np.nonzero(tile)
    block_q = len(tile)
    label = connected(sum(tile.shape), [(i, block_q + j)])
    touched = np.concatenate([tile.any(axis=1), tile.any(axis=0)])
    begins = touched & np.append(True, (label[1:] != label[:-1]) | ~touched[:-1])
    begins[block_q] = touched[block_q]
    first = np.flatnonzero(begins)
    ends = touched & np.append(begins[1:] | ~touched[1:], True)
    return Ties(first, np.flatnonzero(ends), label[first])


def _interval_edges(segments: Segments, row_node: Ints, col_node: Ints) -> list[Edges]:
    """Edges that tie every segment together: its row to its first column, and column to column."""
    steps = cover(segments.grid, segments.s, segments.first, segments.stop - 1).any(axis=0)
    col = np.flatnonzero(steps)
    return [
        (row_node[segments.row], col_node[segments.first]),
        (col_node[col], col_node[np.minimum(col + 1, len(col_node) - 1)]),
    ]


def connected(count: int, edges: list[Edges]) -> Ints:
    """(count,): the smallest node of the component of every node."""
    u, v = (np.concatenate(side) for side in zip(*edges, strict=True))
    label = np.arange(count)
    while True:
        a, b = label[u], label[v]
        apart = a != b
        if not apart.any():
            return label
        u, v, a, b = u[apart], v[apart], a[apart], b[apart]
        # Of every edge, the component with the larger label joins the one with the smaller.
        np.minimum.at(label, np.maximum(a, b), np.minimum(a, b))
        while not np.array_equal(label, label[label]):
            label = label[label]
