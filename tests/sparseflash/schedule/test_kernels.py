"""The kernels that cut schedules into tiles against plain torch, bit for bit."""

import numpy as np
import pytest
import torch

from sparseflash.dynamic.lists import schedule_from_selection
from sparseflash.schedule.blocks import as_tensors
from sparseflash.schedule.dynamic_tiles import cut_schedule, dynamic_lists
from sparseflash.schedule.tile_spec import TileSpec
from sparseflash.select import Selection

kernels = pytest.importorskip("sparseflash.schedule.kernels")

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
TILES = [16, 32, 64, 128, 256]


def random_schedule(rng: np.random.Generator, n_q: int, n_k: int, block, batch: int, heads: int):
    """A schedule with room for more blocks than it has; the rest of the lists is not zero."""
    rows, cols = -(-n_q // block[0]), -(-n_k // block[1])
    n_tiles = int(rng.choice([0, 1, 5]))
    codes = rng.integers(-2, n_tiles, (batch, heads, rows, cols)).astype(np.int32)
    codes[rng.random(codes.shape) < rng.choice([0, 0.5, 0.95])] = -2
    bits = rng.integers(-(2**31), 2**31, (n_tiles, block[0], -(-block[1] // 32))).astype(np.int32)
    codes, bits = (torch.from_numpy(x).to(DEVICE) for x in (codes, bits))
    room = int((codes != -2).sum()) + int(rng.integers(20))
    selection = Selection(codes, bits, n_q, n_k, block, max_blocks=room)
    made = schedule_from_selection(selection, n_q, n_k, batch, heads, DEVICE)
    for side in (made.rows, made.cols):
        for entries in side[2:]:
            entries[int(side.ptr[-1]) :] = 7
    return made


def random_case(rng: np.random.Generator):
    """A schedule, and the parameters of lists of it."""
    tile_q, tile_k = (int(x) for x in rng.choice(TILES, 2))
    block = tuple(int(x * rng.integers(1, 256 // x + 1)) for x in (tile_q, tile_k))
    by_rows = bool(rng.integers(2))
    major, minor = (tile_q, tile_k) if by_rows else (tile_k, tile_q)
    minor = min(minor, 128)
    n_q, n_k = (int(x) for x in rng.integers(1, 500, 2))
    kv_heads, group = int(rng.integers(1, 3)), int(rng.choice([1, 2, 3, 4]))
    heads = kv_heads * group
    batch, per_head = int(rng.integers(1, 4)), bool(rng.integers(2))
    extents = 1 if rng.integers(2) else batch, heads if per_head else 1
    schedule = random_schedule(rng, n_q, n_k, block, *extents)
    return schedule, TileSpec(by_rows, major, minor, n_q, n_k, batch, heads, kv_heads, 132)


def assert_equal(found, expected):
    for a, b in zip(found, expected, strict=True):
        assert a.dtype == b.dtype and a.shape == b.shape and a.is_contiguous()
        assert torch.equal(a, b)


def assert_same_cut(schedule, spec):
    given = *as_tensors(schedule), [int(x) for x in spec]
    assert_equal(kernels.cut_schedule(*given), cut_schedule.__wrapped__(*given))


@pytest.mark.parametrize("seed", range(4))
def test_same_lists_as_in_torch(seed, monkeypatch):
    monkeypatch.setattr(kernels, "_SIZE", 4 if seed % 2 else 256)  # many programs to a list
    monkeypatch.setattr(kernels, "_LINES", 1024)  # fewer programs for the interpreter
    rng = np.random.default_rng(seed)
    for _ in range(8 if seed % 2 == 0 else 3):
        schedule, spec = random_case(rng)
        assert_same_cut(schedule, spec)


def test_no_room_for_any_block():
    codes = torch.full((1, 1, 2, 2), -2, dtype=torch.int32, device=DEVICE)
    bits = torch.empty(0, 64, 2, dtype=torch.int32, device=DEVICE)
    selection = Selection(codes, bits, 128, 128, (64, 64), max_blocks=0)
    schedule = schedule_from_selection(selection, 128, 128, 1, 1, DEVICE)
    spec = TileSpec(True, 64, 64, 128, 128, 1, 1, 1, 132)
    assert_same_cut(schedule, spec)


@pytest.mark.usefixtures("fresh_dynamo")
def test_lists_in_a_compiled_function(monkeypatch):
    """One operator in the graph, with the shapes that its results have."""
    monkeypatch.setattr(kernels, "_LINES", 1024)
    schedule, spec = random_case(np.random.default_rng(0))
    compiled = torch.compile(dynamic_lists, fullgraph=True, backend="aot_eager")
    found, expected = compiled(schedule, spec), dynamic_lists(schedule, spec)
    assert_equal(found.tensors, expected.tensors)
    assert found.numbers == expected.numbers
