"""`attention` under the transforms of torch.func, forward-mode derivatives and fake tensors."""

from contextlib import nullcontext

import pytest
import torch
import torch.autograd.forward_ad as forward_ad
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

import masks
import sparseflash
from sparseflash import select
from tests.op_cases import FORMS, MASK, small, token_major


def inputs():
    return list(small(requires_grad=False))


def function(q, k, v, backend="cpu", **options):
    return sparseflash.attention(q, k, v, MASK, backend=backend, **options)


def loss(q, k, v, **options):
    return function(q, k, v, **options).square().sum()


@pytest.mark.parametrize("backend", ["reference", "cpu"])
@pytest.mark.parametrize("options", [{}, {"dropout_p": 0.3, "seed": 1}], ids=["", "dropout"])
def test_functional_gradients_are_those_of_autograd(options, backend):
    def of(q, k, v):
        return loss(q, k, v, backend=backend, **options)

    qkv = small()
    expected = torch.autograd.grad(of(*qkv), qkv)
    q, k, v = inputs()
    _, pullback = torch.func.vjp(of, q, k, v)
    for results in (
        torch.func.grad(of, (0, 1, 2))(q, k, v),
        pullback(torch.ones(())),
        torch.func.jacrev(of, (0, 1, 2))(q, k, v),
    ):
        assert all(torch.equal(a, e) for a, e in zip(results, expected, strict=True))


def test_functional_gradients_of_the_lse_and_through_a_selection():
    q, k, v = inputs()
    picked = select.top_k(2, block_size=16)(q, k)
    sparseflash.clear_cache()  # or a test before might have filled it

    def lse_sum(q, _):
        return function(q, k, v, return_lse=True)[1].sum()

    def picked_loss(q, mask):
        return sparseflash.attention(q, k, v, mask, backend="cpu").square().sum()

    for of, close in ((lse_sum, {"rtol": 0, "atol": 0}), (picked_loss, {})):
        wide = q.clone().requires_grad_()
        (expected,) = torch.autograd.grad(of(wide, picked.to_block_mask()), wide)
        torch.testing.assert_close(torch.func.grad(of)(q, picked), expected, **close)


@pytest.mark.parametrize(
    "dims", [(1, 2, 3), (4, 0, None), (0, None, None), (None, -1, None), (None, None, 0)], ids=str
)
def test_vmap_is_a_loop_over_any_dimension(dims):
    qkv = [
        x if dim is None else torch.stack([x * scale for scale in (0.5, 2)], dim)
        for x, dim in zip(inputs(), dims, strict=True)
    ]

    def results(q, k, v):
        return function(q, k, v), *torch.func.grad(loss, (0, 1, 2))(q, k, v)

    found = torch.vmap(results, dims)(*qkv)
    for i in range(2):
        one = [x if d is None else x.select(d, i) for x, d in zip(qkv, dims, strict=True)]
        for got, wanted in zip(found, results(*one), strict=True):
            assert torch.equal(got[i], wanted)


@pytest.mark.parametrize("mask", [None, MASK, select.top_k(2, block_size=16)])
def test_plans_are_made_inside_of_transforms(mask):
    qkv = small(requires_grad=False)

    def loss(*qkv):
        given = mask(*qkv[:2]) if isinstance(mask, select.Selector) else mask
        given = sparseflash.plan(given, *qkv, backend="cpu")
        return sparseflash.attention(*qkv, given, backend="cpu").square().sum()

    places = 0, 1, 2
    found = torch.func.grad(loss, places)(*qkv)
    expected = torch.autograd.grad(loss(*(t.requires_grad_() for t in qkv)), qkv)
    assert all(map(torch.equal, found, expected))


def test_second_functional_derivative_is_refused():
    q, k, v = inputs()

    def slope(q):
        return torch.func.grad(lambda q: loss(q, k, v))(q).sum()

    with pytest.raises(RuntimeError, match="no second derivatives"):
        torch.func.grad(slope)(q)


def with_dual_numbers(q, k, v):
    with forward_ad.dual_level():
        return function(forward_ad.make_dual(q, q), k, v)


def test_masks_may_be_tensors():
    q, k, v = small(requires_grad=False)
    pairs = torch.from_numpy(MASK.build(40).to_dense())

    def loss(q, mask):
        return sparseflash.attention(q, k, v, mask).square().sum()

    for give in (lambda: pairs, pairs.clone):  # made outside, or inside
        found = torch.func.grad(lambda q, give=give: loss(q, give()))(q)
        assert torch.equal(found, torch.func.grad(loss)(q, MASK.build(40)))


def test_masks_are_not_mapped_over():
    q, k, v = inputs()
    several = torch.ones(3, q.shape[2], k.shape[2], dtype=torch.bool)
    with pytest.raises(ValueError, match="put the masks into the batch of one call"):
        torch.vmap(lambda mask: sparseflash.attention(q, k, v, mask))(several)


FORWARD_MODE = {
    "jvp": lambda q, k, v: torch.func.jvp(function, (q, k, v), (q, k, v)),
    "hessian": lambda q, k, v: torch.func.hessian(lambda q: loss(q, k, v))(q),
    "dual numbers": with_dual_numbers,
}


@pytest.mark.parametrize("call", FORWARD_MODE.values(), ids=FORWARD_MODE)
def test_forward_mode_is_refused(call):
    with pytest.raises(RuntimeError, match=r"no forward-mode derivatives.*use reverse mode"):
        call(*inputs())


@pytest.mark.parametrize("given", FORMS.values(), ids=FORMS)
def test_fake_tensors_give_the_shapes_and_strides_of_real_ones(given):
    real = [token_major(t) for t in inputs()]
    with FakeTensorMode() as mode:
        q, k, v = (mode.from_tensor(t).requires_grad_() for t in real)
        out, lse = sparseflash.attention(q, k, v, given, return_lse=True)
        out.sum().backward()
    expected = sparseflash.attention(*real, given, return_lse=True)
    for fake, true in zip((out, lse, q.grad, k.grad), (*expected, real[0], real[1]), strict=True):
        assert (fake.shape, fake.stride(), fake.dtype) == (true.shape, true.stride(), true.dtype)


def test_a_block_mask_of_another_length_is_refused_before_anything_runs():
    with FakeTensorMode(), pytest.raises(ValueError, match="the mask is for 40 queries"):
        sparseflash.attention(*(torch.empty(1, 1, 41, 8) for _ in "qkv"), FORMS["BlockMask"])


@pytest.mark.parametrize("first", ["fake", "real"])
def test_fake_and_real_selections_share_no_tables(first):
    """Static masks, candidates and edge tiles are remembered for the next real call only."""
    selector = select.top_k(2, block_size=16, within=masks.local(33), always=masks.local(1))

    def attend():
        q, k, v = (torch.ones(1, 2, 40, 16) for _ in range(3))
        return sparseflash.attention(q, k, v, selector(q, k) & masks.causal())

    for fake in (first == "fake", first != "fake", first == "fake"):
        with FakeTensorMode() if fake else nullcontext():
            out = attend()
        assert isinstance(out, FakeTensor) == fake and out.shape == (1, 2, 40, 16)


@pytest.mark.parametrize(
    "selector",
    [
        select.top_k(2, block_size=16, within=masks.causal()),
        select.moba(16, 2, 16, capacity=20, within=masks.sliding(30)),
    ],
    ids=str,
)
def test_vmap_selects_for_each_entry(selector):
    def of(q):
        return sparseflash.attention(q, q, q, selector(q, q), backend="cpu").square().sum()

    torch.manual_seed(0)
    q = torch.randn(3, 1, 2, 40, 16)
    for function in (of, torch.func.grad(of)):
        expected = torch.stack([function(x) for x in q])
        torch.testing.assert_close(torch.vmap(function)(q), expected)
