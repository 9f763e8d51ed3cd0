"""Sparse arrays of SciPy: CSR of tokens, and CSR of blocks."""

from typing import Any

import numpy as np

from masks.analysis.loads import allowed_pairs
from masks.analysis.segments import Segments
from masks.block_lists import FULL
from masks.block_mask import BlockMask
from masks.checks import Installed, block_sizes
from masks.interop.common import check_built, check_size, slice_lists
from masks.runs import Grid
from masks.tiles import Tiles, assemble, pack_bits, unpack_bits

NEEDS_SCIPY = Installed("conversions to SciPy and back need it", "scipy")


def to_scipy(blocks: BlockMask, batch: int = 0, head: int = 0, *, limit_gib: float = 8) -> Any:
    """scipy.sparse.csr_array (n_q, n_k), bool: the allowed pairs of one slice, keys ascending.

    Time and memory grow with the allowed pairs and the area of the non-empty blocks.

    Raises:
        ValueError: a slice that does not exist, or more than `limit_gib` would be needed.
    """
    check_built(blocks)
    with NEEDS_SCIPY:
        from scipy.sparse import csr_array

    grid, block_k = blocks.grid, blocks.block_size[1]
    index = np.int32 if blocks.n_k <= np.iinfo(np.int32).max else np.int64
    pairs = allowed_pairs(Segments.of(blocks, batch, head))
    check_size("the allowed pairs", pairs * (1 + np.dtype(index).itemsize), limit_gib)
    lists = slice_lists(blocks, batch, head)
    counts, columns = np.zeros(blocks.n_q, np.int64), []
    for row in range(blocks.rows):
        part = slice(lists.ptr[row], lists.ptr[row + 1])
        idx, tile = lists.idx[part], lists.tile[part]
        queries = slice(grid.q_first[row], grid.q_last[row] + 1)
        height = queries.stop - queries.start
        key = idx[:, None] * np.int64(block_k) + np.arange(block_k)
        allowed = np.broadcast_to((key < blocks.n_k)[:, None], (len(idx), height, block_k)).copy()
        allowed[tile >= 0] = unpack_bits(blocks.bits[tile[tile >= 0], :height], block_k)
        allowed = allowed.swapaxes(0, 1).reshape(height, key.size)
        counts[queries] = allowed.sum(1)
        columns.append(key.ravel().astype(index)[allowed.nonzero()[1]])
    indices, ptr = np.concatenate(columns), np.append(0, np.cumsum(counts))
    if index == np.int32 and pairs <= np.iinfo(np.int32).max:
        ptr = ptr.astype(np.int32)
    return csr_array((np.ones(pairs, bool), indices, ptr), (blocks.n_q, blocks.n_k))


def to_scipy_blocks(blocks: BlockMask, batch: int = 0, head: int = 0) -> Any:
    """scipy.sparse.csr_array (rows, cols), uint8, of one slice: 1 partial, 2 full."""
    check_built(blocks)
    with NEEDS_SCIPY:
        from scipy.sparse import csr_array

    lists = slice_lists(blocks, batch, head)
    codes = np.where(lists.tile == FULL, 2, 1).astype(np.uint8)
    return csr_array((codes, lists.idx, lists.ptr), (blocks.rows, blocks.cols))


def from_scipy(matrix: Any, block_size: int | tuple[int, int] = 128) -> BlockMask:
    """Return the exact block mask of a SciPy sparse matrix or array (n_q, n_k): allowed where it
    is not 0.

    Entries at one place count as their sum, as in SciPy. Time and memory grow with the entries and
    the area of the non-empty blocks.

    Raises:
        ValueError: not a sparse matrix of two dimensions, or one with an extent of 0.
    """
    with NEEDS_SCIPY:
        from scipy.sparse import issparse

    if not issparse(matrix) or matrix.ndim != 2:
        shape = getattr(matrix, "shape", None)
        raise ValueError(
            f"matrix is {type(matrix).__name__} of shape {shape}: give a sparse one (n_q, n_k)"
        )
    entries = matrix.tocoo(copy=True)
    entries.sum_duplicates()
    allowed = entries.data != 0
    q, k = entries.row[allowed].astype(np.int64), entries.col[allowed].astype(np.int64)
    n_q, n_k = map(int, matrix.shape)
    grid = Grid(n_q, n_k, *block_sizes(block_size))
    x = q // grid.block_q * grid.cols + k // grid.block_k
    order = np.argsort(x, kind="stable")
    q, k = q[order] % grid.block_q, k[order] % grid.block_k
    x, first, block = np.unique(x[order], return_index=True, return_inverse=True)
    bounds, tiles = np.append(first, len(q)), Tiles(grid)
    _, row, col = grid.split(x)
    cut, codes = grid.cut(row, col), np.empty(len(x), np.int32)
    for part in tiles.parts(len(x)):
        of = slice(bounds[part.start], bounds[part.stop])
        bits = np.zeros((part.stop - part.start, grid.block_q, grid.block_k), bool)
        bits[block[of] - part.start, q[of], k[of]] = True
        codes[part] = tiles.codes(pack_bits(bits), cut[part])
    return BlockMask(*assemble(tiles, x, codes))
