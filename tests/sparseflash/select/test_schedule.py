"""Schedules of selections, and attention with them, against those of the exact block mask."""

import pytest
import torch

import masks
import sparseflash
from sparseflash import select
from sparseflash.schedule import (
    Schedule,
    as_tensors,
    from_tensors,
    schedule_for,
    unpack_bits,
)
from sparseflash.select.schedule import lists_torch, schedule_from_selection
from sparseflash.testing import assert_close, make_qkv

SELECTORS = {
    "top_k": select.top_k(2, block_size=(16, 32)),
    "mass": select.mass(0.6, block_size=(32, 16), within=masks.causal(), always=masks.local(0)),
    "moba": select.moba(32, 2, 16),
    "union": select.moba(32, 2, 16, union=True),
    "nsa": select.nsa(3, 16, 32, capacity=50),
    "antidiagonal": select.antidiagonal(16, 0.5, 16, within=masks.sliding(60)),
}


def tokens(schedule: Schedule, *, by_row: bool) -> torch.Tensor:
    """Bool (slices, n_q, n_k) that a list walker sees; checks the order of the lists."""
    lists = schedule.rows if by_row else schedule.cols
    sizes = schedule.block_q, schedule.block_k
    rows, cols = -(-schedule.n_q // sizes[0]), -(-schedule.n_k // sizes[1])
    n_own = rows if by_row else cols
    slices = schedule.batch * schedule.heads
    seen = torch.zeros(slices, rows, cols, *sizes, dtype=torch.bool)
    tiles = unpack_bits(schedule.bits, schedule.block_k)
    ptr, mid = lists.ptr.tolist(), lists.mid.tolist()
    assert ptr[0] == 0 and len(ptr) == slices * n_own + 1 and len(mid) == slices * n_own
    assert ptr[-1] <= len(lists.idx) == len(lists.tile)
    n_partial = 0
    for line in range(slices * n_own):
        for lo, hi, full in ((ptr[line], mid[line], False), (mid[line], ptr[line + 1], True)):
            idx, tile = lists.idx[lo:hi].tolist(), lists.tile[lo:hi].tolist()
            assert idx == sorted(set(idx)) and all((t == -1) == full for t in tile)
            n_partial += 0 if full else len(idx)
            for other, t in zip(idx, tile, strict=True):
                s, own = divmod(line, n_own)
                cell = (s, own, other) if by_row else (s, other, own)
                seen[cell] = True if full else tiles[t]
    assert n_partial <= schedule.n_partial
    assert [x.dtype for x in lists] == [torch.int64, torch.int64, torch.int32, torch.int32]
    seen = seen.transpose(2, 3).flatten(3).flatten(1, 2)
    assert not seen[:, schedule.n_q :].any() and not seen[..., schedule.n_k :].any()
    return seen[:, : schedule.n_q, : schedule.n_k]


@pytest.mark.parametrize("name", SELECTORS)
@pytest.mark.parametrize("n", [96, 75])
def test_lists_hold_the_selection(name, n):
    q, k, _ = make_qkv(2, 4, n, n, 16, kv_heads=2)
    for picked in (SELECTORS[name](q, k), SELECTORS[name](q, k) | masks.local(5)):
        schedule = schedule_from_selection(picked, n, n, 2, 4, "cpu")
        assert from_tensors(*as_tensors(schedule)).dynamic is True
        expected = torch.from_numpy(picked.to_block_mask().to_dense()).flatten(0, 1)
        for by_row in (True, False):
            assert torch.equal(tokens(schedule, by_row=by_row), expected)


def test_whole_blocks_need_no_masking():
    q, k, _ = make_qkv(1, 2, 64, 96, 16)
    selector = select.top_k(2, block_size=32)
    assert schedule_from_selection(selector(q, k), 64, 96, 1, 2, "cpu").n_partial == 0
    q, k, _ = make_qkv(1, 2, 64, 95, 16)
    assert schedule_from_selection(selector(q, k), 64, 95, 1, 2, "cpu").n_partial > 0


@pytest.mark.parametrize("by_row", [True, False])
@pytest.mark.parametrize("shape", [(2, 3, 5), (1, 40, 70), (1, 1, 300)])
@pytest.mark.parametrize("n_tiles", [0, 4])
def test_kernels_make_the_same_lists(n_tiles, shape, by_row):
    block_lists = pytest.importorskip("sparseflash.select.kernels").block_lists
    device = "cuda" if torch.cuda.is_available() else "cpu"
    generator = torch.Generator().manual_seed(0)
    codes = torch.randint(-2, n_tiles, shape, generator=generator, dtype=torch.int32).to(device)
    for cut in ((False, False), (True, False), (True, True)):
        most = codes.numel()
        expected = lists_torch(codes, n_tiles, most, cut, by_row=by_row)
        found = block_lists(codes, n_tiles, most, cut)[0 if by_row else 1]
        used = int(expected.ptr[-1])
        assert torch.equal(found.ptr, expected.ptr) and torch.equal(found.mid, expected.mid)
        assert torch.equal(found.idx[:used], expected.idx[:used])
        assert torch.equal(found.tile[:used], expected.tile[:used])


def run(q, k, v, mask, dout, backend):
    leaves = [t.detach().requires_grad_() for t in (q, k, v)]
    out = sparseflash.attention(*leaves, mask, backend=backend)
    assert isinstance(out, torch.Tensor)
    return out, *torch.autograd.grad(out, leaves, dout)


@pytest.mark.parametrize("name", SELECTORS)
@pytest.mark.parametrize("backend", ["cpu", "reference"])
def test_attention(name, backend):
    q, k, v = make_qkv(2, 4, 75, 75, 16, kv_heads=2)
    dout = torch.randn(q.shape, generator=torch.Generator().manual_seed(1))
    picked = SELECTORS[name](q, k)
    doubles = (t.double() for t in (q, k, v))
    expected = run(*doubles, picked.to_block_mask(), dout.double(), "reference")
    for a, b, what in zip(run(q, k, v, picked, dout, backend), expected, "oqkv", strict=True):
        assert_close(a, b, name=what)


def test_attention_in_triton():
    pytest.importorskip("triton")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    q, k, v = (t.to(device) for t in make_qkv(1, 2, 50, 50, 16, kv_heads=1))
    picked = select.top_k(2, block_size=16)(q, k) & masks.causal() | masks.sliding(3)
    expected = run(q, k, v, picked.to_block_mask(), torch.ones_like(q), "reference")
    found = run(q, k, v, picked, torch.ones_like(q), "triton")
    for a, b, what in zip(found, expected, "oqkv", strict=True):
        assert_close(a, b.double(), name=what)


def test_heads_and_batch_that_are_shared():
    q, k, v = make_qkv(1, 1, 64, 64, 16)
    picked = select.top_k(2, block_size=16)(q, k)
    q, k, v = make_qkv(3, 2, 64, 64, 16)
    out = sparseflash.attention(q, k, v, picked)
    assert torch.equal(out, sparseflash.attention(q, k, v, picked.to_block_mask()))


@pytest.mark.parametrize("backend", ["cpu", "reference"])
def test_a_plan_stands_for_its_selection(backend):
    q, k, v = make_qkv(2, 4, 75, 75, 16, kv_heads=2)
    dout = torch.randn(q.shape, generator=torch.Generator().manual_seed(1))
    picked = SELECTORS["union"](q, k) & masks.local(30)
    plan = sparseflash.plan(picked, q, k, v, backend=backend)
    for a, b in zip(
        run(q, k, v, plan, dout, backend), run(q, k, v, picked, dout, backend), strict=True
    ):
        assert torch.equal(a, b)
    with pytest.raises(ValueError, match="75 queries and 75 keys, q and k have 32 and 75"):
        sparseflash.attention(q[:, :, :32], k, v, plan)


def test_selection_of_other_inputs_is_refused():
    q, k, v = make_qkv(2, 2, 64, 64, 16)
    picked = select.top_k(2, block_size=16)(q, k)
    with pytest.raises(ValueError, match="64 queries and 64 keys, q and k have 32 and 64"):
        sparseflash.attention(q[:, :, :32], k, v, picked)
    with pytest.raises(ValueError, match="batch 2 and heads 2, q has 1 and 2"):
        sparseflash.attention(q[:1], k[:1], v[:1], picked)
    with pytest.raises(ValueError, match="the selection is on cpu, q on meta"):
        schedule_from_selection(picked, 64, 64, 2, 2, "meta")


def test_the_schedule_of_a_mask_is_the_same():
    q, k, _ = make_qkv(1, 1, 80, 80, 16)
    picked = select.top_k(1.0, block_size=16, within=masks.local(20))(q, k)
    ours = schedule_from_selection(picked, 80, 80, 1, 1, "cpu")
    theirs = schedule_for(masks.local(20), 80, 80, 1, 1, "cpu", 16)
    for a, b in zip((*ours.rows, *ours.cols), (*theirs.rows, *theirs.cols), strict=True):
        assert torch.equal(a, b)
