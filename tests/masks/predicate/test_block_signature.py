"""Codes and signatures of the blocks of a predicate, against the definition."""

import random

import numpy as np
import pytest

from masks import runs as rl
from masks.predicate.where import where
from masks.runs import Grid
from tests.masks.predicate.rules import predicate, random_truth, texts


def random_grid(rng: random.Random) -> Grid:
    n_q, n_k = rng.randrange(1, 120), rng.randrange(1, 120)
    block_q, block_k = rng.choice([1, 3, 4, 8, 16]), rng.choice([2, 4, 8, 8, 16])
    q_origin = rng.randrange(1 - block_q, n_q) if rng.random() < 0.3 else 0
    k_origin = rng.randrange(1 - block_k, n_k) if rng.random() < 0.3 else 0
    return Grid(n_q, n_k, block_q, block_k, 1, 1, q_origin, k_origin)


def tiles_of(function, grid: Grid) -> tuple[np.ndarray, np.ndarray]:
    """(allowed, exists): bool (rows, cols, block_q, block_k), by the definition."""
    dense = np.broadcast_to(
        function(np.arange(grid.n_q)[:, None], np.arange(grid.n_k)), (grid.n_q, grid.n_k)
    )
    shape = (grid.rows, grid.cols, grid.block_q, grid.block_k)
    allowed, exists = np.zeros(shape, bool), np.zeros(shape, bool)
    for row, col, i, j in np.ndindex(shape):
        q = grid.q_origin + row * grid.block_q + i
        k = grid.k_origin + col * grid.block_k + j
        if 0 <= q < grid.n_q and 0 <= k < grid.n_k:
            exists[row, col, i, j], allowed[row, col, i, j] = True, dense[q, k]
    return allowed, exists


def check_codes_and_signatures(text: str, grid: Grid) -> None:
    """No decided block is wrong, and mixed blocks of one signature are the same bit for bit."""
    function = predicate(text)
    mask = where(function)
    assert mask.reason == "", mask.reason
    codes = mask.runs(grid).at(np.arange(grid.size))
    allowed, exists = tiles_of(function, grid)
    for code, tile, real in zip(
        codes, allowed.reshape(grid.size, -1), exists.reshape(grid.size, -1), strict=True
    ):
        assert code != rl.EMPTY or not tile.any(), text
        assert code != rl.FULL or tile[real].all(), text

    mixed = np.flatnonzero(codes == rl.MIXED)
    if len(mixed) == 0:
        return
    s, row, col = grid.split(mixed)
    signature = mask.signature(grid, s, row, col)
    seen: dict[tuple[int, int], bytes] = {}
    for number, cut, i, j in zip(signature, grid.cut(row, col), row, col, strict=True):
        tile = allowed[i, j].tobytes()
        assert seen.setdefault((int(number), int(cut)), tile) == tile, text


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("seed", range(100))
def test_codes_and_signatures_of_random_predicates(seed: int):
    rng = random.Random(seed)
    check_codes_and_signatures(random_truth(rng, 3), random_grid(rng))


ALIKE = """
q - k <= 3; abs(q - k) <= 5; abs(2 * q - 3 * k) < 17; abs(q % 10 - k % 7) <= 2; q // 5 == k // 7
T[q] == T[k]; np.where(q % 3 == 0, q, k) < 20; (np.minimum(q // 16, 3) + k) % 3 == 0
(abs(q - k) + q) % 5 == 0; (q // 6 * 5 - k) % 4 < 2; (q % 24 - k % 12) % 5 == 0; q * k % 7 < 3
(T[q // 30] + k) % 9 == 0; (abs(q - 50) - k) % 6 == 0; (q / 3 - k / 2) < 4
((q - k) % 8 + k) % 3 == 1
"""


@pytest.mark.parametrize("text", texts(ALIKE))
def test_codes_and_signatures(text: str):
    for blocks in ((4, 4), (3, 8), (8, 5), (1, 6)):
        check_codes_and_signatures(text, Grid(120, 110, *blocks))
