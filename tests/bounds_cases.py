"""Calls whose inputs lie amid NaN, which no kernel may read: random extents and block sizes."""

import random
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

import sparseflash
from sparseflash import select
from tests.attention_cases import HEAD_DIMS, build, draw, random_case
from tests.decode_cases import random_step
from tests.poison import surrounded

EXTENTS = 1, 17, 32, 48, 64, 96, 100


def attention(seed: int, backend: str, device: str, dtypes: tuple[torch.dtype, ...]) -> None:
    """Output, LSE and gradients of a random mask."""
    dims = HEAD_DIMS if backend == "triton" else tuple(d for d in HEAD_DIMS if d % 8 == 0)
    case = replace(random_case(seed, EXTENTS, dims, dtypes), dropout_p=0.0)
    qkv, dout, _ = draw(case, device)
    blocks, _ = build(case, device)
    _check(qkv, dout, blocks, backend)


def picks(seed: int, device: str, dtypes: tuple[torch.dtype, ...]) -> None:
    """Likewise, of picks of blocks that the end of the keys may cut."""
    rng, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    block, dtype = rng.choice([16, 48, 64, 128, 256]), rng.choice(dtypes)
    n_q, n_k = rng.choice([5, 20]), rng.choice([48, 64, 128, 256, 300, 320])
    dim = rng.choice([16, 24])  # descriptors copy those of 16
    shapes = (1, 4, n_q, dim), (1, 2, n_k, dim), (1, 2, n_k, dim), (1, 4, n_q, dim)
    q, k, v, dout = (torch.randn(s, generator=generator).to(device, dtype) for s in shapes)
    count = -(-n_k // block)
    lists = torch.rand(1, 2, n_q, count, generator=generator).argsort(-1)[..., : rng.choice([1, 3])]
    chosen = select.Picks.of(lists.to(device), block, n_k, causal=rng.random() < 0.5)
    _check((q, k, v), dout, chosen, "triton")


def _check(qkv: tuple[Tensor, ...], dout: Tensor, mask: Any, backend: str) -> None:
    def run(*tensors: Tensor) -> tuple[Tensor, ...]:
        q, k, v = (t.detach().requires_grad_() for t in tensors[:3])
        options = {"return_lse": True, "backend": backend, "deterministic": True}
        out, lse = sparseflash.attention(q, k, v, mask, **options)
        return out, lse, *torch.autograd.grad(out, (q, k, v), tensors[3])

    agree(run(*map(surrounded, (*qkv, dout))), run(*qkv, dout))


def decode(seed: int, device: str, dtype: torch.dtype) -> None:
    """Output and LSE of a random step; the cache has no tokens, heads or pages beside its own."""
    step = random_step(seed, device=device, dtype=dtype)
    (q, k, v), options = step.arguments()
    given = {"return_lse": True, "backend": "triton"} | options
    inside = (q, surrounded(k), surrounded(v))
    agree(*(sparseflash.decode(*t, step.mask, **given) for t in (inside, (q, k, v))))


def agree(found: tuple[Tensor, ...], wanted: tuple[Tensor, ...]) -> None:
    """Assert equality, as far as another way to copy tiles leaves it."""
    for a, b in zip(found, wanted, strict=True):
        torch.testing.assert_close(a, b, rtol=2e-3, atol=2e-3)
