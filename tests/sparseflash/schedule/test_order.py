"""Bands of scattered tiles, their order, and the parts of long ones."""

from itertools import pairwise

import numpy as np
import pytest

import masks
from sparseflash.schedule import locality as module
from sparseflash.schedule.blocks import schedule_for
from tests.sparseflash.schedule.test_tile_lists import (
    build,
    check,
    schedule_of_selection,
    scheduled,
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


BANDED = [
    ((1, 1), (128, 128), 1), ((1, 8), (64, 64), 4), ((2, 1), (16, 32), 4), ((2, 8), (48, 96), 1),
    ((1, 8), (256, 64), 1),
]  # fmt: skip


@pytest.mark.parametrize("outer, block, kv_heads", BANDED)
def test_bands_are_the_lists_of_the_mask(outer, block, kv_heads, cut):
    rng = np.random.default_rng(len(outer) + kv_heads)
    grid = rng.random((*outer, -(-700 // block[0]), -(-1100 // block[1]))) < min(
        0.4, min(block) / 160
    )
    dense = grid.repeat(block[0], 2).repeat(block[1], 3)[..., :700, :1100]
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


def test_a_column_far_longer_than_the_others_runs_before_the_bands(monkeypatch):
    """One that began with the last band would end long after all others."""
    monkeypatch.setattr(module, "_WORTH", 1)
    n = 2048
    column = np.arange(n)
    options = {"major": 64, "minor": 64, "traffic": 40 * TRAFFIC, "sms": 8}

    def lists_of(width):
        dense = (abs(column[:, None] - column) < width) | (column < 40)
        schedule = scheduled(dense[None, None], 64, 1, 1)
        return check(schedule, dense[None, None], "cols", 1, 8, 1, **options)

    lists = lists_of(100)  # all others are alike: no bands
    assert (lists.items[0, lists.items[0, :, 4] >= 0, 0] == 0).all()
    lists = lists_of(20 + column // 4)
    items = lists.items[0]
    assert lists.n_parts > 2 * len(lists.merge[0]) > 0  # several bands
    assert lists.n_long >= 4 and (items[: lists.n_long, 0] == 0).all()
    length = items[lists.n_long :, 2]
    assert (length <= 2 * length.double().mean()).all()


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
    "outer, block, kv_heads",
    [
        ((1, 1), (64, 64), 1),
        ((2, 1), (128, 64), 4),
        ((1, 8), (64, 128), 4),
        ((2, 8), (256, 128), 1),
    ],
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


def test_a_selection_of_nothing_has_bands_of_nothing(monkeypatch):
    """It has no room for an entry, with a list for each head."""
    monkeypatch.setattr(module, "_RESIDENT", 1.0)
    dense = np.zeros((1, 8, 128, 128), dtype=bool)
    schedule = schedule_of_selection(dense, (64, 64), 1, 8)
    assert not len(schedule.cols.idx)
    lists = check(schedule, dense, "cols", 1, 8, 1, major=64, minor=64, traffic=TRAFFIC)
    assert lists.n_parts == 2 * 4
