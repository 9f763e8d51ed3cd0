"""Whether a mask equals its transpose, token by token, in time linear in the runs."""

import math

import numpy as np
from numpy.typing import NDArray

from masks.analysis.segments import TILES_AT_ONCE, Segments
from masks.tiles import unpack_bits


def is_symmetric(segments: Segments) -> bool:
    """Whether q sees k exactly when k sees q, in every slice.

    Freivalds's idea: with random vectors x and y modulo 2**64, x'Ay equals y'Ax for a symmetric A,
    and for any other A with a probability below 2**-50. The vectors are products: token g * a + i
    has the weight coarse[a] * fine[i]. So a tile is multiplied once, however often it occurs. The
    seed is fixed, so the answer is always the same.
    """
    grid = segments.grid
    if grid.n_q != grid.n_k:
        return False
    g = math.gcd(grid.block_q, grid.block_k)
    random = np.random.default_rng(0x5EED)
    count = -(-max(grid.rows * grid.block_q, grid.cols * grid.block_k) // g)
    coarse = random.integers(1 << 63, size=(2, count), dtype=np.uint64)
    coarse = coarse * np.uint64(2) + np.uint64(1)
    fine = random.integers(1 << 63, size=(2, g), dtype=np.uint64)
    left = _bilinear(segments, coarse[0], fine[0], coarse[1], fine[1])
    right = _bilinear(segments, coarse[1], fine[1], coarse[0], fine[0])
    return bool(np.array_equal(left, right))


Words = NDArray[np.uint64]


def _bilinear(segments: Segments, x_coarse: Words, x: Words, y_coarse: Words, y: Words) -> Words:
    """(slices,): the sum of x[q] * y[k] over the allowed pairs of every slice."""
    grid, g = segments.grid, len(x)
    x_rows = (x_coarse[:, None] * x).ravel()[: grid.n_q]
    x_rows = np.add.reduceat(x_rows, grid.q_first)  # of the queries of every block
    y_tokens = np.append(np.uint64(0), np.cumsum((y_coarse[:, None] * y).ravel()[: grid.n_k]))
    whole = segments.where(segments.full)
    keys = y_tokens[grid.k_last[whole.stop - 1] + 1] - y_tokens[grid.k_first[whole.first]]
    total = _sum_by(whole.s, x_rows[whole.row] * keys, grid.slices)

    partial = segments.where(~segments.full)
    tiles = _tile_products(segments, x, y)
    parts_q, parts_k = grid.block_q // g, grid.block_k // g
    for b in range(parts_k):
        before = np.append(np.uint64(0), np.cumsum(y_coarse[b : grid.cols * parts_k : parts_k]))
        keys = before[partial.stop] - before[partial.first]
        for a in range(parts_q):
            queries = x_coarse[partial.row * parts_q + a]
            total += _sum_by(partial.s, queries * keys * tiles[partial.tile, a, b], grid.slices)
    return total


def _tile_products(segments: Segments, x: Words, y: Words) -> Words:
    """(T, block_q / g, block_k / g): x' sub-tile y, of every square of g tokens of every tile."""
    grid, g = segments.grid, len(x)
    result = np.zeros((len(segments.bits), grid.block_q // g, grid.block_k // g), np.uint64)
    step = max(1, TILES_AT_ONCE // 8)
    for begin in range(0, len(result), step):
        tiles = unpack_bits(segments.bits[begin : begin + step], grid.block_k)
        weighted = tiles.reshape(*tiles.shape[:2], -1, g) * y  # bool times uint64
        rows = weighted.sum(axis=-1).reshape(len(tiles), -1, g, weighted.shape[2])
        result[begin : begin + step] = (rows * x[:, None]).sum(axis=2)
    return result


def _sum_by(s: NDArray, values: Words, slices: int) -> Words:
    """(slices,): sums of the values of every slice, modulo 2**64; s ascends."""
    before = np.append(np.uint64(0), np.cumsum(values))
    bounds = np.searchsorted(s, np.arange(slices + 1))
    return before[bounds[1:]] - before[bounds[:-1]]
