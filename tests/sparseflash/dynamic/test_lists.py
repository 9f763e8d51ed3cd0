"""Schedules of selections, and attention with them, against those of the exact block mask."""

import numpy as np
import pytest
import torch

import masks
import sparseflash
from masks import BlockLists
from sparseflash import select
from sparseflash.dynamic.lists import block_lists, schedule_from_selection
from sparseflash.schedule.blocks import as_tensors, from_tensors
from sparseflash.testing import make_qkv
from tests.sparseflash.walks import walked

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SELECTORS = {
    "top_k": select.top_k(2, block_size=(16, 32)),
    "mass": select.mass(0.6, block_size=(32, 16), within=masks.causal(), always=masks.local(0)),
    "moba": select.moba(32, 2, 16),
    "union": select.moba(32, 2, 16, union=True),
    "nsa": select.nsa(3, 16, 32, capacity=50),
}


@pytest.mark.parametrize("selector", SELECTORS.values(), ids=SELECTORS)
@pytest.mark.parametrize("n", [96, 75])
def test_lists_hold_the_selection(selector, n):
    q, k, _ = make_qkv(2, 4, n, n, 16, kv_heads=2)
    for picked in (selector(q, k), selector(q, k) | masks.local(5)):
        schedule = schedule_from_selection(picked, n, n, 2, 4, "cpu")
        assert from_tensors(*as_tensors(schedule)).dynamic is True
        expected = picked.to_block_mask().to_dense().reshape(-1, n, n)
        for by_row in (True, False):
            seen, n_partial = walked(schedule, by_row=by_row)
            assert np.array_equal(seen, expected) and n_partial <= schedule.n_partial


@pytest.mark.parametrize("n_k, partial", [(96, False), (95, True)])
def test_whole_blocks_need_no_masking(n_k, partial):
    q, k, _ = make_qkv(1, 2, 64, n_k, 16)
    picked = select.top_k(2, block_size=32)(q, k)
    schedule = schedule_from_selection(picked, 64, n_k, 1, 2, "cpu")
    assert (schedule.n_partial > 0) == partial


@pytest.mark.parametrize("shape", [(2, 3, 5), (1, 40, 70), (1, 1, 300)])
@pytest.mark.parametrize("n_tiles", [0, 4])
def test_kernels_make_the_same_lists(n_tiles, shape, monkeypatch):
    kernels = pytest.importorskip("sparseflash.dynamic.kernels")
    monkeypatch.setattr(kernels, "_LISTS", 16)  # several steps for small problems too
    generator = torch.Generator().manual_seed(0)
    codes = torch.randint(-2, n_tiles, shape, generator=generator, dtype=torch.int32).to(DEVICE)
    for cut in ((False, False), (True, False), (True, True)):
        given = codes, n_tiles, codes.numel(), *cut
        made, plain = kernels.block_lists(*given), block_lists.__wrapped__(*given)
        for some in (slice(4), slice(4, 8)):
            found, expected = BlockLists(*made[some]), BlockLists(*plain[some])
            used = int(expected.ptr[-1])
            assert torch.equal(found.ptr, expected.ptr) and torch.equal(found.mid, expected.mid)
            assert torch.equal(found.idx[:used], expected.idx[:used])
            assert torch.equal(found.tile[:used], expected.tile[:used])


def run(q, k, v, mask, backend):
    leaves = [t.detach().requires_grad_() for t in (q, k, v)]
    out = sparseflash.attention(*leaves, mask, backend=backend)
    assert isinstance(out, torch.Tensor)
    dout = torch.randn(q.shape, generator=torch.Generator().manual_seed(1)).to(out)
    return out, *torch.autograd.grad(out, leaves, dout)


@pytest.mark.parametrize("backend", ["cpu", "reference"])
def test_a_plan_stands_for_its_selection(backend):
    q, k, v = make_qkv(2, 4, 75, 75, 16, kv_heads=2)
    picked = SELECTORS["union"](q, k) & masks.local(30)
    plan = sparseflash.plan(picked, q, k, v, backend=backend)
    found, expected = (run(q, k, v, mask, backend) for mask in (plan, picked))
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    with pytest.raises(ValueError, match="75 queries and 75 keys, q and k have 32 and 75"):
        sparseflash.attention(q[:, :, :32], k, v, plan)
    with pytest.raises(ValueError, match="the plan is on meta, q on cpu: plan from q"):
        sparseflash.attention(q, k, v, plan._replace(bits=plan.bits.to("meta")))


def test_selection_of_other_inputs_is_refused():
    q, k, v = make_qkv(2, 2, 64, 64, 16)
    picked = select.top_k(2, block_size=16)(q, k)
    with pytest.raises(ValueError, match="64 queries and 64 keys, q and k have 32 and 64"):
        sparseflash.attention(q[:, :, :32], k, v, picked)
    with pytest.raises(ValueError, match="batch 2 and heads 2, q has 1 and 2"):
        sparseflash.attention(q[:1], k[:1], v[:1], picked)
    for device in ("meta", "cpu:1"):
        with pytest.raises(ValueError, match=f"the selection is on cpu, q on {device}"):
            schedule_from_selection(picked, 64, 64, 2, 2, device)
