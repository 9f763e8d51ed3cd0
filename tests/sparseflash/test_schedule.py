"""Schedules against the masks they were made from."""

import numpy as np
import pytest
import torch

import masks
from sparseflash import schedule as schedule_module
from sparseflash.cache import Cache
from sparseflash.schedule import Schedule, as_tensors, from_tensors, schedule_for, unpack_bits


@pytest.fixture(autouse=True)
def cache(monkeypatch):
    cache = Cache(max_entries=4, max_bytes=2**20)
    monkeypatch.setattr(schedule_module, "cache", cache)
    return cache


def random_blocks(rng, outer, n_q, n_k, block_size) -> masks.BlockMask:
    kinds = rng.integers(0, 3, (*outer, -(-n_q // block_size[0]), -(-n_k // block_size[1])))
    kinds = kinds.repeat(block_size[0], -2).repeat(block_size[1], -1)[..., :n_q, :n_k]
    array = (kinds == 2) | ((kinds == 1) & (rng.random(kinds.shape) < 0.3))
    return masks.BlockMask.from_dense(array, block_size)


def lists_of(schedule: Schedule, lists, n_own: int, n_other: int) -> dict:
    """{(slice, own block, other block): tile}, checking the order of every list."""
    found = {}
    ptr, mid, idx, tile = (x.tolist() for x in lists)
    assert ptr[0] == 0 and ptr[-1] == len(idx) == len(tile)
    assert len(mid) == schedule.batch * schedule.heads * n_own == len(ptr) - 1
    for row, (first, middle, last) in enumerate(zip(ptr[:-1], mid, ptr[1:], strict=True)):
        assert first <= middle <= last
        for lo, hi, full in ((first, middle, False), (middle, last, True)):
            assert idx[lo:hi] == sorted(set(idx[lo:hi]))
            assert all((t == -1) == full for t in tile[lo:hi])
        for j, t in zip(idx[first:last], tile[first:last], strict=True):
            assert 0 <= j < n_other
            found[(*divmod(row, n_own), j)] = t
    return found


def check(schedule: Schedule, blocks: masks.BlockMask) -> None:
    block_q, block_k = blocks.block_size
    padded = np.zeros(
        (blocks.batch * blocks.heads, blocks.rows * block_q, blocks.cols * block_k), dtype=bool
    )
    padded[:, : blocks.n_q, : blocks.n_k] = blocks.to_dense().reshape(-1, blocks.n_q, blocks.n_k)
    cells = padded.reshape(-1, blocks.rows, block_q, blocks.cols, block_k).swapaxes(2, 3)
    by_row = lists_of(schedule, schedule.rows, blocks.rows, blocks.cols)
    by_col = lists_of(schedule, schedule.cols, blocks.cols, blocks.rows)
    assert by_row == {(s, i, j): t for (s, j, i), t in by_col.items()}
    assert set(by_row) == {tuple(x) for x in np.argwhere(cells.any((-1, -2))).tolist()}
    tiles = unpack_bits(schedule.bits, block_k).numpy()
    for cell, tile in by_row.items():
        assert np.array_equal(cells[cell], tiles[tile] if tile >= 0 else np.ones_like(cells[cell]))
    assert schedule.n_partial == sum(tile >= 0 for tile in by_row.values())
    for lists in (schedule.rows, schedule.cols):
        assert [x.dtype for x in lists] == [torch.int64, torch.int64, torch.int32, torch.int32]
    assert schedule.bits.dtype == torch.int32
    assert all(x.is_contiguous() for x in as_tensors(schedule)[0])


@pytest.mark.parametrize("n_q, n_k", [(64, 64), (1, 1), (63, 100), (257, 48), (100, 320)])
@pytest.mark.parametrize("block_size", [(16, 16), (64, 48), (32, 128)])
def test_lists_are_those_of_the_mask(n_q, n_k, block_size):
    rng = np.random.default_rng(n_q * n_k)
    for outer, batch, heads in (((), 2, 3), ((3,), 2, 3), ((2, 1), 2, 3), ((2, 3), 2, 3)):
        blocks = random_blocks(rng, outer, n_q, n_k, block_size)
        check(schedule_for(blocks, n_q, n_k, batch, heads, "cpu"), blocks)


@pytest.mark.parametrize("n_q, n_k", [(128, 128), (100, 128), (128, 100), (100, 100), (5, 7)])
def test_full_blocks_that_stick_out_are_partial(n_q, n_k):
    blocks = masks.dense().build(n_q, n_k, 32)
    check(schedule_for(masks.dense(), n_q, n_k, 1, 1, "cpu", 32), blocks)


def test_nothing_allowed():
    mask = masks.causal() & ~masks.causal()
    schedule = schedule_for(mask, 100, 100, 1, 1, "cpu")
    assert len(schedule.rows.idx) == len(schedule.cols.idx) == schedule.n_partial == 0
    assert schedule.rows.ptr.tolist() == [0, 0]


def test_mask_per_head_takes_the_heads_of_q():
    mask = masks.random_blocks(0.3, block=16, per_head=True)
    schedule = schedule_for(mask, 96, 96, 2, 4, "cpu", 16)
    check(schedule, mask.build(96, 96, 16, heads=4))
    assert schedule.heads == 4
    assert schedule_for(mask, 96, 96, 2, 2, "cpu", 16).heads == 2


def test_flat_form_round_trip():
    schedule = schedule_for(masks.causal(), 200, 200, 1, 1, "cpu", 64)
    tensors, ints = as_tensors(schedule)
    again = from_tensors(tensors, ints)
    assert all(type(x) is int for x in ints)
    assert again[3:10] == schedule[3:10] and again.dynamic and not schedule.dynamic
    assert all(a is b for a, b in zip(as_tensors(again)[0], tensors, strict=True))


def test_wrong_lengths_batch_and_heads_are_refused():
    blocks = masks.causal().build(64)
    with pytest.raises(ValueError, match=r"64 queries and 64 keys, q and k have 65 and 64.*build"):
        schedule_for(blocks, 65, 64, 1, 1, "cpu")
    per_head = masks.mask_from(np.ones((3, 64, 64), dtype=bool))
    for mask in (per_head, per_head.build(64)):
        with pytest.raises(ValueError, match="batch 1 and heads 3, q has 2 and 4"):
            schedule_for(mask, 64, 64, 2, 4, "cpu")
        assert schedule_for(mask, 64, 64, 2, 3, "cpu").heads == 3
        with pytest.raises(ValueError, match="heads 3"):  # from the cache too
            schedule_for(mask, 64, 64, 2, 4, "cpu")


def test_cache_knows_masks_by_content_and_is_bounded(cache):
    first = schedule_for(masks.local(8), 64, 64, 1, 1, "cpu", 16)
    assert schedule_for(masks.local(8), 64, 64, 5, 7, torch.device("cpu"), 16) is first
    assert schedule_for(masks.local(8), 64, 64, 1, 1, "cpu", 32) is not first
    assert schedule_for(masks.local(8), 80, 64, 1, 1, "cpu", 16) is not first
    built = masks.local(8).build(64, 64, 16)
    copy = masks.BlockMask.from_dense(built.to_dense(), 16)
    assert schedule_for(built, 64, 64, 1, 1, "cpu") is schedule_for(copy, 64, 64, 1, 1, "cpu")
    for window in range(20):
        schedule_for(masks.local(window), 64, 64, 1, 1, "cpu", 16)
        assert len(cache) <= 4
    assert schedule_for(masks.local(8), 64, 64, 1, 1, "cpu", 16) is not first


def test_cache_is_bounded_in_bytes(cache):
    rng = np.random.default_rng(0)
    for _ in range(3):
        blocks = masks.BlockMask.from_dense(rng.random((2048, 2048)) < 0.5)  # 0.5 MiB of bits
        schedule = schedule_for(blocks, 2048, 2048, 1, 1, "cpu")
    assert cache.bytes <= 2**20 and 1 <= len(cache) < 3
    assert schedule_for(blocks, 2048, 2048, 1, 1, "cpu") is schedule
    assert cache.bytes == sum(t.nbytes for t in as_tensors(schedule)[0])


def test_schedule_made_in_inference_mode_serves_autograd():
    with torch.inference_mode():
        schedule = schedule_for(masks.causal(), 64, 64, 1, 1, "cpu", 32)
    assert not any(x.is_inference() for x in as_tensors(schedule)[0])
