"""The operators as torch sees them, and `attention` under autocast and autograd."""

from importlib import import_module

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import masks
import sparseflash
from sparseflash import ops
from sparseflash.testing import assert_close, make_qkv, oracle, relative_error
from tests.op_cases import BACKENDS, MASK, assert_same, detached, run, small

# ---- opcheck


WIDE_VALUES = "token major, another head dim of v"
LAYOUTS = {
    "contiguous": lambda t: t,
    "token major": lambda t: t.transpose(1, 2).contiguous().transpose(1, 2),
    WIDE_VALUES: lambda t: t.transpose(1, 2).contiguous().transpose(1, 2),
    "cut from a wider tensor": lambda t: torch.cat([t, t], -1)[..., : t.shape[-1]],
    "every second token": lambda t: t.repeat_interleave(2, dim=2)[:, :, ::2],
    "one key head for all": lambda t: t[:, :1].expand(t.shape),
}


def operator_arguments(backend, mask, dropout_p, layout="contiguous", dtype=torch.float32):
    qkv = small(requires_grad=False, dtype=dtype, v_head_dim=12 if layout == WIDE_VALUES else None)
    qkv = [LAYOUTS[layout](t) for t in qkv]
    seed = torch.tensor([3]) if dropout_p else None
    return (*qkv, "" if mask is None else mask.key, [], [], seed, None, dropout_p, False, backend)


CALLS = [
    (None, 0.0, "contiguous"),
    (MASK, 0.0, "contiguous"),
    (None, 0.3, "contiguous"),
    (MASK, 0.3, "token major"),
    (MASK, 0.0, "cut from a wider tensor"),
    (MASK, 0.0, "every second token"),
    (MASK, 0.0, "one key head for all"),
    (MASK, 0.3, WIDE_VALUES),
]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("mask, dropout_p, layout", CALLS)
def test_opcheck_accepts_forward(mask, dropout_p, layout, backend):
    arguments = operator_arguments(backend, mask, dropout_p, layout)
    arguments = (*detached(arguments[:3]), *arguments[3:], True)
    torch.library.opcheck(torch.ops.sparseflash.forward.default, arguments)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("lse_gradient", [False, True])
@pytest.mark.parametrize("mask, dropout_p, layout", CALLS)
def test_opcheck_accepts_backward(mask, dropout_p, layout, lse_gradient, backend):
    arguments = operator_arguments(backend, mask, dropout_p, layout)
    out, lse = torch.ops.sparseflash.forward(*arguments, True)
    dout, dlse = torch.ones_like(out), torch.ones_like(lse) if lse_gradient else None
    torch.library.opcheck(
        torch.ops.sparseflash.backward.default,
        (dout, dlse, *arguments[:3], out, lse, *arguments[3:]),
    )


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("backend", ["reference", "cpu"])
def test_fake_results_have_the_dtypes_and_strides_of_real_ones(backend, dtype):
    arguments = operator_arguments(backend, MASK, 0.0, "token major", dtype)
    torch.library.opcheck(
        torch.ops.sparseflash.forward.default, (*arguments, False), test_utils="test_faketensor"
    )


# ---- autocast


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("backend", ["reference", "cpu"])
def test_autocast_computes_in_the_low_precision(backend, dtype):
    qkv = small()
    with torch.autocast("cpu", dtype):
        out, lse = sparseflash.attention(*qkv, MASK, backend=backend, return_lse=True)
    direct = sparseflash.attention(*(t.to(dtype) for t in qkv), MASK, backend=backend)
    assert out.dtype == dtype and lse.dtype == torch.float32
    assert torch.equal(out, direct)
    dense = torch.from_numpy(MASK.build(40).to_dense())
    assert relative_error(out, oracle(*qkv, dense)[0]) < 2 * torch.finfo(dtype).eps
    out.float().square().sum().backward()
    assert all(t.grad.dtype == torch.float32 for t in qkv)


def test_backends_agree_under_autocast():
    results = []
    for backend in ("reference", "cpu"):
        with torch.autocast("cpu", torch.bfloat16):
            results.append(
                run(lambda *a, b=backend: sparseflash.attention(*a, MASK, backend=b), small())
            )
    assert_same(*results, tolerance=torch.finfo(torch.bfloat16).eps)


def test_autocast_takes_inputs_of_several_dtypes():
    q, k, v = small()
    with torch.autocast("cpu", torch.bfloat16):
        mixed = sparseflash.attention(q.bfloat16(), k, v)
        assert torch.equal(mixed, sparseflash.attention(q, k, v))


def test_autocast_leaves_float64_alone():
    with torch.autocast("cpu", torch.bfloat16):
        assert sparseflash.attention(*small(dtype=torch.float64)).dtype == torch.float64


# ---- autograd


@pytest.mark.parametrize("backend", ["reference", "cpu"])
@pytest.mark.parametrize(
    "mask, dropout_p, return_lse",
    [
        (None, 0.0, True),
        (masks.causal(), 0.0, True),
        (masks.causal(), 0.3, True),
        (masks.local(1) & ~masks.global_tokens(2), 0.0, False),  # has empty rows
    ],
)
def test_gradients_are_those_of_finite_differences(mask, dropout_p, return_lse, backend):
    qkv = make_qkv(1, 2, 5, 5, 3, kv_heads=1, dtype=torch.float64, requires_grad=True)

    def function(q, k, v):
        options = {"dropout_p": dropout_p, "seed": 1, "return_lse": return_lse}
        return sparseflash.attention(q, k, v, mask, backend=backend, scale=0.7, **options)

    assert torch.autograd.gradcheck(function, qkv)


@pytest.mark.parametrize("backend", BACKENDS)
def test_last_stride_other_than_one_gives_the_same(backend):
    def function(q, k, v):
        return sparseflash.attention(q, k, v, MASK, backend=backend)

    expected = run(function, small())
    strided = [t.detach().mT.contiguous().mT for t in small()]
    assert all(t.stride(-1) != 1 for t in strided)
    assert_same(run(function, strided), expected, 0.0)
    expanded = [t.detach()[..., :1].expand(t.shape) for t in small()]
    assert all(t.stride(-1) == 0 for t in expanded)
    assert_same(run(function, expanded), run(function, [t.contiguous() for t in expanded]), 0.0)


@pytest.mark.parametrize("backend", BACKENDS)
def test_gradient_of_a_sum_takes_an_expanded_cotangent(backend):
    strided, plain = small(), small()
    for qkv, expand in ((strided, True), (plain, False)):
        out, lse = sparseflash.attention(*qkv, MASK, backend=backend, return_lse=True)
        if expand:
            (out.sum() + lse.sum()).backward()
        else:
            torch.autograd.backward((out, lse), (torch.ones_like(out), torch.ones_like(lse)))
    for a, e in zip(strided, plain, strict=True):
        assert e.grad.abs().max() > 0
        assert torch.equal(a.grad, e.grad)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("which", range(3), ids="qkv")
def test_one_input_may_require_a_gradient(which, backend):
    qkv = [t.detach().requires_grad_(i == which) for i, t in enumerate(small())]
    sparseflash.attention(*qkv, MASK, backend=backend).square().sum().backward()
    everything = small()
    sparseflash.attention(*everything, MASK, backend=backend).square().sum().backward()
    for i, (a, e) in enumerate(zip(qkv, everything, strict=True)):
        assert torch.equal(a.grad, e.grad) if i == which else a.grad is None


def test_no_input_needs_a_gradient():
    out, lse = sparseflash.attention(*small(requires_grad=False), MASK, return_lse=True)
    assert not out.requires_grad and not lse.requires_grad


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("weight_of_out", [0, 1])
def test_lse_has_a_gradient(weight_of_out, backend):
    qkv, wide = small(), small(dtype=torch.float64)
    dense = torch.from_numpy(MASK.build(40).to_dense())

    def gradients(out, lse, inputs):
        loss = (lse * torch.linspace(-1, 2, 40, dtype=lse.dtype)).sum()
        loss = loss + weight_of_out * out.square().sum() if weight_of_out else loss
        return torch.autograd.grad(loss, inputs, allow_unused=True)

    actual = sparseflash.attention(*qkv, MASK, backend=backend, return_lse=True)
    expected = oracle(*wide, dense)
    assert_close(actual[1], expected[1], name="lse")
    for name, a, e in zip(
        ("dq", "dk", "dv"), gradients(*actual, qkv), gradients(*expected, wide), strict=True
    ):
        assert_close(a, torch.zeros_like(a) if e is None else e, name=name)


def test_second_derivatives_are_refused():
    qkv = small()
    (dq,) = torch.autograd.grad(
        sparseflash.attention(*qkv).square().sum(), qkv[:1], create_graph=True
    )
    with pytest.raises(RuntimeError, match="sparseflash"):
        dq.sum().backward()


# ---- the eager path and the operators


@pytest.mark.parametrize("lse_gradient", [False, True])
@pytest.mark.parametrize("mask, dropout_p", [(None, 0.0), (MASK, 0.3)])
def test_operator_and_eager_path_are_the_same_bits(mask, dropout_p, lse_gradient, monkeypatch):
    def results():
        q, k, v = small()
        out, lse = sparseflash.attention(
            q, k, v, mask, dropout_p=dropout_p, seed=3, return_lse=True
        )
        loss = out.square().sum() + (lse.sum() if lse_gradient else 0)
        return out, lse, *torch.autograd.grad(loss, (q, k, v))

    eager = results()
    for module in (ops, import_module("sparseflash.attention")):
        monkeypatch.setattr(module, "plain", lambda *tensors: False)
    for a, b in zip(eager, results(), strict=True):
        assert torch.equal(a, b)


def test_dispatch_mode_sees_the_operators():
    seen = []

    class Recorder(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            seen.append(str(function))
            return function(*args, **(kwargs or {}))

    with Recorder():
        sparseflash.attention(*small(), MASK).sum().backward()
    assert {"sparseflash.forward.default", "sparseflash.backward.default"} <= set(seen)


def test_tensor_subclass_meets_the_operator():
    class Wrapped(torch.Tensor):
        pass

    q, k, v = small(requires_grad=False)
    out = sparseflash.attention(q.as_subclass(Wrapped), k, v, MASK)
    assert type(out) is Wrapped
    assert torch.equal(out.as_subclass(torch.Tensor), sparseflash.attention(q, k, v, MASK))


def test_checkpointed_attention_has_the_same_gradients():
    def function(q, k, v):
        return sparseflash.attention(q, k, v, MASK)

    def checkpointed(q, k, v):
        return torch.utils.checkpoint.checkpoint(function, q, k, v, use_reentrant=False)

    assert_same(run(checkpointed, small()), run(function, small()), 0.0)
