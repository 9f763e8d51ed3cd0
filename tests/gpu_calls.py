"""What the tests of the whole on a GPU share: inputs, a call with gradients, equality."""

import pytest
import torch

import masks
from sparseflash.testing import make_qkv, relative_error

MASK = (masks.local(100) | masks.butterfly(64)) & masks.causal()
MIB = 2**20
LOW = [torch.bfloat16, torch.float16]
SAME_BITS = {"deterministic": True}  # what a comparison of gradients bit by bit needs


def need_memory(n_bytes):
    free, _ = torch.cuda.mem_get_info()
    if free < n_bytes:
        pytest.skip(f"needs {n_bytes / 2**30:.0f} GiB of free GPU memory, {free / 2**30:.0f} are")


def inputs(length=512, dtype=torch.bfloat16, head_dim=64, **options):
    options = {"kv_heads": 2, "requires_grad": True} | options
    return make_qkv(2, 4, length, length, head_dim, dtype=dtype, device="cuda", **options)


def run(function, qkv, *rest, **options):
    """Output and gradients, with a cotangent that is not constant."""
    qkv = [t.detach().requires_grad_() for t in qkv]
    out = function(*qkv, *rest, **options)
    weight = torch.linspace(-1, 2, out.numel(), device=out.device).view(out.shape).to(out.dtype)
    return out.detach(), *torch.autograd.grad(out, qkv, weight)


def assert_equal(actual, expected):
    for name, a, e in zip(("out", "dq", "dk", "dv"), actual, expected, strict=True):
        assert torch.equal(a, e), f"{name} differs by {relative_error(a, e):.3g}"
