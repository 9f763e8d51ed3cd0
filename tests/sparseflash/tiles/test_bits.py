"""Bits of kernel tiles: cut in several steps, and each kept once."""

import numpy as np
import torch

from sparseflash.tiles import bits as module
from sparseflash.tiles.bits import same_rows
from tests.sparseflash.tiles.test_lists import both_sides, check, scheduled


@both_sides
def test_bits_are_cut_some_tiles_at_a_time(by, monkeypatch):
    monkeypatch.setattr(module, "_CHUNK", 3 * 64 * 64)
    dense = np.random.default_rng(0).random((1, 1, 300, 500)) < 0.5
    check(scheduled(dense, 64), dense, by, major=64, minor=64)


def test_same_rows_survives_equal_hashes(monkeypatch):
    rows = torch.randint(0, 3, (50, 2), dtype=torch.int32)
    state = torch.get_rng_state()
    unique, which = same_rows(rows)
    assert torch.equal(torch.get_rng_state(), state)  # dropout and others draw from it
    assert torch.equal(unique[which], rows) and len(unique) == len(rows.unique(dim=0))
    monkeypatch.setattr(torch, "randint", lambda *args, **kwargs: torch.zeros(2, dtype=torch.int64))
    unique, which = same_rows(rows)  # the hash is the sum now
    assert torch.equal(unique[which], rows)
