"""`attention` under the transforms of torch.func, forward-mode derivatives and fake tensors."""

import pytest
import torch
import torch.autograd.forward_ad as forward_ad
from torch._subclasses.fake_tensor import FakeTensorMode

import sparseflash
from sparseflash import select
from tests.op_cases import MASK, run, small


def function(q, k, v, **options):
    return sparseflash.attention(q, k, v, MASK, **options)


def loss(q, k, v, **options):
    return function(q, k, v, **options).square().sum()


@pytest.mark.parametrize("backend", ["reference", "cpu"])
@pytest.mark.parametrize("options", [{}, {"dropout_p": 0.3, "seed": 1}], ids=["", "dropout"])
def test_functional_gradients_are_those_of_autograd(options, backend):
    options = options | {"backend": backend}
    qkv = small()
    expected = torch.autograd.grad(loss(*qkv, **options), qkv)
    inputs = [t.detach() for t in qkv]
    grads = torch.func.grad(lambda *x: loss(*x, **options), (0, 1, 2))(*inputs)
    _, pullback = torch.func.vjp(lambda *x: loss(*x, **options), *inputs)
    rows = torch.func.jacrev(lambda q: loss(q, *inputs[1:], **options))(inputs[0])
    for results in (grads, pullback(torch.ones(())), [rows]):
        for a, e in zip(results, expected, strict=False):
            assert torch.equal(a, e)


def test_functional_gradient_of_the_lse():
    def lse_sum(q):
        return sparseflash.attention(q, *inputs[1:], MASK, return_lse=True)[1].sum()

    inputs = [t.detach() for t in small()]
    q = inputs[0].clone().requires_grad_()
    assert torch.equal(torch.func.grad(lse_sum)(inputs[0]), torch.autograd.grad(lse_sum(q), q)[0])


def test_functional_gradient_through_a_selection():
    inputs = [t.detach() for t in small()]
    picked = select.top_k(2, block_size=16)(*inputs[:2])

    def picked_loss(q, mask=picked):
        return sparseflash.attention(q, *inputs[1:], mask).square().sum()

    q = inputs[0].clone().requires_grad_()
    (expected,) = torch.autograd.grad(picked_loss(q, picked.to_block_mask()), q)
    torch.testing.assert_close(torch.func.grad(picked_loss)(inputs[0]), expected)


def test_second_functional_derivative_is_refused():
    inputs = [t.detach() for t in small()]

    def slope(q):
        return torch.func.grad(lambda q: loss(q, *inputs[1:]))(q).sum()

    with pytest.raises(RuntimeError, match="no second derivatives"):
        torch.func.grad(slope)(inputs[0])


def with_dual_numbers(q, k, v):
    with forward_ad.dual_level():
        return function(forward_ad.make_dual(q, q), k, v)


FORWARD_MODE = {
    "jvp": lambda q, k, v: torch.func.jvp(function, (q, k, v), (q, k, v)),
    "jvp of v": lambda q, k, v: torch.func.jvp(lambda v: function(q, k, v), (v,), (v,)),
    "jacfwd": lambda q, k, v: torch.func.jacfwd(lambda q: loss(q, k, v))(q),
    "hessian": lambda q, k, v: torch.func.hessian(lambda q: loss(q, k, v))(q),
    "dual numbers": with_dual_numbers,
    "dual numbers with gradients": lambda q, k, v: with_dual_numbers(q.requires_grad_(), k, v),
}


@pytest.mark.parametrize("call", FORWARD_MODE.values(), ids=FORWARD_MODE)
def test_forward_mode_is_refused(call):
    with pytest.raises(RuntimeError, match=r"no forward-mode derivatives.*use reverse mode"):
        call(*(t.detach() for t in small()))


def test_inputs_without_tangents_are_computed_inside_a_dual_level():
    qkv = small()
    expected = run(function, qkv)
    with forward_ad.dual_level():
        actual = run(function, qkv)
    for a, e in zip(actual, expected, strict=True):
        assert torch.equal(a, e)


@pytest.mark.parametrize("dim", [0, 2, -1])
@pytest.mark.parametrize("which", range(3), ids="qkv")
def test_vmap_is_a_loop(which, dim):
    inputs = [t.detach() for t in small()]
    inputs[which] = torch.stack([inputs[which], 2 * inputs[which]], dim)
    in_dims = tuple(dim if i == which else None for i in range(3))
    for call in (function, torch.func.grad(loss, which)):
        found = torch.func.vmap(call, in_dims)(*inputs)
        for i, one in enumerate(found):
            alone = [t.select(dim, i) if n == which else t for n, t in enumerate(inputs)]
            torch.testing.assert_close(one, call(*alone))


@pytest.mark.parametrize("given", [None, MASK, MASK.build(40)], ids=["None", "Mask", "BlockMask"])
def test_fake_tensors_give_the_shapes_and_strides_of_real_ones(given):
    real = [t.detach().transpose(1, 2).contiguous().transpose(1, 2) for t in small()]
    with FakeTensorMode() as mode:
        q, k, v = (mode.from_tensor(t).requires_grad_() for t in real)
        out, lse = sparseflash.attention(q, k, v, given, return_lse=True)
        out.sum().backward()
    expected = sparseflash.attention(*real, given, return_lse=True)
    for fake, true in zip((out, lse, q.grad, k.grad), (*expected, real[0], real[1]), strict=True):
        assert (fake.shape, fake.stride(), fake.dtype) == (true.shape, true.stride(), true.dtype)
