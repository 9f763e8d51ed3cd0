"""Eager calls that come again: what they leave out, and what they must not."""

import gc
from concurrent.futures import ThreadPoolExecutor
from importlib import import_module

import numpy as np
import pytest
import torch

import masks
import sparseflash
from sparseflash import calls, select
from sparseflash.schedule import Cache
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


@pytest.fixture
def checked(monkeypatch):
    """One entry for every call that is checked anew."""
    module, entries = import_module("sparseflash.attention"), []
    prepare = module._prepare
    monkeypatch.setattr(module, "_prepare", lambda *given: entries.append(1) or prepare(*given))
    return entries


@pytest.mark.parametrize("mask", [None, MASK, MASK.build(40)], ids=["None", "Mask", "BlockMask"])
def test_same_call_is_checked_once(mask, checked):
    for _ in range(3):
        qkv = inputs()
        assert_right(sparseflash.attention(*qkv, mask), qkv, MASK if mask is not None else None)
    assert len(checked) == 1 and len(calls.known) == 1


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


def test_misaligned_inputs_are_checked_every_time(checked):
    sparseflash.attention(*inputs(), MASK)
    for number in range(3):
        qkv = list(inputs())
        longer = torch.zeros(qkv[number].numel() + 1)
        longer[1:] = qkv[number].flatten()
        qkv[number] = longer[1:].view(qkv[number].shape)
        assert_right(sparseflash.attention(*qkv, MASK), qkv, MASK)
        assert len(checked) == number + 2


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
    assert len(calls.known) == 1


def test_dropout_of_none_is_refused_as_ever():
    for _ in range(2):
        with pytest.raises(TypeError):
            sparseflash.attention(Q, K, V, MASK, dropout_p=None)  # pyright: ignore
        sparseflash.attention(Q, K, V, MASK)


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
    for width in [*range(12)] * 2:
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
    assert len(calls.known) == 1


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


def test_selections_and_dropout_are_not_kept():
    selection = select.top_k(1, block_size=16)(Q, K)
    for _ in range(2):
        sparseflash.attention(Q, K, V, selection)
        sparseflash.attention(Q, K, V, MASK, dropout_p=0.5, seed=1)
    assert len(calls.known) == 0


def test_calls_are_not_kept_without_end(monkeypatch):
    monkeypatch.setattr(calls, "known", Cache(max_count=4, max_bytes=2**30))
    for length in range(20, 32):
        qkv = inputs(length)
        assert_right(sparseflash.attention(*qkv, MASK), qkv, MASK)
        assert len(calls.known) <= 4
    monkeypatch.setattr(calls, "known", Cache(max_count=4, max_bytes=1))
    for length in range(20, 24):
        sparseflash.attention(*inputs(length), MASK)
    assert len(calls.known) == 1


def test_calls_of_many_threads(monkeypatch):
    monkeypatch.setattr(calls, "known", Cache(max_count=3, max_bytes=2**30))
    wanted = {width: expected((Q, K, V), masks.local(width)) for width in range(6)}

    def work(i):
        width = i % 6
        out = sparseflash.attention(Q, K, V, masks.local(width), backend="reference")
        return relative_error(out, wanted[width])

    with ThreadPoolExecutor(4) as threads:
        assert max(threads.map(work, range(240))) < 1e-6
    assert len(calls.known) <= 3
