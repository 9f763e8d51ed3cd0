"""The order of scattered tiles: what is cut, what is sorted, and that it serves the L2 cache."""

import heapq
from collections import OrderedDict
from itertools import pairwise

import numpy as np
import pytest

import masks
from sparseflash.schedule import schedule_for
from sparseflash.tiles import locality as module
from sparseflash.tiles.lists import tile_lists
from tests.sparseflash.tiles.test_lists import (
    both_sides,
    build,
    check,
    schedule_of_selection,
    scheduled,
    spec_of,
)  # fmt: skip
from tests.sparseflash.walks import random_mask

N = 16384
SCATTERED = masks.random_blocks(0.15, block=128, seed=3)
TRAFFIC = 1024


@pytest.fixture
def cut(monkeypatch):
    """Lists are cut wherever they may be."""
    monkeypatch.setattr(module, "_APART", 1.0)
    monkeypatch.setattr(module, "_UNEVEN", 1.0)
    monkeypatch.setattr(module, "_WORTH", 1)


def columns(mask, n=N, heads=1, kv_heads=1, traffic=TRAFFIC, block=128, **options):
    schedule = schedule_for(mask, n, n, 1, heads, "cpu", block)
    options = {"minor": 64, "traffic": traffic} | options
    return build(schedule, "cols", n, n, 1, heads, kv_heads, **options)


def order(lists):
    return lists.items[0, :, 0].tolist()


@both_sides
def test_scattered_tiles_run_in_the_order_of_their_lengths(by):
    grid = np.random.default_rng(0).random((N // 128, N // 128)) < 0.15
    schedule = scheduled(grid.repeat(128, 0).repeat(128, 1), 128)
    lists = build(schedule, by, N, N)
    length = lists.items[0, :, 2]
    assert len(set(length.tolist())) > 5 and (length.diff() <= 0).all()
    assert lists.n_long == lists.n_parts == 0


@pytest.mark.parametrize(
    "mask",
    [
        masks.sliding(2000), masks.local(700), masks.block_diagonal(512),
        masks.random_blocks(0.9, block=128),
    ],
    ids=str,
)  # fmt: skip
@pytest.mark.parametrize("heads", [1, 8])
def test_tiles_with_entries_side_by_side_keep_their_order(mask, heads, cut):
    lists = columns(mask, heads=heads)
    assert order(lists) in (list(range(128)), list(range(127, -1, -1)))


def test_tiles_of_unlike_lengths_keep_their_order():
    lists = columns(SCATTERED & masks.causal(), sms=1)
    assert order(lists) == list(range(128)) and lists.n_parts == 0


def test_tiles_of_one_block_stay_neighbours():
    """They have the same list."""
    lists = columns(masks.random_blocks(0.3, block=256), block=256)
    tiles = np.array(order(lists)).reshape(-1, 2)
    assert (tiles[:, 1] == tiles[:, 0] + 1).all() and (tiles[:, 0] % 2 == 0).all()


def test_a_block_of_several_entries_is_scattered_too():
    """128 queries are two tiles of 64, side by side."""
    length = columns(SCATTERED).items[0, :, 2]
    assert (length % 2 == 0).all() and (length.diff() <= 0).all()


def by_turns(outers, blocks):
    """All pairs, and of the two numbers of key heads one or the other."""
    return [
        (outer, block, (1, 4)[(i + j) % 2])
        for i, outer in enumerate(outers)
        for j, block in enumerate(blocks)
    ]


BLOCKS = [(128, 128), (64, 64), (16, 32), (48, 96), (256, 64)]


@pytest.mark.parametrize(
    "outer, block, kv_heads", by_turns([(1, 1), (1, 8), (2, 1), (2, 8)], BLOCKS)
)
def test_bands_are_the_lists_of_the_mask(outer, block, kv_heads, cut):
    rng = np.random.default_rng(len(outer) + kv_heads)
    grid = rng.random((*outer, -(-700 // block[0]), -(-1100 // block[1]))) < min(
        0.4, min(block) / 160
    )
    dense = grid.repeat(block[0], 2).repeat(block[1], 3)[..., :700, :1100]
    dense &= rng.random(dense.shape) < 0.9 if kv_heads == 2 else True
    schedule = scheduled(dense, block, *outer)
    lists = check(
        schedule, dense, "cols", 2, 8, kv_heads, major=64, minor=64, traffic=TRAFFIC
    )  # fmt: skip
    assert lists.n_parts > lists.n_items // 2


def test_every_band_runs_before_the_next(cut):
    lists = columns(SCATTERED, heads=8)
    assert lists.n_parts == 4 * 128 and order(lists) != sorted(order(lists))
    ends = []
    for band in lists.items[0].view(4, 128, 8):
        assert sorted(band[:, 0].tolist()) == list(range(128))
        assert (band[:, 2].diff() <= 0).all()
        entries = [lists.idx[b : b + n, 0] for b, n in band[:, 1:3].tolist()]
        ends.append((min(int(e.min()) for e in entries), max(int(e.max()) for e in entries)))
    assert all(a[1] < b[0] for a, b in pairwise(ends))


def test_tiles_with_entries_in_one_band_are_whole(cut):
    """Some tiles have entries in the first half alone, one in none."""
    rng = np.random.default_rng(0)
    grid = np.zeros((1, 4, 64, 64), dtype=bool)
    for tile in range(63):
        heads = (0, 1) if tile % 3 == 0 else (0, 1, 2, 3)
        place = rng.choice(len(heads) * 64, 40, replace=False)
        grid[0, np.array(heads)[place // 64], place % 64, tile] = True
    dense = grid.repeat(64, 2).repeat(64, 3)
    schedule = scheduled(dense, 64, 1, 4)
    lists = check(schedule, dense, "cols", 1, 4, 1, major=64, minor=64, traffic=TRAFFIC)
    items = lists.items[0]
    split = {t for t in range(63) if t % 3}
    assert set(items[items[:, 4] >= 0][:, 0].tolist()) == split
    assert lists.n_parts == 2 * len(split) and lists.n_items == 64 + len(split)


@pytest.mark.parametrize(
    "heads, kv_heads, traffic, bands",
    [(8, 8, TRAFFIC, 2), (8, 4, TRAFFIC, 2), (8, 2, TRAFFIC, 2), (8, 1, TRAFFIC, 4), (8, 1, 0, 1)],
)
def test_memory_of_the_parts(heads, kv_heads, traffic, bands, cut):
    """That of the float32 dQ with four and more heads to a group, otherwise two parts a tile."""
    lists = columns(SCATTERED, heads=heads, kv_heads=kv_heads, traffic=traffic)
    assert lists.n_parts == (bands * 128 if bands > 1 else 0)
    parts = kv_heads * lists.n_parts * lists.major * (128 + 128)
    assert parts <= heads * N * 128 * max(1, 4 * kv_heads // heads)


def test_short_lists_are_not_cut():
    """It goes by the standard deviation of the place that a program has reached."""
    mask = masks.random_blocks(0.1, block=128)
    assert columns(mask, heads=8).n_parts == 0
    assert columns(mask, n=65536, heads=8).n_parts == 4 * 512
    assert columns(mask, n=65536, heads=8, traffic=512).n_parts == 0
    assert columns(mask, n=92160).n_parts == 0
    half = masks.random_blocks(0.5, block=128)
    assert columns(half, n=65536, heads=8, traffic=2048).n_parts == 2 * 512
    mask = masks.random_blocks(0.1, block=64)
    assert columns(mask, n=92160, block=64, major=64).n_parts == 2 * 1440
    assert columns(mask, n=32768, block=64, major=64).n_parts == 0


def test_few_entries_do_not_make_up_for_a_part(monkeypatch):
    """32 entries, scattered over all heads of a group."""
    monkeypatch.setattr(module, "_APART", 1.0)
    assert columns(masks.dilated(3, 1000), heads=8).n_parts == 0
    assert columns(SCATTERED, heads=8).n_parts == 4 * 128
    monkeypatch.setattr(module, "_WORTH", 150)  # of 307
    assert columns(SCATTERED, heads=8, sms=131).n_parts == 2 * 128


@pytest.mark.parametrize(
    "outer, block, kv_heads",
    by_turns([(1, 1), (2, 1), (1, 8), (2, 8)], [(64, 64), (128, 64), (64, 128), (256, 128)]),
)
def test_selections_run_in_bands_by_length(outer, block, kv_heads, monkeypatch):
    monkeypatch.setattr(module, "_RESIDENT", 1.0)
    monkeypatch.setattr(module, "_FAR", 1.0)
    rng = np.random.default_rng(kv_heads)
    dense = random_mask(rng, outer, 700, 1100, block)
    schedule = schedule_of_selection(dense, block, 2, 8)
    lists = check(
        schedule, dense, "cols", 2, 8, kv_heads, major=64, minor=64, traffic=TRAFFIC
    )  # fmt: skip
    bands = max(1, 8 // kv_heads // 2)
    assert lists.n_items == 18 * bands and lists.n_parts == (18 * bands if bands > 1 else 0)
    length = lists.items.view(len(lists.items), bands, 18, 8)[..., 2]
    assert (length.diff() <= 0).all()
    rows = check(schedule, dense, "rows", 2, 8, kv_heads, major=64, minor=64)
    assert order(rows) == list(range(11)) and rows.n_parts == 0


@pytest.mark.parametrize("outer", [(1, 1), (1, 9)], ids=str)
def test_bands_of_a_selection_divide_its_group(outer, monkeypatch):
    """Three of 3 heads each, where four would be allowed."""
    monkeypatch.setattr(module, "_RESIDENT", 1.0)
    dense = random_mask(np.random.default_rng(0), outer, 200, 300, (64, 64))
    schedule = schedule_of_selection(dense, (64, 64), 1, 9)
    lists = check(schedule, dense, "cols", 1, 9, 1, major=64, minor=64, traffic=TRAFFIC)
    assert lists.n_parts == 3 * 5


def test_a_selection_of_nothing_has_bands_of_nothing(monkeypatch):
    """It has no room for an entry, with a list for each head."""
    monkeypatch.setattr(module, "_RESIDENT", 1.0)
    dense = np.zeros((1, 8, 128, 128), dtype=bool)
    schedule = schedule_of_selection(dense, (64, 64), 1, 8)
    assert not len(schedule.cols.idx)
    lists = check(schedule, dense, "cols", 1, 8, 1, major=64, minor=64, traffic=TRAFFIC)
    assert lists.n_parts == 2 * 4


@pytest.mark.parametrize("what", ["few bytes", "entries side by side"])
def test_other_selections_run_in_order(what, monkeypatch):
    if what == "few bytes":
        dense = random_mask(np.random.default_rng(0), (1, 8), 1024, 1024, (64, 64))
    else:  # windows of unlike widths
        monkeypatch.setattr(module, "_FAR", 1.0)
        grid = np.abs(np.arange(16)[:, None] - np.arange(16)) < 3 + np.arange(16) % 5
        dense = np.broadcast_to(grid.repeat(64, 0).repeat(64, 1), (1, 8, 1024, 1024))
    schedule = schedule_of_selection(dense, (64, 64), 1, 8)
    lists = check(schedule, dense, "cols", 1, 8, 1, major=64, minor=64, traffic=TRAFFIC)
    assert order(lists) == list(range(16)) and lists.n_parts == 0
    assert len(set(lists.items[0, :, 2].tolist())) > 2


def test_lists_of_unlike_lengths_are_cut_where_heads_share_them(monkeypatch):
    """A program with few entries of each head would run ahead to other heads."""
    assert columns(masks.causal(), heads=8).n_parts == 4 * 128
    assert columns(masks.causal(), heads=2, kv_heads=1).n_parts == 0
    assert columns(masks.causal(), n=2048, heads=8, sms=1).n_parts == 0
    monkeypatch.setattr(module, "_WORTH", 400)  # of 1032 entries in the mean
    assert columns(masks.causal(), heads=8, sms=131).n_parts == 2 * 128


def test_an_empty_mask():
    assert columns(~masks.dense(), n=2048, heads=8).n_parts == 0


def hits(lists, programs: int, room: int) -> float:
    """Share of the entries whose block one of the last `room` blocks was, with persistent programs
    that take one step for an entry, or two where the block is not in the cache.
    """
    rng = np.random.default_rng(0)
    pace = 1 + 0.02 * rng.standard_normal(programs)
    idx, items = lists.idx[:, 0].tolist(), lists.items[0, :, 1:3].tolist()
    work = iter((head, b, b + n) for head in range(4) for b, n in items)
    cache: OrderedDict[tuple[int, int], None] = OrderedDict()
    running = [(0.0, p, 0, 0, 0) for p in range(programs)]
    hit = total = 0
    while running:
        now, p, head, at, end = heapq.heappop(running)
        if at == end:
            if (claimed := next(work, None)) is not None:
                heapq.heappush(running, (now + 2 * pace[p], p, *claimed))
            continue
        key, total = (head, idx[at]), total + 1
        hit += (found := key in cache)
        cache[key] = None
        cache.move_to_end(key)
        if len(cache) > room:
            cache.popitem(last=False)
        heapq.heappush(running, (now + (2 - found) * pace[p], p, head, at + 1, end))
    return hit / total


@pytest.mark.parametrize("heads, gain", [(1, 1.5), (8, 3.0)])
def test_programs_find_more_in_the_cache(heads, gain, monkeypatch, cut):
    """A model of the L2 cache, with room for a seventh of the blocks."""
    schedule = schedule_for(masks.random_blocks(0.05, block=32), 8192, 8192, 1, heads, "cpu", 32)
    spec = spec_of("cols", 8192, 8192, 1, heads, 1, major=32, minor=32, traffic=TRAFFIC)
    near = hits(tile_lists(schedule, spec, "cpu"), 20, 38 * heads)
    monkeypatch.setattr(module, "_UNEVEN", -1.0)
    monkeypatch.setattr(module, "_RESIDENT", 1e18)
    far = hits(tile_lists(schedule, spec._replace(sms=20), "cpu"), 20, 38 * heads)
    assert near > gain * far, (near, far)
