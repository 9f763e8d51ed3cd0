"""A short test of attention on this machine: every backend that can run, against float64."""

import time
from collections.abc import Iterator
from typing import NamedTuple

import torch

import masks
from sparseflash.attention import attention
from sparseflash.backends.protocol import DIRECTIONS
from sparseflash.backends.registry import reasons
from sparseflash.problem import describe
from sparseflash.testing import make_qkv, oracle, relative_error

LIMIT = {torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 1e-2}  # of a relative error


class Result(NamedTuple):
    """How one backend did on one case, forward and backward."""

    case: str
    backend: str
    dtype: torch.dtype
    error: float  # the largest relative error of out, dq, dk and dv
    seconds: float  # with compiling
    failure: str  # why there is no error, or ""

    @property
    def ok(self) -> bool:
        return not self.failure and self.error < LIMIT[self.dtype]


class Case(NamedTuple):
    name: str
    mask: masks.Mask | None
    tokens: int
    head_dim: int
    kv_heads: int


# Odd lengths, partial blocks, shared heads, and queries with nothing to attend to.
CASES = (
    Case("dense", None, 256, 64, 2),
    Case("causal window", masks.local(100) & masks.causal(), 333, 128, 1),
    Case("butterfly, empty rows", masks.butterfly(32) - masks.global_tokens(40), 500, 64, 2),
)


def self_test(device: torch.device) -> Iterator[Result]:
    """Run every case on every backend of a device; a backend that cannot run is left out."""
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    for case in CASES:
        q, k, v = make_qkv(
            1, 2, case.tokens, case.tokens, case.head_dim,
            kv_heads=case.kv_heads, dtype=dtype, device=device, requires_grad=True,
        )  # fmt: skip
        allowed, key = None, None
        if case.mask is not None:
            allowed = torch.from_numpy(case.mask.build(case.tokens).to_dense()).to(device)
            key = case.mask.key
        expected, _ = oracle(q, k, v, allowed)
        dout = torch.randn(expected.shape, generator=torch.Generator().manual_seed(1)).to(device)
        wanted = expected, *torch.autograd.grad(expected, (q, k, v), dout.double())
        problem = describe(q, k, v, key, (None, 0.0, False, "auto"), True)
        refused = [reasons(problem, direction) for direction in DIRECTIONS]
        for backend in refused[0]:
            if any(why_not[backend] for why_not in refused):
                continue
            start = time.perf_counter()
            try:
                out = attention(q, k, v, case.mask, backend=backend)
                got = out, *torch.autograd.grad(out, (q, k, v), dout.to(dtype))
                error = max(relative_error(a, b) for a, b in zip(got, wanted, strict=True))
                failure = ""
            except Exception as raised:  # whatever a compiler or a driver says goes into the report
                error, failure = float("inf"), f"{type(raised).__name__}: {raised}"
            seconds = time.perf_counter() - start
            yield Result(case.name, backend, dtype, error, seconds, failure)
