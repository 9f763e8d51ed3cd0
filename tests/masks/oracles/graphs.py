"""Graphs of token blocks: random, BigBird, regular, and a butterfly of a given size."""

import random

import numpy as np

from masks import Mask
from masks.patterns.bigbird import BigBird, bigbird, etc_, longformer
from masks.patterns.graphs import (
    RandomBlocks,
    RegularGraph,
    butterfly,
    expander,
    pixelfly,
    random_blocks,
    random_regular,
)
from tests.masks.oracles import leaf, oracle, varied

GOLDEN, WRAP = 0x9E3779B97F4A7C15, (1 << 64) - 1
BLOCK_SIZES = [5, 7, 16, 24, 32]


def mix(x: int) -> int:
    """SplitMix64 after one step, with Python's integers."""
    x = (x + GOLDEN) & WRAP
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 & WRAP
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB & WRAP
    return x ^ (x >> 31)


def tokens(blocks: np.ndarray, block: int, n_q: int, n_k: int) -> np.ndarray:
    """Whole token blocks (heads, rows, cols), token by token."""
    return blocks.repeat(block, 1).repeat(block, 2)[:, :n_q, :n_k]


def word(mask, head: int) -> int:
    """The hash that all draws of a head begin with."""
    x = mix(mask.source.seed)
    if mask.source.layer is not None:
        x = mix(x ^ mask.source.layer)
    return mix(x ^ head)


def drawn(key: int, count: int, n: int) -> set[int]:
    """The first distinct values of a stream, or all but those."""
    values: set[int] = set()
    step = 0
    while len(values) < min(count, n - count):
        values.add((mix((key + step * GOLDEN) & WRAP) >> 32) * n >> 32)
        step += 1
    return values if 2 * count <= n else set(range(n)) - values


def layout(mask, n_q: int, n_k: int, heads: int) -> np.ndarray:
    """Nothing yet: (heads, rows, cols) of token blocks."""
    heads = heads if mask.per_head else 1
    return np.zeros((heads, -(-n_q // mask.block), -(-n_k // mask.block)), bool)


@leaf
def _(rng: random.Random, n_q: int, n_k: int) -> Mask:
    block, seed = rng.choice(BLOCK_SIZES), rng.randrange(100)
    layered, causal = rng.random() < 0.3, rng.random() < 0.5
    count = rng.choice([None, 1, 4]) if causal else None  # which a short row may lack
    return random_blocks(
        None if count else rng.random() or 1.0,
        count=count,
        block=block,
        causal=causal,
        seed=seed,
        per_layer=layered,
        layer=rng.randrange(9) if layered else None,
    )


@oracle(RandomBlocks)
def _(mask: RandomBlocks, n_q: int, n_k: int, heads: int) -> np.ndarray:
    blocks = layout(mask, n_q, n_k, heads)
    cols = blocks.shape[2]
    for head, row in np.ndindex(blocks.shape[:2]):
        n = row + 1 if mask.causal else cols
        count = min(n, mask.count or max(1, round((mask.density or 0) * n)))
        for col in drawn(mix(word(mask, head) ^ row), count, n):
            if col < cols:
                blocks[head, row, col] = True
    return tokens(blocks, mask.block, n_q, n_k)


def any_bigbird(rng: random.Random, **options) -> Mask:
    return bigbird(
        rng.choice(BLOCK_SIZES),
        rng.randrange(5),
        window=rng.choice([1, 3, 7]),
        global_blocks=rng.randrange(3),
        seed=rng.randrange(100),
        **options,
    )


@oracle(BigBird)
def _(mask: BigBird, n_q: int, n_k: int, heads: int) -> np.ndarray:
    blocks = layout(mask, n_q, n_k, heads)
    n, g = blocks.shape[2], mask.global_blocks
    ends = set(range(min(g, n))) | set(range(max(n - g, 0), n))
    for head, row in np.ndindex(blocks.shape[:2]):
        window = {col for col in range(n) if abs(row - col) <= mask.radius}
        seen = ends | window
        if row < g or row in ends:
            seen = set(range(n))
        rest = sorted(set(range(n)) - seen)
        ranks = drawn(mix(word(mask, head) ^ row), min(mask.random, len(rest)), len(rest))
        blocks[head, row, sorted(seen | {rest[rank] for rank in ranks})] = True
    return tokens(blocks, mask.block, n_q, n_k)


def any_graph(rng: random.Random, **options) -> Mask:
    block, seed = rng.choice(BLOCK_SIZES[:2]), rng.randrange(100)
    return rng.choice(
        [
            random_regular(rng.choice([2, 4]), block, seed=seed, **options),
            expander(rng.choice([4, 6]), block, seed=seed, **options),
        ]
    )


@oracle(RegularGraph)
def _(mask: RegularGraph, n_q: int, n_k: int, heads: int) -> np.ndarray:
    """From its own graph, of which test_graphs has the first rows, degrees and gaps."""
    blocks = layout(mask, n_q, n_k, heads)
    n = blocks.shape[2]
    for head in range(len(blocks)):
        graph = np.eye(n, dtype=bool)
        a, b = mask.edges(head, n)
        graph[a, b] = graph[b, a] = True
        blocks[head] = graph[np.arange(blocks.shape[1]) % n]
    return tokens(blocks, mask.block, n_q, n_k)


leaf(
    lambda rng, n_q, n_k: rng.choice(
        [
            butterfly(size=rng.choice([8, 16, 64]), levels=rng.choice([None, 0, 1, 2, 3])),
            butterfly(size=1),
            pixelfly(rng.choice(BLOCK_SIZES), rng.choice([None, 0, 1, 2, 3]), rng.randrange(3)),
        ]
    ),
    lambda rng, n_q, n_k: any_bigbird(rng, per_head=False),
    lambda rng, n_q, n_k: any_graph(rng),
    lambda rng, n_q, n_k: rng.choice(
        [
            longformer(
                rng.randrange(1, 60),
                rng.randrange(1, 4),
                tuple(sorted(rng.sample(range(200), rng.randrange(3)))),
            ),
            etc_(rng.randrange(40), rng.randrange(50)),
        ]
    ),
)
varied(
    lambda rng, n_q, n_k: random_blocks(
        count=min(2, -(-n_k // 24)), block=24, seed=rng.randrange(100), per_head=True
    ),
    lambda rng, n_q, n_k: any_bigbird(rng, per_head=True, per_layer=True, layer=rng.randrange(3)),
    lambda rng, n_q, n_k: any_graph(rng, per_head=True),
)
