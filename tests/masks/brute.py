"""The definitions once more, token by token and in the plainest words: the oracle of the tests."""

import numpy as np

from masks import BlockMask, Mask
from masks.algebra import And, Not, Or
from tests.masks.oracles import ORACLES


def brute_dense(mask: Mask, n_q: int, n_k: int, batch: int = 1, heads: int = 1) -> np.ndarray:
    """bool (batch, heads, n_q, n_k)"""
    dense = allowed(mask, n_q, n_k, heads)
    return np.ascontiguousarray(np.broadcast_to(dense, (batch, heads, n_q, n_k)))


def allowed(mask: Mask, n_q: int, n_k: int, heads: int = 1) -> np.ndarray:
    """bool, broadcasting to (batch, heads, n_q, n_k)"""
    match mask:
        case Or():
            return np.any(_parts(mask, n_q, n_k, heads), axis=0)
        case And():
            return np.all(_parts(mask, n_q, n_k, heads), axis=0)
        case Not():
            return ~allowed(mask.part, n_q, n_k, heads)
    return ORACLES[type(mask)](mask, n_q, n_k, heads)


def _parts(mask: Or | And, n_q: int, n_k: int, heads: int) -> list[np.ndarray]:
    return list(np.broadcast_arrays(*[allowed(part, n_q, n_k, heads) for part in mask.parts]))


def brute_layout(dense: np.ndarray, block_size: tuple[int, int]) -> np.ndarray:
    """uint8 (batch, heads, rows, cols) by looking into every block of a dense mask."""
    block_q, block_k = block_size
    batch, heads, n_q, n_k = dense.shape
    layout = np.zeros((batch, heads, -(-n_q // block_q), -(-n_k // block_k)), np.uint8)
    for b, h, i, j in np.ndindex(layout.shape):
        block = dense[b, h, i * block_q : (i + 1) * block_q, j * block_k : (j + 1) * block_k]
        layout[b, h, i, j] = 2 if block.all() else 1 if block.any() else 0
    return layout


def check(mask: Mask, blocks: BlockMask, dense: np.ndarray) -> None:
    """`blocks` is the normal form of `dense` (batch, heads, n_q, n_k)."""
    assert np.array_equal(blocks.to_dense(), dense), mask
    assert np.array_equal(blocks.layout(), brute_layout(dense, blocks.block_size)), mask
    assert len({tile.tobytes() for tile in blocks.bits}) == len(blocks.bits)
    numbers = blocks.tiles[blocks.tiles >= 0]
    _, first = np.unique(numbers, return_index=True)
    assert len(first) == len(blocks.bits) and (np.diff(first) > 0).all()  # by order of appearance
