"""What the tests of `attention` under torch share: inputs, a call with gradients, equality."""

import torch

import masks
from sparseflash.testing import make_qkv, relative_error

# without a GPU the conftest puts the Triton kernels into the interpreter
BACKENDS = ("reference", "cpu") if torch.cuda.is_available() else ("reference", "cpu", "triton")
MASK = (masks.local(9) | masks.butterfly(16)) & masks.causal()


def small(length=40, **options):
    options = {"kv_heads": 1, "requires_grad": True} | options
    return make_qkv(2, 2, length, length, 8, **options)


def detached(tensors):
    return [t.detach().requires_grad_() for t in tensors]


def run(function, qkv, *rest):
    """Output and gradients, with a cotangent that is not constant."""
    qkv = detached(qkv)
    out = function(*qkv, *rest)
    weight = torch.linspace(-1, 2, out.numel(), dtype=out.dtype).view(out.shape)
    return out.detach(), *torch.autograd.grad((out * weight).sum(), qkv)


def assert_same(actual, expected, tolerance=1e-6):
    for name, a, e in zip(("out", "dq", "dk", "dv"), actual, expected, strict=True):
        assert a.dtype == e.dtype
        error = relative_error(a, e)
        assert error <= tolerance, f"{name}: {error:.3g}"
