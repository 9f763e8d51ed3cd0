"""Predicates of q and k, and masks by head."""

import random
from dataclasses import dataclass

import numpy as np

import masks
from masks import Mask
from masks.predicate.table import table
from masks.predicate.where import where
from masks.structure import Heads
from tests.masks.oracles import HEADS, LEAVES, leaf, oracle, varied

IDS = table(np.cumsum(np.random.default_rng(0).random(1000) < 0.04))
RULES = {
    "band": lambda w, m, q, k: abs(q - k) <= w,
    "step": lambda w, m, q, k: (q - k) % m == w % m,
    "window": lambda w, m, q, k: (abs(q // m - k // m) <= 2) & (abs(q % m - k % m) <= w // 8),
    "disc": lambda w, m, q, k: (q // m - k // m) ** 2 + (q % m - k % m) ** 2 <= w,
    "documents": lambda w, m, q, k: (IDS[q] == IDS[k]) & (k <= q),
    "choice": lambda w, m, q, k: np.where(q < w, k < m, IDS[k] < IDS[q] + 3),
    "lines": lambda w, m, q, k: (k < m) | (q * 3 - k * 2 > w),
    "bits": lambda w, m, q, k: ((q ^ k) < m) | ((q & 15) == (k & 7)),
    "set": lambda w, m, q, k: np.isin(q - k, [0, 1, m, w]),
    "roots": lambda w, m, q, k: np.sqrt(q * 1.0) + np.sqrt(k) / 2 < w / 5,
}


@dataclass(frozen=True)
class Rule:
    """A predicate that can be pickled; with a head, its width is the head's."""

    name: str
    w: int
    m: int

    def __call__(self, *places):
        *head, q, k = places
        return RULES[self.name](self.w * (head[0] % 3) if head else self.w, self.m, q, k)


leaf(
    lambda rng, n_q, n_k: where(
        Rule(rng.choice(list(RULES)), rng.randrange(1, 100), rng.randrange(1, 40))
    )
)


@varied
def _(rng: random.Random, n_q: int, n_k: int) -> Mask:
    varying = masks.random_blocks(count=1, block=48, seed=rng.randrange(9), per_head=True)
    return masks.heads(masks.causal() | varying, masks.local(3), ~varying, masks.dense())


varied(
    lambda rng, n_q, n_k: where(
        Rule(rng.choice(["band", "disc", "lines"]), rng.randrange(1, 60), rng.randrange(1, 40)),
        per_head=True,
    ),
    lambda rng, n_q, n_k: masks.heads(
        *[rng.choice(LEAVES)(rng, n_q, n_k) for _ in range(rng.choice([1, 2, HEADS]))]
    ),
)


@oracle(Heads)
def _(mask: Heads, n_q: int, n_k: int, heads: int) -> np.ndarray:
    from tests.masks.helpers import brute_dense

    parts = [brute_dense(part, n_q, n_k, 1, heads)[0] for part in mask.parts]
    return np.stack([parts[h % len(parts)][h] for h in range(heads)])
