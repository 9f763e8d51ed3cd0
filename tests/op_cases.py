"""What the tests of `attention` under torch share: inputs, a call with gradients, equality."""

from contextlib import AbstractContextManager
from unittest import mock

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import masks
from sparseflash.backends import cpu
from sparseflash.cache import cache
from sparseflash.plan import Plan
from sparseflash.testing import make_qkv, oracle, relative_error

# without a GPU the conftest puts the Triton kernels into the interpreter
BACKENDS = ("reference", "cpu") if torch.cuda.is_available() else ("reference", "cpu", "triton")
INTERPRETED = pytest.mark.skipif(
    torch.cuda.is_available(), reason="with a GPU, tests/gpu runs the kernels on it"
)
MASK = (masks.local(9) | masks.butterfly(16)) & masks.causal()
FORMS = {"None": None, "Mask": MASK, "BlockMask": MASK.build(40)}


def small(length=40, head_dim=8, **options):
    options = {"kv_heads": 1, "requires_grad": True} | options
    return make_qkv(2, 2, length, length, head_dim, **options)


def detached(tensors):
    return [t.detach().requires_grad_() for t in tensors]


def token_major(t: Tensor) -> Tensor:
    """The same with (batch, length, heads, head dim) in memory."""
    return t.detach().transpose(1, 2).contiguous().transpose(1, 2).requires_grad_(t.requires_grad)


def exact(q, k, v, mask=MASK, **options) -> tuple[Tensor, Tensor]:
    """out and lse by float64 formulas, which know no calls."""
    n_q, n_k = q.shape[2], k.shape[2]
    dense = None if mask is None else torch.from_numpy(mask.build(n_q, n_k).to_dense())
    return oracle(q, k, v, dense, **options)


def run(function, qkv, *rest, **options):
    """Output and gradients, with a cotangent that is not constant."""
    qkv = detached(qkv)
    out = function(*qkv, *rest, **options)
    weight = torch.linspace(-1, 2, out.numel(), device=out.device).view(out.shape).to(out.dtype)
    return out.detach(), *torch.autograd.grad(out, qkv, weight)


def assert_same(actual, expected, tolerance=1e-6):
    for name, a, e in zip(("out", "dq", "dk", "dv"), actual, expected, strict=True):
        assert a.dtype == e.dtype
        error = relative_error(a, e)
        assert error <= tolerance, f"{name}: {error:.3g}"


def plans() -> list[Plan]:
    """Those in the cache."""
    return [entry.value for entry in cache._entries.values() if isinstance(entry.value, Plan)]


def without_backward() -> AbstractContextManager[object]:
    """The cpu backend refuses backwards."""
    return mock.patch.object(
        cpu, "unsupported", lambda _, direction: "no backward" if direction == "backward" else None
    )


class NoSync(TorchDispatchMode):
    """Fails on the operators that make the host wait for the device."""

    waiting = ("_local_scalar_dense", "nonzero", "masked_select", "is_nonzero", "equal", "unique")

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        assert name not in self.waiting, f"{name} waits for the device"
        if name in ("index", "index_put", "index_put_"):
            assert all(i is None or i.dtype != torch.bool for i in args[1]), "boolean index"
        if name == "repeat_interleave":
            assert (kwargs and kwargs.get("output_size") is not None) or len(args) > 1
        return func(*args, **(kwargs or {}))
