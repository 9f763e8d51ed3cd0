"""LogSparse as the copied code makes it: row by row, anchor by anchor."""

import math
import random

import numpy as np

from masks import Mask
from masks.patterns.log_sparse import LogSparse, log_sparse
from tests.masks.oracles import leaf, oracle


@leaf
def _(rng: random.Random, n_q: int, n_k: int) -> Mask:
    window = rng.choice([1, 5, 16, 64, 97, 300])
    return log_sparse(window, rng.choice([2, 3, 5, 6, 11, 16, 20, 37, 64, 100]))


@oracle(LogSparse)
def _(mask: LogSparse, n_q: int, n_k: int, heads: int) -> np.ndarray:
    return np.array([row(q, mask.window, mask.restart, n_k) for q in range(n_q)])


def row(q: int, window: int, restart: int, n_k: int) -> list[bool]:
    near = math.ceil(math.log2(restart))
    if q < window // restart * 2 * near:
        return [k <= q for k in range(n_k)]
    seen: set[int] = set()
    for anchor in range(q, -1, -restart):
        if anchor < near - 1:
            seen |= set(range(anchor))
        else:
            seen |= set(range(anchor - near + 1, anchor + 1))
            reach = [near - 1 + 2**i for i in range(near)]
            seen |= {anchor - d for d in reach if d <= restart and d <= anchor}
    return [k in seen for k in range(n_k)]
