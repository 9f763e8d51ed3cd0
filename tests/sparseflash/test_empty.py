"""An empty batch, no queries and no keys: the results and gradients of the empty sum."""

import math

import pytest
import torch
from torch import Tensor

import masks
import sparseflash
from sparseflash import packed, select
from sparseflash.testing import make_qkv
from tests.op_cases import BACKENDS

EXTENTS = {"no sequence": (0, 40, 24), "no query": (2, 0, 24), "no key": (2, 40, 0)}
EXTENTS["nothing"] = (0, 0, 0)
empty = pytest.mark.parametrize("extents", EXTENTS.values(), ids=EXTENTS)


def inputs(batch: int, n_q: int, n_k: int, **options) -> tuple[Tensor, Tensor, Tensor]:
    options = {"kv_heads": 2, "v_head_dim": 8, "requires_grad": True} | options
    return make_qkv(batch, 4, n_q, n_k, 16, **options)


def assert_nothing(found: tuple[Tensor, ...], q: Tensor, lse: float = -math.inf) -> None:
    out, found_lse, *more = found
    assert out.shape == (*q.shape[:3], 8) and out.dtype == q.dtype and not out.any()
    assert found_lse.shape == q.shape[:3] and (found_lse == lse).all()
    for maxima in more:
        assert maxima.shape == q.shape[:3] and (maxima == -math.inf).all()


def assert_gradients(loss: Tensor, tensors: tuple[Tensor, ...]) -> None:
    for gradient, t in zip(torch.autograd.grad(loss, tensors), tensors, strict=True):
        assert gradient.shape == t.shape and not gradient.any()


@empty
@pytest.mark.parametrize("backend", BACKENDS)
def test_attention(extents, backend: str):
    q, k, _ = qkv = inputs(*extents)
    batch, n_q, n_k = extents
    forms = [None, masks.causal(), masks.heads(*(masks.local(h) for h in range(4)))]
    forms.append(torch.ones(batch, 1, n_q, n_k, dtype=torch.bool))
    forms += [select.top_k(2)(q, k), select.nsa(1)(q, k)]
    asked = {"return_lse": True, "return_max_scores": True, "backend": backend}
    for mask in forms:
        for lengths in (None, [0] * batch):
            found = sparseflash.attention(*qkv, mask, lengths=lengths, **asked)
            assert_nothing(found, q)
            assert_gradients(found[0].sum() + found[1].sum(), qkv)
        assert sparseflash.explain(*qkv, mask)
    planned = sparseflash.plan(forms[-1], *qkv)
    assert_nothing(sparseflash.attention(*qkv, planned, dropout_p=0.1, **asked), q)


def test_sinks_and_scores_without_keys():
    qkv = inputs(2, 40, 0)
    sink, bias = torch.randn(4, requires_grad=True), torch.randn(4, 9, requires_grad=True)
    score = sparseflash.score_rules.relative(4)(bias=bias)
    out, lse = sparseflash.attention(*qkv, sink=sink, score=score, return_lse=True)
    assert not out.any() and torch.equal(lse, sink[:, None].expand_as(lse))
    weight = torch.randn_like(lse)
    dsink, dbias = torch.autograd.grad((lse * weight).sum(), (sink, bias))
    torch.testing.assert_close(dsink, weight.sum((0, 2)))
    assert dbias.shape == bias.shape and not dbias.any()


@pytest.mark.parametrize("extents", [EXTENTS["no sequence"], EXTENTS["no key"]])
def test_compiled(extents, fresh_dynamo):
    def step(q, k, v):
        return sparseflash.attention(q, k, v, masks.causal(), return_lse=True)

    qkv = inputs(*extents)
    found = torch.compile(step, fullgraph=True, backend="aot_eager")(*qkv)
    assert_nothing(found, qkv[0])
    assert_gradients(found[0].sum() + found[1].sum(), qkv)


@empty
@pytest.mark.parametrize("selector", [None, select.top_k(2, block_size=16)])
def test_layer(extents, selector):
    batch, n, n_k = extents
    options = {"kv_heads": 2, "rotary": sparseflash.Rotary(), "keep_max_scores": True}
    options |= {"backend": "cpu"}
    layer = sparseflash.BlockSparseAttention(32, 4, mask=selector, **options)
    x = torch.randn(batch, n, 32, requires_grad=True)
    context = torch.randn(batch, n_k, 32, requires_grad=True)
    for given in ({}, {"context": context}, {"lengths": [n] * batch}):
        out = layer(x, **given)
        assert out.shape == x.shape and out.isfinite().all()
        out.sum().backward()
        if 0 in (batch, n, n_k if given.get("context") is not None else 1):
            assert x.grad is not None and not x.grad.any()
            assert (layer.max_scores == -math.inf).all()
        x.grad = None


@empty
@pytest.mark.parametrize("paged", [False, True])
def test_decode(extents, paged: bool):
    batch, n_q, n_k = extents
    q, k, v = inputs(batch, n_q, n_k, requires_grad=False)
    options = {}
    if paged:
        k, v = torch.randn(3, 8, 2, 16), torch.randn(3, 8, 2, 8)
        options["block_table"] = torch.zeros(batch, n_k // 8, dtype=torch.int32)
    for mask in (None, masks.causal(), masks.local(3)):
        for lengths in (None, [0] * batch):
            given = options | {"lengths": lengths, "return_lse": True}
            assert_nothing(sparseflash.decode(q, k, v, mask, **given), q)


NO_DOCUMENTS = [torch.tensor([0]), torch.tensor([0, 0, 0]), torch.zeros(0, 3, dtype=torch.int32)]


@pytest.mark.parametrize("offsets", NO_DOCUMENTS)
def test_packings_without_documents(offsets: Tensor):
    batch = len(offsets) if offsets.ndim == 2 else 1
    for n in (0, 40):
        qkv = inputs(batch, n, n)
        for causal in (False, True):
            mask = packed.documents(offsets, n, causal=causal)
            found = sparseflash.attention(*qkv, mask, return_lse=True)
            assert_nothing(found, qkv[0])
            assert_gradients(found[0].sum(), qkv)
        layer = sparseflash.BlockSparseAttention(32, 4)
        x = torch.randn(batch, n, 32)
        assert layer(x, lengths=mask).shape == x.shape


def test_a_mask_that_does_not_fit_nothing():
    q, k, v = inputs(0, 40, 24)
    with pytest.raises(ValueError, match="64 queries"):
        sparseflash.attention(q, k, v, masks.causal().build(64))
    with pytest.raises(ValueError, match=r"\(40, 25\)"):
        sparseflash.attention(q, k, v, torch.ones(40, 25, dtype=torch.bool))
