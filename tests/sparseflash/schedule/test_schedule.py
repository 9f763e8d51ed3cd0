"""Schedules against the masks they were made from."""

import numpy as np
import pytest
import torch

import masks
from sparseflash.cache import Cache
from sparseflash.schedule import blocks as schedule_module
from sparseflash.schedule.blocks import Schedule, as_tensors, schedule_for
from tests.sparseflash.walks import random_mask, walked


@pytest.fixture(autouse=True)
def cache(monkeypatch):
    cache = Cache(max_entries=4, max_bytes=2**20)
    monkeypatch.setattr(schedule_module, "cache", cache)
    return cache


def schedule_of(mask, n_q=64, n_k=64, batch=1, heads=1, device="cpu", **options) -> Schedule:
    return schedule_for(mask, n_q, n_k, batch, heads, device, **options)


def check(schedule: Schedule, blocks: masks.BlockMask) -> None:
    block_q, block_k = blocks.block_size
    dense = blocks.to_dense().reshape(-1, blocks.n_q, blocks.n_k)
    padded = np.pad(dense, ((0, 0), (0, -blocks.n_q % block_q), (0, -blocks.n_k % block_k)))
    cells = padded.reshape(-1, blocks.rows, block_q, blocks.cols, block_k)
    some, every = cells.any((2, 4)), cells.all((2, 4))
    for by_row, lists in ((True, schedule.rows), (False, schedule.cols)):
        seen, n_partial = walked(schedule, by_row=by_row)
        assert np.array_equal(seen, dense)
        assert len(lists.idx) == lists.ptr[-1] == some.sum()
        assert n_partial == schedule.n_partial == (some & ~every).sum()
    assert schedule.facts.keys_per_query == some.sum() * block_k / (some.shape[0] * some.shape[1])
    assert schedule.bits.dtype == torch.int32
    assert all(x.is_contiguous() for x in as_tensors(schedule)[0])


@pytest.mark.parametrize("n_q, n_k", [(64, 64), (1, 1), (63, 100), (257, 48), (100, 320)])
@pytest.mark.parametrize("block_size", [(16, 16), (64, 48), (32, 128)])
def test_lists_are_those_of_the_mask(n_q, n_k, block_size):
    rng = np.random.default_rng(n_q * n_k)
    for outer in ((1, 1), (1, 3), (2, 1), (2, 3)):
        dense = random_mask(rng, outer, n_q, n_k, block_size)
        blocks = masks.BlockMask.from_dense(dense, block_size)
        check(schedule_of(blocks, n_q, n_k, 2, 3), blocks)


def test_mask_per_head_takes_the_heads_of_q():
    mask = masks.random_blocks(0.3, block=16, per_head=True)
    schedule = schedule_of(mask, 96, 96, 2, 4, block_size=16)
    check(schedule, mask.build(96, 96, 16, heads=4))
    assert schedule.heads == 4
    assert schedule_of(mask, 96, 96, 2, 2, block_size=16).heads == 2


def test_wrong_lengths_batch_and_heads_are_refused():
    with pytest.raises(ValueError, match=r"64 queries and 64 keys, q and k have 65 and 64.*build"):
        schedule_of(masks.causal().build(64), 65)
    per_head = masks.mask_from(np.ones((3, 64, 64), dtype=bool))
    for mask in (per_head, per_head.build(64)):
        with pytest.raises(ValueError, match="batch 1 and heads 3, q has 2 and 4"):
            schedule_of(mask, batch=2, heads=4)
        assert schedule_of(mask, batch=2, heads=3).heads == 3
        with pytest.raises(ValueError, match="heads 3"):  # from the cache too
            schedule_of(mask, batch=2, heads=4)


def test_schedule_made_in_inference_mode_serves_autograd():
    with torch.inference_mode():
        schedule = schedule_of(masks.causal(), block_size=32)
    assert not any(x.is_inference() for x in as_tensors(schedule)[0])
