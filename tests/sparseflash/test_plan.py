"""Plans: which calls share one, and what they must not share."""

import gc
from concurrent.futures import ThreadPoolExecutor
from importlib import import_module

import numpy as np
import pytest
import torch

import masks
import sparseflash
from sparseflash import select
from sparseflash.cache import Cache, cache
from sparseflash.plan import Plan
from sparseflash.testing import make_qkv, oracle, relative_error

MASK = (masks.local(9) | masks.butterfly(16)) & masks.causal()


def inputs(length=40, heads=2, head_dim=8, **options):
    return make_qkv(2, heads, length, length, head_dim, **{"kv_heads": 1} | options)


def expected(qkv, mask):
    """By float64 formulas, which know no calls."""
    n_q, n_k = qkv[0].shape[2], qkv[1].shape[2]
    dense = np.ones((n_q, n_k), bool) if mask is None else mask.build(n_q, n_k).to_dense()
    return oracle(*(t.double() for t in qkv), torch.from_numpy(dense))[0]


def assert_right(out, qkv, mask, tolerance=1e-6):
    assert relative_error(out, expected(qkv, mask)) < tolerance


def plans() -> list[Plan]:
    """Those in the cache."""
    return [entry.value for entry in cache._entries.values() if isinstance(entry.value, Plan)]


@pytest.fixture
def checked(monkeypatch):
    """One entry for every call that is checked in full."""
    module, entries = import_module("sparseflash.attention"), []
    check = module.check_tensors
    monkeypatch.setattr(module, "check_tensors", lambda *qkv: entries.append(1) or check(*qkv))
    return entries


@pytest.mark.parametrize("mask", [None, MASK, MASK.build(40)], ids=["None", "Mask", "BlockMask"])
def test_same_call_is_checked_once(mask, checked):
    for _ in range(3):
        qkv = inputs()
        assert_right(sparseflash.attention(*qkv, mask), qkv, MASK if mask is not None else None)
    assert len(checked) == 1 and len(plans()) == 1


DIFFERENT = {
    "length": lambda qkv: (inputs(41), {}),
    "batch": lambda qkv: ([t[:1] for t in qkv], {}),
    "heads": lambda qkv: (inputs(heads=3), {}),
    "head dim": lambda qkv: (inputs(head_dim=16), {}),
    "head dim of v": lambda qkv: (inputs(v_head_dim=12), {}),
    "dtype": lambda qkv: ([t.double() for t in qkv], {}),
    "strides": lambda qkv: ([t.transpose(1, 2).contiguous().transpose(1, 2) for t in qkv], {}),
    "last stride": lambda qkv: ([t.mT.contiguous().mT for t in qkv], {}),
    "scale": lambda qkv: (qkv, {"scale": 0.7}),
    "mask": lambda qkv: (qkv, {"mask": masks.local(3)}),
    "no mask": lambda qkv: (qkv, {"mask": None}),
    "backend": lambda qkv: (qkv, {"backend": "reference"}),
    "deterministic": lambda qkv: (qkv, {"deterministic": True}),
}


@pytest.mark.parametrize("change", DIFFERENT.values(), ids=DIFFERENT)
def test_another_call_is_checked_anew(change, checked):
    sparseflash.attention(*inputs(), MASK)
    qkv, options = change(inputs())
    mask = options.pop("mask", MASK)
    for _ in range(2):
        out = sparseflash.attention(*qkv, mask, **options)
        assert out.dtype == qkv[0].dtype
        scaled = [qkv[0] * options.get("scale", 1) * qkv[0].shape[-1] ** 0.5, *qkv[1:]]
        assert_right(out, scaled if "scale" in options else qkv, mask)
    assert len(checked) >= 2


def test_misaligned_inputs_have_plans_of_their_own():
    sparseflash.attention(*inputs(), MASK)
    for number, name in enumerate("qkv"):
        qkv = list(inputs())
        longer = torch.zeros(qkv[number].numel() + 1)
        longer[1:] = qkv[number].flatten()
        qkv[number] = longer[1:].view(qkv[number].shape)
        for _ in range(2):
            assert_right(sparseflash.attention(*qkv, MASK), qkv, MASK)
        assert [plan.problem.misaligned for plan in plans()] == ["", *"qkv"[: number + 1]]
        assert plans()[-1].problem.misaligned == name


Q, K, V = inputs()
BAD = {
    "v of another length": {"v": V[:, :, :39]},
    "k of another batch": {"k": K[:1], "v": V[:1]},
    "k of another dtype": {"k": K.double()},
    "v elsewhere": {"v": V.to("meta")},
    "no tensor": {"q": [1.0]},
    "a number": {"q": torch.tensor(1.0)},
    "integers": {"q": Q.long(), "k": K.long(), "v": V.long()},
    "scale 0": {"scale": 0},
    "scale negative": {"scale": -0.5},
    "scale nan": {"scale": float("nan")},
    "dropout": {"dropout_p": 1.0},
    "backend": {"backend": "cuda"},
    "no backend": {"backend": None},
    "backends": {"backend": ["cpu"]},
    "a backend that cannot": {"backend": "hopper"},
    "dropout of None": {"dropout_p": None},
    "deterministic of text": {"deterministic": "no"},
    "deterministic 0": {"deterministic": 0},
    "blocks of another length": {"mask": masks.causal().build(41)},
    "array of ints": {"mask": np.ones((40, 40), int)},
    "text": {"mask": MASK.key},
}


@pytest.mark.parametrize("bad", BAD.values(), ids=BAD)
def test_bad_call_after_a_good_one_is_refused(bad):
    good = {"q": Q, "k": K, "v": V, "mask": MASK}
    for _ in range(2):
        sparseflash.attention(**good)
        with pytest.raises(ValueError):
            sparseflash.attention(**good | bad)
    assert len(plans()) == 1


def test_scale_that_is_a_tensor_is_read_every_time():
    scale = torch.tensor(0.5)
    first = sparseflash.attention(Q, K, V, scale=scale)
    scale.fill_(0.25)
    second = sparseflash.attention(Q, K, V, scale=scale)
    assert torch.equal(first, sparseflash.attention(Q, K, V, scale=0.5))
    assert torch.equal(second, sparseflash.attention(Q, K, V, scale=0.25))
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


def test_masks_that_come_and_go_are_not_confused():
    for width in [*range(4)] * 2:
        blocks = masks.local(width).build(40)
        assert_right(sparseflash.attention(Q, K, V, blocks), (Q, K, V), masks.local(width))
        del blocks
        gc.collect()


def test_gradients_come_and_go_with_their_modes():
    weights = [t.clone().requires_grad_() for t in (Q, K, V)]
    (wanted,) = torch.autograd.grad(oracle_sum(weights), weights[:1])
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


def oracle_sum(qkv):
    dense = torch.from_numpy(MASK.build(40).to_dense())
    return oracle(*(t.double() for t in qkv), dense)[0].square().sum()


def test_autocast_is_followed():
    plain = sparseflash.attention(Q, K, V, MASK)
    for _ in range(2):
        with torch.autocast("cpu", torch.bfloat16):
            assert sparseflash.attention(Q, K, V, MASK).dtype == torch.bfloat16
        assert torch.equal(sparseflash.attention(Q, K, V, MASK), plain)
        low = [t.bfloat16() for t in (Q, K, V)]
        outside = sparseflash.attention(*low, MASK, backend="reference")
        with torch.autocast("cpu", torch.bfloat16):  # the call is known, and left in peace
            inside = sparseflash.attention(*low, MASK, backend="reference")
        assert torch.equal(outside, inside)


def test_subclasses_and_transforms_take_the_operators(checked):
    class Wrapped(torch.Tensor):
        pass

    sparseflash.attention(Q, K, V, MASK)
    for _ in range(2):
        assert type(sparseflash.attention(Q.as_subclass(Wrapped), K, V, MASK)) is Wrapped
    assert len(checked) == 3


def test_selections_and_dropout_have_plans():
    """Of one form; the blocks and the seed are those of each call."""
    for seed in range(3):
        q, k, v = make_qkv(2, 2, 40, 40, 8, kv_heads=1, seed=seed)
        selection = select.top_k(1, block_size=16)(q, k)
        out = sparseflash.attention(q, k, v, selection)
        wanted = sparseflash.attention(q, k, v, selection.to_block_mask(), backend="reference")
        assert relative_error(out, wanted) < 1e-6
        options = {"dropout_p": 0.5, "seed": seed}
        out = sparseflash.attention(q, k, v, MASK, **options)
        wanted = sparseflash.attention(q, k, v, MASK, **options, backend="reference")
        assert relative_error(out, wanted) < 1e-6
    auto = [plan for plan in plans() if plan.problem.options.backend == "auto"]
    assert len(auto) == 2


def limit(monkeypatch, cache: Cache) -> Cache:
    for module in ("attention", "plan", "schedule", "ops", "tiles.lists"):
        monkeypatch.setattr(import_module(f"sparseflash.{module}"), "cache", cache)
    return cache


def test_plans_are_not_kept_without_end(monkeypatch):
    small = limit(monkeypatch, Cache(max_entries=4, max_bytes=2**30))
    for length in range(20, 32):
        qkv = inputs(length)
        assert_right(sparseflash.attention(*qkv, MASK), qkv, MASK)
        assert len(small) <= 4
    smaller = limit(monkeypatch, Cache(max_entries=4, max_bytes=1))
    for length in range(20, 24):
        sparseflash.attention(*inputs(length), MASK)
    assert len(smaller) == 1


def test_calls_of_many_threads(monkeypatch):
    small = limit(monkeypatch, Cache(max_entries=3, max_bytes=2**30))
    wanted = {width: expected((Q, K, V), masks.local(width)) for width in range(6)}

    def work(i):
        width = i % 6
        out = sparseflash.attention(Q, K, V, masks.local(width), backend="reference")
        return relative_error(out, wanted[width])

    with ThreadPoolExecutor(4) as threads:
        assert max(threads.map(work, range(240))) < 1e-6
    assert len(small) <= 3


def test_plans_of_several_layouts_share_one_schedule(monkeypatch):
    module, built = import_module("sparseflash.schedule"), []
    to_device = module.to_device
    monkeypatch.setattr(module, "to_device", lambda *given: built.append(1) or to_device(*given))
    for qkv in (inputs(), inputs(head_dim=16), [t.double() for t in inputs()]):
        sparseflash.attention(*qkv, MASK)
    assert len(plans()) == 3 and len(built) == 1
    assert len({id(plan.forward_walk.schedule) for plan in plans()}) == 1  # pyright: ignore


def test_clear_cache_frees_everything():
    sparseflash.attention(*inputs(), MASK)
    assert len(cache) and cache.bytes and len(masks.build.cache.items)
    sparseflash.clear_cache()
    assert len(cache) == cache.bytes == len(masks.build.cache.items) == 0
    assert_right(sparseflash.attention(*inputs(), MASK), inputs(), MASK)


def test_a_plan_that_was_dropped_is_made_again():
    """The operator finds the mask by its key."""
    compiled = torch.compile(sparseflash.attention, fullgraph=True, backend="aot_eager")
    for _ in range(2):
        assert_right(compiled(*inputs(), MASK), inputs(), MASK)
        sparseflash.clear_cache()


def test_a_named_backend_is_not_replaced_in_the_backward(monkeypatch):
    module = import_module("sparseflash.backends.cpu")
    refuse = lambda problem, direction: "no backward" if direction == "backward" else None  # noqa: E731
    monkeypatch.setattr(module, "unsupported", refuse)
    monkeypatch.setattr(module, "_forward", None)  # nothing may run
    qkv = inputs(requires_grad=True)
    with pytest.raises(ValueError, match=r"'cpu' cannot run the backward of this call: no backwa"):
        sparseflash.attention(*qkv, MASK, backend="cpu")
    monkeypatch.undo()
    monkeypatch.setattr(module, "unsupported", refuse)
    with torch.no_grad():
        sparseflash.attention(*qkv, MASK, backend="cpu")
    monkeypatch.setattr(import_module("sparseflash.backends.triton"), "unsupported", lambda *_: "x")
    out = sparseflash.attention(*qkv, MASK)
    assert isinstance(out, torch.Tensor)
    out.sum().backward()
    assert (plans()[-1].forward_backend, plans()[-1].backward_backend) == ("cpu", "reference")
    directions = sparseflash.explain(*qkv, MASK).split("backward:")
    assert "cpu: chosen" in directions[0] and "cpu: no backward" in directions[1]
    assert "reference: chosen" in directions[1]


@pytest.mark.parametrize("mask", [None, MASK, MASK.build(40)], ids=["None", "Mask", "BlockMask"])
def test_plan_of_a_static_mask_prepares_the_call(mask, checked):
    given = sparseflash.plan(mask, *inputs())
    assert given is mask and len(plans()) == 1
    with torch.no_grad():
        sparseflash.plan(mask, *inputs())
        before = len(checked)
        sparseflash.attention(*inputs(), given)
    assert len(checked) == before and len(plans()) == 2
