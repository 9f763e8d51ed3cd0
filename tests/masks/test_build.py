"""Leaves and random compositions of them against brute force on the dense mask."""

import random
from dataclasses import dataclass

import numpy as np
import pytest

import masks
from masks import runs as rl
from masks.build import Cache
from masks.leaves.leaf import Leaf
from masks.leaves.token_blocks import TokenBlocks
from tests.masks.brute import any_grid, brute_dense, check, check_window
from tests.masks.cases import BLOCKS, LENGTHS, composition
from tests.masks.oracles import BATCH, HEADS, LEAVES, VARIED
from tests.notes import note


@pytest.mark.parametrize("hundred", range(3))
def test_composition(hundred: int):
    """Three hundred of them in all."""
    for seed in range(100 * hundred, 100 * hundred + 100):
        rng = random.Random(seed)
        n_q, n_k = rng.choice(LENGTHS), rng.choice(LENGTHS)
        block_size = rng.choice(BLOCKS), rng.choice(BLOCKS)
        mask = composition(rng, n_q, n_k, rng.randrange(4))
        check(mask, mask.build(n_q, n_k, block_size), brute_dense(mask, n_q, n_k))


def check_composition_with_heads_and_batch(seed: int):
    rng = random.Random(10**6 + seed)
    n_q, n_k = rng.choice(LENGTHS), rng.choice(LENGTHS)
    mask = composition(rng, n_q, n_k, rng.randrange(3))
    for maker in rng.choices(VARIED, k=rng.randrange(1, 4)):
        part = maker(rng, n_q, n_k)
        mask = rng.choice([mask | part, mask & part, mask - part])
    blocks = mask.build(n_q, n_k, (rng.choice(BLOCKS), rng.choice(BLOCKS)), heads=HEADS)
    assert blocks.batch in (1, BATCH) and blocks.heads in (1, HEADS)
    check(mask, blocks, brute_dense(mask, n_q, n_k, blocks.batch, blocks.heads))


def test_composition_with_heads_and_batch():
    for seed in range(40):
        with note(seed):
            check_composition_with_heads_and_batch(seed)


@pytest.mark.parametrize("maker", LEAVES)
def test_windows(maker):
    """Any leaf on a grid that begins before, or beyond, its first token: codes and signatures."""
    for seed in range(8):
        rng = random.Random(seed)
        n_q, n_k = rng.choice(LENGTHS), rng.choice(LENGTHS)
        mask = maker(rng, n_q, n_k)
        check_window(mask, any_grid(rng, n_q, n_k), brute_dense(mask, n_q, n_k)[0, 0])


def test_ragged_tail_is_full_when_its_tokens_are():
    blocks = masks.dense().build(200, 130, 128)
    assert blocks.layout().tolist() == [[[[2, 2], [2, 2]]]]
    assert len(blocks.bits) == 0 and blocks.density == 1


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
