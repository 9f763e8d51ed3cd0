"""Leaves and random compositions of them against brute force on the dense mask."""

import random
from dataclasses import dataclass

import numpy as np
import pytest

import masks
from masks import BlockMask, Mask, runs
from masks.algebra import Leaf
from masks.patterns.token_blocks import TokenBlocks
from tests.masks.brute import brute_dense, brute_layout
from tests.masks.cases import BLOCKS, LENGTHS, composition


def check(mask: Mask, blocks: BlockMask, dense: np.ndarray) -> None:
    """`blocks` is the normal form of `dense` (batch, heads, n_q, n_k)."""
    assert np.array_equal(blocks.to_dense(), dense), mask
    assert np.array_equal(blocks.layout(), brute_layout(dense, blocks.block_size)), mask
    assert len({tile.tobytes() for tile in blocks.bits}) == len(blocks.bits)
    numbers = blocks.tiles[blocks.tiles >= 0]
    _, first = np.unique(numbers, return_index=True)
    assert len(first) == len(blocks.bits) and (np.diff(first) > 0).all()  # by order of appearance


@pytest.mark.parametrize("seed", range(500))
def test_composition(seed: int):
    rng = random.Random(seed)
    n_q, n_k = rng.choice(LENGTHS), rng.choice(LENGTHS)
    block_size = rng.choice(BLOCKS), rng.choice(BLOCKS)
    mask = composition(rng, n_q, n_k, rng.randrange(4))
    check(mask, mask.build(n_q, n_k, block_size), brute_dense(mask, n_q, n_k))


@pytest.mark.parametrize("seed", range(60))
def test_composition_with_heads_and_batch(seed: int):
    rng = random.Random(1000 + seed)
    data = np.random.default_rng(seed)
    n_q, n_k, batch, heads = rng.choice(LENGTHS), rng.choice(LENGTHS), rng.choice([1, 2]), 3
    count = min(2, -(-n_k // 24))
    per_head = masks.random_blocks(count=count, block=24, seed=seed, per_head=True)
    array = masks.mask_from(data.random((batch, 1, n_q, n_k)) < 0.5)
    by_head = masks.mask_from(data.random((heads, n_q, n_k)) < 0.9)
    mask = composition(rng, n_q, n_k, rng.randrange(3))
    for part in rng.sample([per_head, array, by_head], rng.randrange(1, 4)):
        mask = rng.choice([mask | part, mask & part, mask - part])
    blocks = mask.build(n_q, n_k, (rng.choice(BLOCKS), rng.choice(BLOCKS)), heads=heads)
    assert blocks.batch in (1, batch) and blocks.heads in (1, heads)
    check(mask, blocks, brute_dense(mask, n_q, n_k, blocks.batch, blocks.heads))


@pytest.mark.parametrize("align", ["top_left", "bottom_right"])
@pytest.mark.parametrize(("n_q", "n_k"), [(100, 300), (300, 100), (65, 64), (1, 257)])
def test_alignment(n_q: int, n_k: int, align: str):
    dense = masks.causal(align=align).build(n_q, n_k, 32).to_dense()[0, 0]
    offset = n_k - n_q if align == "bottom_right" else 0
    assert np.array_equal(dense, np.tri(n_q, n_k, offset, dtype=bool))


@pytest.mark.parametrize("n", [1, 5, 129, 1000])
def test_windows_hold_the_keys_they_say(n: int):
    keys = np.arange(n)
    local = masks.local(7, 3).build(n, block_size=16).to_dense().sum(-1).ravel()
    assert np.array_equal(local, np.minimum(keys, 7) + np.minimum(n - 1 - keys, 3) + 1)
    sliding = masks.sliding(8).build(n, block_size=16).to_dense().sum(-1).ravel()
    assert np.array_equal(sliding, np.minimum(keys + 1, 8))
    assert masks.sliding(8).build(n) == masks.local(7, 0).build(n)
    assert masks.local(7).build(n) == masks.local(7, 7).build(n)


def test_extents_beyond_any_token():
    everything = masks.dense().build(300)
    assert masks.local(2**60).build(300) == everything
    assert masks.sliding(2**60).build(300) == masks.causal().build(300)
    assert masks.butterfly(2**60).build(300) == everything
    assert masks.butterfly(16, 10**6).build(300) == masks.butterfly(16).build(300)
    assert masks.global_tokens(2**60).build(300) == everything


def test_ragged_tail_is_full_when_its_tokens_are():
    blocks = masks.dense().build(200, 130, 128)
    assert blocks.layout().tolist() == [[[[2, 2], [2, 2]]]]
    assert len(blocks.bits) == 0 and blocks.density == 1


def test_many_undecided_blocks_in_chunks(monkeypatch: pytest.MonkeyPatch):
    """The chunks that bound the memory do not show in the result."""
    mask = masks.butterfly(24) & masks.local(50) | masks.global_tokens(10)
    whole = mask.build(700, 650, 16)
    monkeypatch.setattr("masks.build.BLOCKS_AT_ONCE", 7)
    monkeypatch.setattr("masks.build.PAIRS_AT_ONCE", 3 * 16 * 16)
    chunked = (~~mask & masks.dense()).build(700, 650, 16)
    assert chunked == whole and np.array_equal(chunked.to_dense(), brute_dense(mask, 700, 650))


@dataclass(frozen=True, repr=False, eq=False)
class Nowhere(TokenBlocks):
    """A pattern may have no pair at all."""

    def pairs(self, head, rows, n_cols):
        return np.zeros(0, np.int64), np.zeros(0, np.int64)


@dataclass(frozen=True, repr=False, eq=False)
class Checkers(Leaf):
    """A pattern that knows nothing about its blocks, and leaves everything to the tokens."""

    key: str

    def runs(self, grid):
        return runs.constant(runs.MIXED)

    def allowed(self, grid, s, q, k):
        return (q // 32 + k // 32) % 2 == 0


@pytest.mark.parametrize("block_size", [16, 32, 48])
def test_new_patterns(block_size: int):
    nowhere = Nowhere("nowhere(32)", 32)
    assert nowhere.build(100, 70, block_size) == (~masks.dense()).build(100, 70, block_size)
    q, k = np.arange(100)[:, None], np.arange(70)
    dense = ((q // 32 + k // 32) % 2 == 0) & (q >= k)
    mask = Checkers("checkers()") & masks.causal() | nowhere
    check(mask, mask.build(100, 70, block_size), dense[None, None])
