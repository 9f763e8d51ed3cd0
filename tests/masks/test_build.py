"""Leaves and random compositions of them against brute force on the dense mask."""

import random
from dataclasses import dataclass

import numpy as np
import pytest

import masks
from masks import runs as rl
from masks.leaves.leaf import Leaf
from masks.leaves.token_blocks import TokenBlocks
from masks.runs import Grid
from tests.masks.brute import brute_dense, check
from tests.masks.cases import BLOCKS, LENGTHS, composition
from tests.masks.oracles import BATCH, HEADS, LEAVES, VARIED


@pytest.mark.parametrize("hundred", range(100))
def test_composition(hundred: int):
    """Ten thousand of them in all."""
    for seed in range(100 * hundred, 100 * hundred + 100):
        rng = random.Random(seed)
        n_q, n_k = rng.choice(LENGTHS), rng.choice(LENGTHS)
        block_size = rng.choice(BLOCKS), rng.choice(BLOCKS)
        mask = composition(rng, n_q, n_k, rng.randrange(4))
        check(mask, mask.build(n_q, n_k, block_size), brute_dense(mask, n_q, n_k))


@pytest.mark.parametrize("seed", range(300))
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


@pytest.mark.parametrize("seed", range(40))
@pytest.mark.parametrize("maker", LEAVES)
def test_windows(maker, seed: int):
    """Any leaf on a grid that begins before, or beyond, its first token: codes and signatures."""
    rng = random.Random(seed)
    n_q, n_k = rng.choice(LENGTHS), rng.choice(LENGTHS)
    mask = maker(rng, n_q, n_k)
    block_q, block_k = rng.choice([1, 7, 16, 32]), rng.choice([5, 16, 24])
    origins = (rng.randrange(1 - block_q, n_q), rng.randrange(1 - block_k, n_k))
    grid = Grid(n_q, n_k, block_q, block_k, 1, 1, *origins)
    dense = brute_dense(mask, n_q, n_k)[0, 0]
    placed = mask.place(grid)
    x = np.arange(grid.size)
    _, row, col = grid.split(x)
    codes = placed.runs.at(x)
    tiles: dict[tuple, bytes] = {}
    signatures = zip(grid.cut(row, col), *placed.signature(x), strict=True)
    for i, signature in zip(x.tolist(), signatures, strict=True):
        q = np.arange(grid.q_first[row[i]], grid.q_last[row[i]] + 1)
        k = np.arange(grid.k_first[col[i]], grid.k_last[col[i]] + 1)
        tile = dense[np.ix_(q, k)]
        assert codes[i] == rl.MIXED or (tile == (codes[i] == rl.FULL)).all(), (mask, grid, i)
        if codes[i] == rl.MIXED:
            zero = np.zeros((1, 1, 1), np.int64)
            allowed = placed.allowed(zero, q[None, :, None], k[None, None, :])
            assert np.array_equal(np.broadcast_to(allowed, (1, *tile.shape))[0], tile), mask
            same = tiles.setdefault(signature, tile.tobytes())
            assert same == tile.tobytes(), (mask, grid, i)


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


@dataclass(frozen=True, repr=False, eq=False)
class Nowhere(TokenBlocks):
    """A pattern may have no pair at all."""

    def pairs(self, head, rows, n_cols):
        return np.zeros(0, np.int64), np.zeros(0, np.int64)


@dataclass(frozen=True, repr=False, eq=False)
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


def test_a_leaf_without_a_registered_function_has_no_key():
    with pytest.raises(AttributeError, match="key"):
        (Checkers() | masks.causal()).build(100)
