"""The order of tiles and the parts of long ones, from their counts alone."""

import pytest
import torch

from sparseflash.tiles.order import Work, ordered
from tests.sparseflash.tiles.test_lists import spec_of


def work_of(counts: list[list[int]], n_partial: int = 0, copies: int = 1, sms: int = 132) -> Work:
    """Of tiles with so many entries, (slices, tiles)."""
    n = torch.tensor(counts)
    begin = n.flatten().cumsum(0).view_as(n) - n
    return ordered(begin, n, torch.full_like(n, n_partial).minimum(n), copies, sms)


def test_partial_entries_are_those_of_the_first_parts():
    items = work_of([[64]], n_partial=20).items[0, :, 1:4].tolist()
    assert items == [[0, 16, 16], [16, 16, 4], [32, 16, 0], [48, 16, 0]]


def test_every_slice_has_slots_of_its_own():
    work = work_of([[64, 40], [48, 16]])
    assert work.merge.tolist() == [[[0, 0, 4, 0], [1, 4, 3, 0]], [[0, 0, 3, 0], [-1, 0, 0, 0]]]
    assert work.n_parts == 7


def test_the_long_tiles_of_one_slice_lead():
    work = work_of([[40, 40] + [1] * 62] * 2, copies=8, sms=8)
    assert work.n_long == 2 and work.n_parts == 0


@pytest.mark.parametrize("counts, sms", [([[64, 64]] * 40, 132), ([[40] * 4 + [0] * 60], 64)])
def test_tiles_that_are_not_split(counts, sms):
    """Slices fill the processors together, and tiles of nothing make no other tile a long one."""
    work = work_of(counts, sms=sms)
    assert work.n_parts == work.n_long == 0


def test_columns_run_once_for_each_key_head():
    assert spec_of("rows", batch=3, heads=8, kv_heads=2).copies(1) == 24
    assert spec_of("cols", batch=3, heads=8, kv_heads=2).copies(1) == 6
