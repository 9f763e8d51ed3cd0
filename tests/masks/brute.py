"""The definitions once more, token by token and in the plainest words: the oracle of the tests."""

import numpy as np

from masks import Mask
from masks.algebra import And, Not, Or
from masks.patterns.array import ArrayMask
from masks.patterns.band import Band
from masks.patterns.butterfly import Butterfly
from masks.patterns.dense import Dense
from masks.patterns.global_tokens import GlobalTokens
from masks.patterns.random_blocks import RandomBlocks


def brute_dense(mask: Mask, n_q: int, n_k: int, batch: int = 1, heads: int = 1) -> np.ndarray:
    """bool (batch, heads, n_q, n_k)"""
    dense = _allowed(mask, n_q, n_k, heads)
    return np.ascontiguousarray(np.broadcast_to(dense, (batch, heads, n_q, n_k)))


def _allowed(mask: Mask, n_q: int, n_k: int, heads: int) -> np.ndarray:
    q, k = np.arange(n_q)[:, None], np.arange(n_k)[None, :]
    match mask:
        case Or():
            return np.any([x for x in _parts(mask, n_q, n_k, heads)], axis=0)
        case And():
            return np.all([x for x in _parts(mask, n_q, n_k, heads)], axis=0)
        case Not():
            return ~_allowed(mask.part, n_q, n_k, heads)
        case Band():
            position = q + (n_k - n_q if mask.align == "bottom_right" else 0)
            return (position - k >= mask.low) & (position - k <= mask.high)
        case Butterfly():
            strides = {0} | {2**t for t in range(20 if mask.levels is None else mask.levels)}
            return np.isin((q // mask.block) ^ (k // mask.block), list(strides))
        case RandomBlocks():
            return _random(mask, n_q, n_k, heads)
        case GlobalTokens():
            return (q < mask.n) | (k < mask.n)
        case Dense():
            return np.ones((n_q, n_k), bool)
        case ArrayMask():
            return mask.data
    raise AssertionError(mask)


def _parts(mask: Or | And, n_q: int, n_k: int, heads: int) -> list[np.ndarray]:
    parts = [_allowed(part, n_q, n_k, heads) for part in mask.parts]
    return list(np.broadcast_arrays(*parts))


def _mix(x: int) -> int:
    wrap = (1 << 64) - 1
    x = (x + 0x9E3779B97F4A7C15) & wrap
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 & wrap
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB & wrap
    return x ^ (x >> 31)


def random_row(seed: int, head: int, row: int, count: int, n: int) -> set[int]:
    """Key blocks of one row: the first distinct values of a stream, or all but those."""
    key = _mix(_mix(_mix(seed) ^ head) ^ row)
    drawn: set[int] = set()
    step = 0
    while len(drawn) < min(count, n - count):
        value = _mix((key + step * 0x9E3779B97F4A7C15) & ((1 << 64) - 1))
        drawn.add((value >> 32) * n >> 32)
        step += 1
    return drawn if 2 * count <= n else set(range(n)) - drawn


def _random(mask: RandomBlocks, n_q: int, n_k: int, heads: int) -> np.ndarray:
    rows, cols = -(-n_q // mask.block), -(-n_k // mask.block)
    count = mask.count or max(1, round((mask.density or 0) * cols))
    heads = heads if mask.per_head else 1
    blocks = np.zeros((heads, rows, cols), bool)
    for head in range(heads):
        for row in range(rows):
            blocks[head, row, sorted(random_row(mask.seed, head, row, count, cols))] = True
    return blocks.repeat(mask.block, 1).repeat(mask.block, 2)[:, :n_q, :n_k]


def brute_layout(dense: np.ndarray, block_size: tuple[int, int]) -> np.ndarray:
    """uint8 (batch, heads, rows, cols) by looking into every block of a dense mask."""
    block_q, block_k = block_size
    batch, heads, n_q, n_k = dense.shape
    layout = np.zeros((batch, heads, -(-n_q // block_q), -(-n_k // block_k)), np.uint8)
    for b, h, i, j in np.ndindex(layout.shape):
        block = dense[b, h, i * block_q : (i + 1) * block_q, j * block_k : (j + 1) * block_k]
        layout[b, h, i, j] = 2 if block.all() else 1 if block.any() else 0
    return layout
