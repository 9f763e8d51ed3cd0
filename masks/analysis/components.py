"""Connected components of a mask as a graph, of blocks and of tokens."""

import numpy as np

from masks.analysis.loads import cover
from masks.analysis.segments import Segments
from masks.runs import Bools, Ints, expand
from masks.tiles import unpack_bits

MOST_EDGES = 1 << 24  # of the token graph
MOST_TILES = 1 << 12

Edges = tuple[Ints, Ints]


def block_components(segments: Segments) -> Ints:
    """(rows,): a label for every query block, equal where blocks are connected.

    An edge is a block with any allowed pair, in any slice. In self-attention a query block and a
    key block that share tokens are one. Otherwise the labels of the key blocks follow: (rows +
    cols,).
    """
    grid = segments.grid
    # Columns within a segment are connected, and its row with the first of them.
    inside = cover(grid, segments.s, segments.first, segments.stop - 1).any(axis=0)
    col = grid.rows + np.flatnonzero(inside)
    edges = [(segments.row, grid.rows + segments.first), (col, col + 1)]
    if grid.n_q == grid.n_k:
        row, col = expand(grid.q_first // grid.block_k, grid.q_last // grid.block_k + 1)
        edges.append((row, grid.rows + col))
    label = connected(grid.rows + grid.cols, edges)
    return label[: grid.rows] if grid.n_q == grid.n_k else label


def token_components(segments: Segments) -> Ints | None:
    """(n,): a label for every token, equal where tokens are connected; None if that costs much.

    With n_q != n_k, queries and keys are different tokens: (n_q + n_k,).
    """
    grid = segments.grid
    keys_from = 0 if grid.n_q == grid.n_k else grid.n_q
    whole, partial = segments.where(segments.full), segments.where(~segments.full)
    tiles = np.unique(partial.tile)
    if len(tiles) > MOST_TILES:
        return None
    ties = {t: _ties(unpack_bits(segments.bits[t], grid.block_k)) for t in tiles.tolist()}
    counts = np.bincount(partial.tile, partial.length, len(segments.bits))
    if sum(counts[t] * len(tie[0]) for t, tie in ties.items()) > MOST_EDGES:
        return None

    # Stretches of connected tokens, and edges between them: of full blocks, then tile by tile.
    q_first, k_first = grid.q_first[whole.row], keys_from + grid.k_first[whole.first]
    first, last = [q_first, k_first], [grid.q_last[whole.row]]
    last.append(keys_from + grid.k_last[whole.stop - 1])
    edges = [(q_first, k_first)]
    for tile, tie in ties.items():
        own = partial.where(partial.tile == tile)
        of, col = expand(own.first, own.stop)
        query = own.row[of, None] * grid.block_q
        key = keys_from + col[:, None] * grid.block_k - grid.block_q
        a, b, root = (np.where(i < grid.block_q, query + i, key + i).ravel() for i in tie)
        first.append(a)
        last.append(b)
        edges.append((a, root))
    n = keys_from + grid.n_k
    inside = np.bincount(np.concatenate(first), minlength=n)
    inside -= np.bincount(np.concatenate(last), minlength=n)
    token = np.flatnonzero(np.cumsum(inside))  # connected with the next one
    return connected(n, [*edges, (token, token + 1)])


def _ties(tile: Bools) -> tuple[Ints, Ints, Ints]:
    """(first, last, root): stretches of connected queries 0.. and keys block_q.. of a tile.

    Stretches with equal roots are connected through the tile.
    """
    i, j = np.nonzero(tile)
    block_q = len(tile)
    label = connected(sum(tile.shape), [(i, block_q + j)])
    touched = np.concatenate([tile.any(axis=1), tile.any(axis=0)])
    begins = touched & np.append(True, (label[1:] != label[:-1]) | ~touched[:-1])
    begins[block_q] = touched[block_q]
    first = np.flatnonzero(begins)
    ends = touched & np.append(begins[1:] | ~touched[1:], True)
    return first, np.flatnonzero(ends), label[first]


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
