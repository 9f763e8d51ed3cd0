"""Leaves and random compositions against brute force; rows that repeat; a million tokens."""

import random
import threading
import tracemalloc
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

import masks
from masks import runs as rl
from masks.build import Cache
from masks.leaves.leaf import Leaf
from masks.leaves.token_blocks import TokenBlocks
from tests.masks.helpers import (
    BLOCKS,
    LENGTHS,
    any_grid,
    brute_dense,
    check,
    check_window,
    composition,
)
from tests.masks.oracles import BATCH, HEADS, LEAVES, VARIED
from tests.notes import each_seed, note, seeds


@pytest.mark.parametrize("hundred", range(3))
def test_composition(hundred: int):
    """Three hundred of them in all."""
    for seed in range(100 * hundred, 100 * hundred + 100):
        rng = random.Random(seed)
        n_q, n_k = rng.choice(LENGTHS), rng.choice(LENGTHS)
        block_size = rng.choice(BLOCKS), rng.choice(BLOCKS)
        mask = composition(rng, n_q, n_k, rng.randrange(4))
        check(mask, mask.build(n_q, n_k, block_size), brute_dense(mask, n_q, n_k))


@each_seed(40)
def test_composition_with_heads_and_batch(seed: int):
    rng = random.Random(10**6 + seed)
    n_q, n_k = rng.choice(LENGTHS), rng.choice(LENGTHS)
    mask = composition(rng, n_q, n_k, rng.randrange(3))
    for maker in rng.choices(VARIED, k=rng.randrange(1, 4)):
        part = maker(rng, n_q, n_k)
        mask = rng.choice([mask | part, mask & part, mask - part])
    blocks = mask.build(n_q, n_k, (rng.choice(BLOCKS), rng.choice(BLOCKS)), heads=HEADS)
    assert blocks.batch in (1, BATCH) and blocks.heads in (1, HEADS)
    check(mask, blocks, brute_dense(mask, n_q, n_k, blocks.batch, blocks.heads))


@pytest.mark.parametrize("maker", LEAVES)
def test_windows(maker):
    """Any leaf on a grid that begins before, or beyond, its first token: codes and signatures."""
    for seed in range(8):
        rng = random.Random(seed)
        n_q, n_k = rng.choice(LENGTHS), rng.choice(LENGTHS)
        mask = maker(rng, n_q, n_k)
        check_window(mask, any_grid(rng, n_q, n_k), brute_dense(mask, n_q, n_k)[0, 0])


def test_many_undecided_blocks_in_chunks(monkeypatch: pytest.MonkeyPatch):
    """The chunks that bound the memory do not show in the result."""
    mask = masks.butterfly(24) & masks.local(50) | masks.global_tokens(10)
    whole = mask.build(700, 650, 16)
    monkeypatch.setattr("masks.build.BLOCKS_AT_ONCE", 7)
    monkeypatch.setattr("masks.tiles.PAIRS_AT_ONCE", 3 * 16 * 16)
    chunked = (~~mask & masks.dense()).build(700, 650, 16)
    assert chunked == whole and np.array_equal(chunked.to_dense(), brute_dense(mask, 700, 650))


class Nowhere(TokenBlocks):
    """A pattern may have no pair at all."""

    def pairs(self, head, rows, n_cols):
        return np.zeros(0, np.int64), np.zeros(0, np.int64)


@dataclass(frozen=True, repr=False, eq=False)  # which a leaf is without it, too
class Checkers(Leaf):
    """A pattern that knows nothing about its blocks, and leaves everything to the tokens."""

    def runs(self, grid):
        return rl.constant(rl.MIXED)

    def allowed(self, grid, s, q, k):
        return (q // 32 + k // 32) % 2 == 0


@pytest.mark.parametrize("block_size", [16, 32, 48])
@pytest.mark.usefixtures("own_patterns")
def test_new_patterns(block_size: int):
    nowhere, checkers = masks.pattern()(Nowhere)(32), masks.pattern()(Checkers)()
    assert nowhere.build(100, 70, block_size) == (~masks.dense()).build(100, 70, block_size)
    q, k = np.arange(100)[:, None], np.arange(70)
    dense = ((q // 32 + k // 32) % 2 == 0) & (q >= k)
    mask = checkers & masks.causal() | nowhere
    check(mask, mask.build(100, 70, block_size), dense[None, None])


def test_heads_and_lengths_are_kept_apart():
    mask = masks.heads(masks.local(20), masks.causal())
    assert mask.build(300, heads=HEADS).heads == HEADS
    assert mask.build(300).heads == mask.build(200).heads == 2
    assert mask.build(300, 200, 64).n_k == 200 and mask.build(300) is mask.build(300)


def test_the_cache_is_bounded_and_drops_the_least_recently_used():
    a, b, c = (masks.local(width).build(64) for width in (1, 2, 3))
    for bounds in ((2, 1 << 20), (9, a.nbytes + b.nbytes + c.nbytes - 1)):
        cache = Cache(*bounds)
        cache.put("a", a)
        cache.put("b", b)
        assert cache.get("a") is a
        cache.put("c", c)
        assert [cache.get(key) for key in "abc"] == [a, None, c]
    tiny = Cache(9, 1)
    tiny.put("a", a)
    assert tiny.get("a") is None


def test_a_leaf_without_a_registered_function_has_no_key():
    with pytest.raises(AttributeError, match="key"):
        (Checkers() | masks.causal()).build(100)


# ---- rows that repeat ----


def transformed(rng: random.Random, n_q: int, n_k: int) -> masks.Mask:
    """A random mask, and half of the time more than that."""
    q, k = rng.choice([(0, 0), (0, 0), (rng.randrange(90), rng.randrange(90)), (-3, -20)])
    mask = composition(rng, n_q - q, n_k - k, rng.randrange(2)) >> masks.shift(q, k)
    match rng.randrange(6):
        case 0:
            return mask >> masks.snap(48)
        case 1:
            return masks.heads(mask, masks.fixed(24, 3, 2))
        case 2:
            return mask | masks.sinks(rng.randrange(50))
    return mask


@pytest.mark.parametrize("seed", seeds(8))
def test_long_compositions(seed: int):
    """Many rows of few kinds: other lengths of keys, odd ones, and blocks of any size."""
    rng = random.Random(2 * 10**6 + seed)
    n_q = rng.randrange(300, 800)
    n_k = rng.choice([n_q, rng.randrange(150, 900)])
    size = rng.choice([(16, 16), (48, 48), (32, 16), (16, 64), (128, 64), (256, 16)])
    mask = transformed(rng, n_q, n_k)
    blocks = mask.build(n_q, n_k, size)
    check(mask, blocks, brute_dense(mask, n_q, n_k, heads=blocks.heads))


def rules(d: int, e: int, f: int) -> list[Any]:
    return [
        lambda q, k: (q - k) % d < e,
        lambda q, k: (q // d) % (f % 5 + 1) == (k // d) % (f % 5 + 1),
        lambda q, k: (k <= q) & ((k % d >= e) | (q // f == k // f)),
        lambda q, k: (k < e) | (k >= 2 * f) & (abs(q - k) < e),
        lambda q, k: (q > f) & ((2 * q - 2 * k + e) // d % 3 == 1),
        lambda q, k: np.isin(k, [e, f]) | np.isin(q - k, [d, -e]) | (q == f),
        lambda q, k: (q >= 9 * d) & ((q - k) % 4 < 2) | (q - k == f),
        lambda q, k: (q == 48 * (1 + d % 9)) | ((q - k) % 4 == 0),  # a block begins there
        lambda q, k: (k == 48 * (1 + d % 4)) | ((q - k) % 4 == 0),
        lambda q, k: (q + k) // d % 3 == 0,  # repeats the other way: every row is looked at
    ]


@pytest.mark.parametrize("seed", seeds(2))
def test_rules(seed: int):
    """Divisors, differences and thresholds of a formula say how its rows repeat."""
    rng = random.Random(seed)
    for rule in rules(*(rng.randrange(1, 40) for _ in range(3))):
        n_q, n_k = rng.randrange(500, 900), rng.randrange(500, 900)
        dense = rule(np.arange(n_q)[:, None], np.arange(n_k))
        mask = masks.where(rule)
        check(mask, mask.build(n_q, n_k, rng.choice([16, 48])), dense[None, None])


# ---- a million tokens ----

LONG = 1 << 20
SPARSE = masks.local(256) | masks.butterfly(128) | masks.global_tokens(64)


def random_lengths(mean: int) -> list[int]:
    lengths = 1 + np.random.default_rng(0).exponential(mean - 1, 2 * LONG // mean)
    return lengths.astype(int).tolist()


LENGTHS_OF_LONG = random_lengths(2000)
ENDS = np.cumsum(LENGTHS_OF_LONG)
LAST = np.minimum(np.arange(len(ENDS)) + 8, len(ENDS) - 1)
ANSWERED = np.where(np.arange(len(ENDS)) % 9, ENDS, ENDS[LAST])  # prompts, each with eight answers
MILLIONS = {  # tiles at most of a million tokens
    SPARSE & masks.causal(): 6,
    masks.local(256): 2,
    masks.tri_shape(4, 4096, 64): 7,
    masks.power_of_two() & masks.causal(): 3,
    masks.diagonals((0, 3, 1000, 100_000)): 6,
    masks.fixed(65536, 128): 9,
    masks.fixed(262144, 20, vertices=2): 9,
    masks.documents(LENGTHS_OF_LONG) & masks.causal(): 1000,
    masks.shared_prefix(1000, LENGTHS_OF_LONG) & masks.causal(): 1000,
    masks.hstu(LENGTHS_OF_LONG, np.minimum(LENGTHS_OF_LONG, 20)): 2000,
    masks.prefix_tree(ENDS - LENGTHS_OF_LONG, ANSWERED): 1000,
    masks.causal() >> masks.packed(LENGTHS_OF_LONG): 1000,
    masks.block_diagonal(2000) & masks.causal(): 32,
    masks.block_diffusion(4): 9,
    masks.frame_causal(1560, 21, sinks=3): 150,
    masks.bigbird(128, per_head=False): 0,
    masks.expander(8): 0,
    masks.longformer(512) & masks.causal(): 9,
    masks.neighborhood((64, 128, 128), (3, 5, 5)): 1,
    masks.local_2d((1024, 1024), 16): 5,
    masks.sliding_tiles((1024, 1024), 8, 5): 5,
}


@pytest.mark.usefixtures("no_cache")
def test_masks_of_a_million_tokens_have_few_tiles():
    for mask, tiles in MILLIONS.items():
        with note(mask):
            heads = None if mask.period == 1 else mask.period
            assert len(mask.build(LONG, heads=heads).bits) <= tiles


@pytest.mark.parametrize(
    ("mask", "mebibytes"),
    [
        (masks.causal(), 10),
        (masks.local(256), 10),
        (SPARSE & masks.causal(), 80),
        (masks.power_of_two() & masks.causal(), 100),
    ],
    ids=str,
)
@pytest.mark.usefixtures("no_cache")
def test_build_memory(mask: masks.Mask, mebibytes: float):
    """Far below the 64 MiB of one byte a block, let alone the 1 TiB of one a pair of tokens."""
    mask.build(LONG // 2)  # what the first call loads
    tracemalloc.start()
    blocks = mask.build(LONG - 5)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert blocks.rows == LONG // 128 and peak < mebibytes * 2**20


def test_cache_among_threads():
    errors: list[Exception] = []

    def build() -> None:
        try:
            for n in range(1, 60):
                assert masks.sliding(5).build(n, block_size=16).n_q == n
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=build) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
