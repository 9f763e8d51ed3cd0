"""Plans: which calls share one, and what they must not share."""

import weakref
from concurrent.futures import ThreadPoolExecutor
from importlib import import_module

import pytest
import torch

import masks
import sparseflash
from sparseflash import select
from sparseflash.backends import cpu, triton
from sparseflash.cache import Cache, cache
from sparseflash.dynamic.lengths import blocks_of
from sparseflash.testing import relative_error
from tests.op_cases import FORMS, MASK, exact, plans, small, token_major, without_backward


def inputs(length=40, **options):
    return small(length, **{"requires_grad": False} | options)


Q, K, V = inputs()


def assert_right(out, qkv, mask, scale=None):
    assert relative_error(out, exact(*qkv, mask, scale=scale)[0]) < 1e-6


@pytest.fixture
def checked(monkeypatch):
    """One entry for every call that is checked in full."""
    module, entries = import_module("sparseflash.request"), []
    check = module.check_tensors
    monkeypatch.setattr(module, "check_tensors", lambda *qkv: entries.append(1) or check(*qkv))
    return entries


@pytest.mark.parametrize("mask", FORMS.values(), ids=FORMS)
def test_same_call_is_checked_once(mask, checked):
    for _ in range(3):
        qkv = inputs()
        assert_right(sparseflash.attention(*qkv, mask), qkv, None if mask is None else MASK)
    assert len(checked) == 1 and len(plans()) == 1


DIFFERENT = {
    "length": lambda qkv: (inputs(41), {}),
    "batch": lambda qkv: ([t[:1] for t in qkv], {}),
    "head dim": lambda qkv: (inputs(head_dim=16), {}),
    "dtype": lambda qkv: ([t.double() for t in qkv], {}),
    "strides": lambda qkv: ([token_major(t) for t in qkv], {}),
    "scale": lambda qkv: (qkv, {"scale": 0.7}),
    "mask": lambda qkv: (qkv, {"mask": masks.local(3)}),
    "backend": lambda qkv: (qkv, {"backend": "reference"}),
    "deterministic": lambda qkv: (qkv, {"deterministic": True}),
}


@pytest.mark.parametrize("change", DIFFERENT.values(), ids=DIFFERENT)
def test_another_call_is_checked_anew(change, checked):
    sparseflash.attention(*inputs(), MASK)
    qkv, options = change(inputs())
    options = {"mask": MASK} | options
    for _ in range(2):
        out = sparseflash.attention(*qkv, **options)
        assert out.dtype == qkv[0].dtype
        assert_right(out, qkv, options["mask"], options.get("scale"))
    assert len(checked) >= 2


def test_scale_that_is_a_tensor_is_read_every_time():
    scale = torch.tensor(0.5)
    for value in (0.5, 0.25):
        scale.fill_(value)
        expected = sparseflash.attention(Q, K, V, scale=value)
        assert torch.equal(sparseflash.attention(Q, K, V, scale=scale), expected)
    scale.fill_(-1)
    with pytest.raises(ValueError, match="positive"):
        sparseflash.attention(Q, K, V, scale=scale)


def test_array_that_changes_in_place_is_read_every_time():
    array = MASK.build(40).to_dense()[0, 0].copy()
    for given in (array, torch.from_numpy(array)):
        before = sparseflash.attention(Q, K, V, given)
        array[:, 0] ^= True
        after = sparseflash.attention(Q, K, V, given)
        assert not torch.equal(before, after)
        assert_right(after, (Q, K, V), masks.mask_from(array))


def test_gradients_come_and_go_with_their_modes():
    weights = [t.clone().requires_grad_() for t in (Q, K, V)]
    (wanted,) = torch.autograd.grad(exact(*weights)[0].square().sum(), weights[:1])
    for _ in range(2):
        with torch.no_grad():
            assert not sparseflash.attention(*weights, MASK).requires_grad
        with torch.inference_mode():
            assert sparseflash.attention(*weights, MASK).is_inference()
        assert not sparseflash.attention(Q, K, V, MASK).requires_grad
        out = sparseflash.attention(*weights, MASK)
        (dq,) = torch.autograd.grad(out.square().sum(), weights[:1])
        assert relative_error(dq, wanted) < 1e-5
    assert [plan.backward_backend for plan in plans()] == [None, plans()[0].forward_backend]


def test_autocast_is_followed():
    plain = sparseflash.attention(Q, K, V, MASK)
    low = [t.bfloat16() for t in (Q, K, V)]
    for _ in range(2):
        with torch.autocast("cpu", torch.bfloat16):
            assert sparseflash.attention(Q, K, V, MASK).dtype == torch.bfloat16
        assert torch.equal(sparseflash.attention(Q, K, V, MASK), plain)
        outside = sparseflash.attention(*low, MASK, backend="reference")
        with torch.autocast("cpu", torch.bfloat16):  # the call is known, and left in peace
            inside = sparseflash.attention(*low, MASK, backend="reference")
        assert torch.equal(outside, inside)
    with torch.autocast("cpu", torch.bfloat16):
        mixed = Q, low[1], V.half()
        planned = sparseflash.plan(MASK, *mixed)
        expected = sparseflash.attention(*mixed, MASK)
        torch.testing.assert_close(sparseflash.attention(*mixed, planned), expected)
        assert "cpu: chosen" in sparseflash.explain(*mixed, MASK)


def test_selections_and_dropout_have_plans():
    """Of one form; the blocks and the seed are those of each call."""
    for seed in range(3):
        q, k, v = inputs(seed=seed)
        selection = select.top_k(1, block_size=16)(q, k)
        dropout = {"dropout_p": 0.5, "seed": seed}
        for mask, same, options in (
            (selection, selection.to_block_mask(), {}),
            (MASK, MASK, dropout),
        ):
            out = sparseflash.attention(q, k, v, mask, **options)
            wanted = sparseflash.attention(q, k, v, same, **options, backend="reference")
            assert relative_error(out, wanted) < 1e-6
    assert len([plan for plan in plans() if plan.problem.options.backend == "auto"]) == 2


def limit(monkeypatch, max_entries: int, max_bytes: int = 2**30) -> Cache:
    small = Cache(max_entries, max_bytes)
    for module in ("plan", "schedule.blocks", "operators.attention", "schedule.tile_lists"):
        monkeypatch.setattr(import_module(f"sparseflash.{module}"), "cache", small)
    return small


def test_calls_of_many_threads(monkeypatch):
    small = limit(monkeypatch, max_entries=3)
    wanted = [exact(Q, K, V, masks.local(width))[0] for width in range(6)]

    def work(i):
        out = sparseflash.attention(Q, K, V, masks.local(i % 6), backend="reference")
        return relative_error(out, wanted[i % 6])

    with ThreadPoolExecutor(4) as threads:
        assert max(threads.map(work, range(240))) < 1e-6
    assert len(small) <= 3


def test_clear_cache_frees_everything():
    sparseflash.attention(*inputs(), MASK)
    assert len(cache) and cache.bytes and len(masks.build.cache.items)
    sparseflash.clear_cache()
    assert len(cache) == cache.bytes == len(masks.build.cache.items) == 0
    padded = weakref.ref(blocks_of(MASK, 128, 2, torch.device("cpu")).codes)
    assert padded() is not None and cache.bytes
    sparseflash.clear_cache()
    assert padded() is None
    assert_right(sparseflash.attention(*inputs(), MASK), inputs(), MASK)


@pytest.mark.usefixtures("own_patterns")
def test_a_pattern_that_is_defined_again_has_new_plans():
    found = []
    for width in (3, 30):  # as when a notebook runs a cell again

        @masks.pattern()
        def own(width: int = width):
            return masks.where(lambda q, k: abs(q - k) < width)

        mask = own()
        found.append(sparseflash.attention(*inputs(), mask))
        assert_right(found[-1], inputs(), masks.local(width - 1))
    assert not torch.equal(*found)


def test_a_plan_that_was_dropped_is_made_again():
    """The operator finds the mask by its key."""
    compiled = torch.compile(sparseflash.attention, fullgraph=True, backend="aot_eager")
    for _ in range(2):
        assert_right(compiled(*inputs(), MASK), inputs(), MASK)
        sparseflash.clear_cache()


def test_a_named_backend_is_not_replaced_in_the_backward(monkeypatch):
    qkv = small()
    with without_backward():
        with monkeypatch.context() as patch:
            patch.setattr(cpu, "_forward", None)  # nothing may run
            with pytest.raises(ValueError, match=r"'cpu' cannot run the backward of this call: no"):
                sparseflash.attention(*qkv, MASK, backend="cpu")
        assert sparseflash.plan(MASK, *qkv, backend="cpu")  # for calls without gradients
        with torch.no_grad():
            sparseflash.attention(*qkv, MASK, backend="cpu")
        monkeypatch.setattr(triton, "unsupported", lambda *_: "x")
        sparseflash.attention(*qkv, MASK).sum().backward()
        assert (plans()[-1].forward_backend, plans()[-1].backward_backend) == ("cpu", "reference")
        directions = sparseflash.explain(*qkv, MASK).split("backward:")
    assert "cpu: chosen" in directions[0] and "cpu: no" in directions[1]
    assert "reference: chosen" in directions[1]


@pytest.mark.parametrize("mask", FORMS.values(), ids=FORMS)
def test_plan_of_a_static_mask_is_taken_in_its_place(mask):
    given = sparseflash.plan(mask, *inputs())
    same = None if mask is None else MASK
    assert len(plans()) == 1
    assert_right(sparseflash.attention(*inputs(), given), inputs(), same)
    with torch.no_grad():
        assert_right(sparseflash.attention(*inputs(), given), inputs(), same)
