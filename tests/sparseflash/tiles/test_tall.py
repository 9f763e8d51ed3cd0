"""Lists of tiles of 192 queries, no power of two, against the masks that they were made from."""

import numpy as np
import pytest
import torch

import masks
from sparseflash.schedule import schedule_for
from sparseflash.tiles.lists import indivisible, tile_entries
from tests.sparseflash.tiles.test_lists import build, check, scheduled, spec_of
from tests.sparseflash.walks import random_mask

TALL = 192
SIZES = [16, 32, 48, 64, 80, 96, 112, 128, 144, 192, 208, 240, 256]
LENGTHS = [(192, 192), (193, 129), (500, 384), (100, 300), (1, 700), (770, 1)]


@pytest.mark.parametrize("block_k", [16, 48, 128, 256])
@pytest.mark.parametrize("block_q", SIZES)
def test_every_block_size_and_ragged_ends(block_q, block_k):
    """Cells of 16 tokens, of the blocks and of the tiles: with parts of a block full or empty."""
    rng = np.random.default_rng(block_q * block_k)
    for number, (n_q, n_k) in enumerate(LENGTHS):
        cell = [(16, 16), (block_q, block_k), (TALL, 128)][number % 3]
        dense = random_mask(rng, (1, 1), n_q, n_k, cell)
        check(scheduled(dense, (block_q, block_k)), dense, "rows", major=TALL)


@pytest.mark.parametrize("block", [(128, 128), (64, 32), (48, 256), (16, 16)], ids=str)
@pytest.mark.parametrize("outer", [(1, 1), (1, 4), (2, 1), (2, 4)], ids=str)
@pytest.mark.parametrize("kv_heads", [4, 2, 1])
def test_batch_heads_and_groups(kv_heads, outer, block):
    rng = np.random.default_rng(sum(outer))
    for n_q, n_k in ((400, 290), (140, 400)):
        dense = random_mask(rng, outer, n_q, n_k, (32, 32))
        lists = check(scheduled(dense, block, 2, 4), dense, "rows", 2, 4, kv_heads, major=TALL)
        assert (lists.batch, lists.heads) == outer and lists.n_items == -(-n_q // TALL)


@pytest.mark.parametrize("n_q, n_k", [(384, 256), (100, 300), (193, 1), (1000, 129)])
def test_dense(n_q, n_k):
    dense = np.ones((1, 1, n_q, n_k), dtype=bool)
    lists = check(None, dense, "rows", 2, 2, 2, major=TALL)
    assert lists.partial == (n_k % 128 > 0) and lists.bits.shape[1] == TALL


@pytest.mark.parametrize("block", [16, 64, 128, 256])
def test_rows_with_nothing(block):
    dense = np.zeros((1, 2, 700, 300), dtype=bool)
    assert not check(scheduled(dense, block, 1, 2), dense, "rows", 1, 2, 2, major=TALL).partial
    dense[:, 0, 200:380] = True  # of the second tile all but the first rows and the last
    lists = check(scheduled(dense, block, 1, 2), dense, "rows", 1, 2, 2, major=TALL)
    assert lists.items[:, :, 2].sum(1).tolist() == [3, 0]


@pytest.mark.parametrize("block", [64, 128, 192])
def test_the_union_of_neighbours(block):
    """A tile lists each key block once, and a full one is full only if it is for all queries."""
    n = 768
    schedule = schedule_for(masks.causal(), n, n, 1, 1, "cpu", block)
    dense = masks.causal().build(n, block_size=block).to_dense().reshape(1, 1, n, n)
    lists = check(schedule, dense, "rows", major=TALL)
    own = lists.items[0, lists.items[0, :, 0].argsort()]
    key_tiles = [-(-TALL * (t + 1) // 128) for t in range(4)]
    assert own[:, 2].tolist() == key_tiles
    assert (own[:, 2] - own[:, 3]).tolist() == [TALL * t // 128 for t in range(4)]


def test_long_rows_are_split():
    """One long row among short ones, and two tiles against many keys."""
    n = 64 * TALL
    dense = np.zeros((1, 1, n, n), dtype=bool)
    for t in range(64):
        dense[..., TALL * t : TALL * (t + 1), TALL * t : TALL * t + 64] = True
    dense[..., TALL * 5 : TALL * 5 + 10, :] = True
    lists = check(scheduled(dense, 64), dense, "rows", major=TALL, sms=16)
    assert lists.n_parts > 1 and lists.merge[0, :, 0].tolist() == [5]
    few = np.ones((1, 1, 300, n), dtype=bool)
    assert check(None, few, "rows", major=TALL).n_parts > 2


def test_equal_tiles_have_their_bits_once():
    n = 2**16
    for block in (64, 128):
        schedule = schedule_for(masks.causal() & masks.local(1000), n, n, 1, 1, "cpu", block)
        lists = build(schedule, "rows", n, n, major=TALL)
        assert int(lists.items[..., 3].sum()) > 600 and len(lists.bits) <= 12


def test_blocks_of_a_selection_do_not_divide_by_them():
    for block in (64, 128, 256):
        facts = schedule_for(masks.causal(), 500, 500, 1, 1, "cpu", block).facts
        found = indivisible(facts, spec_of("rows", major=TALL))
        assert found and f"192 queries x 128 keys, they are {block} x {block}" in found


@pytest.mark.parametrize("side", ["rows", "cols"])
@pytest.mark.parametrize("tokens", [64, 128, TALL])
@pytest.mark.parametrize("block", [(64, 64), (16, 32), (64, 192), (128, 48), (256, 80)], ids=str)
@pytest.mark.parametrize("seed", range(4))
def test_tile_entries(seed, block, tokens, side):
    """Against all pairs of a tile and a non-empty block of the other side."""
    n_q, n_k = 513 + seed, 961 - 64 * seed  # one beyond the tiles, too
    array = random_mask(np.random.default_rng(seed), (seed % 2 + 1,), n_q, n_k, (16, 40))
    blocks = masks.mask_from(array).build(n_q, n_k, block_size=block)
    schedule = schedule_for(blocks, n_q, n_k, 1, 2, "cpu")
    grid = blocks.layout().reshape(-1, blocks.rows, blocks.cols) > 0
    n, size = n_k, block[1]
    if side == "rows":
        grid, n, size = grid.swapaxes(1, 2), n_q, block[0]
    some = grid.repeat(size, -1)[..., :n]
    some = np.pad(some, [(0, 0), (0, 0), (0, -n % tokens)])
    tiles = some.reshape(*some.shape[:2], -1, tokens).any(-1)
    assert tile_entries(schedule, side, tokens) == tiles.sum()


def test_tile_entries_of_one_list_for_all():
    schedule = schedule_for(masks.causal(), 768, 768, 2, 4, "cpu", 128)
    assert isinstance(schedule.rows.ptr, torch.Tensor)
    assert tile_entries(schedule, "rows", 128) == 21 and tile_entries(schedule, "rows", TALL) == 16
