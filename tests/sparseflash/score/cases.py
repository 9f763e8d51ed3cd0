"""Score functions, written so that tensors run through them as well as symbols, and an oracle."""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from sparseflash.dropout import keep_mask, keep_scale

W = 4  # of a window of 2-D positions


class Case(NamedTuple):
    fn: Callable[..., Any]
    shapes: Callable[[int, int, int, int], dict[str, tuple[int, ...]]]  # of B, H, N_q, N_k
    reach: tuple[str, ...] = ()  # of the reads


def _none(b, h, n_q, n_k):
    return {}


def _both(s, b, h, q, k, t, slopes, bias):
    near = bias[h, q // W - k // W + 160, q % W - k % W + W - 1]
    return 5 * torch.tanh(s * torch.exp(t[b]) / 5) + near - slopes[h] * torch.sqrt(abs(q - k) + 1.0)


def _gated(s, h, q, k, gate, floor):
    return torch.where(q >= k, torch.maximum(s * gate[q], floor[h] - s), torch.minimum(s, floor[h]))


CASES = {
    "softcap": Case(lambda s: 5 * torch.tanh(s / 5), _none),
    "clipped": Case(lambda s: s.clip(-1.0, 1.0), _none),
    "alibi": Case(
        lambda s, h, q, k, slopes: s - slopes[h] * abs(k - q), lambda b, h, n, m: {"slopes": (h,)},
        ("bh",),
    ),
    "relative": Case(
        lambda s, h, q, k, bias: s + bias[h, k - q + 700], lambda b, h, n, m: {"bias": (h, 1400)},
        ("d",),
    ),
    "buckets": Case(
        lambda s, h, q, k, place, bias: s + bias[place[k - q + 700], h],
        lambda b, h, n, m: {"place": (1400,), "bias": (7, h)}, ("d",),
    ),
    "swin": Case(
        lambda s, h, q, k, bias: s + bias[h, q // W - k // W + 160, q % W - k % W + W - 1],
        lambda b, h, n, m: {"bias": (h, 321, 2 * W - 1)}, ("qk",),
    ),
    "pair": Case(
        lambda s, b, h, q, k, bias: s + bias[b, h, q, k],
        lambda b, h, n, m: {"bias": (b, h, n, m)}, ("qk",),
    ),
    "shared pair": Case(
        lambda s, q, k, bias: s + bias[q, k], lambda b, h, n, m: {"bias": (n, m)}, ("qk",)
    ),
    "temperature": Case(
        lambda s, b, h, t: s * torch.exp(t[b, h]), lambda b, h, n, m: {"t": (b, h)}, ("bh",)
    ),
    "number": Case(lambda s, t: s / (1 + t * t), lambda b, h, n, m: {"t": ()}, ("bh",)),
    "key bias": Case(
        lambda s, b, k, bias: s + bias[b, k], lambda b, h, n, m: {"bias": (b, m)}, ("k",)
    ),
    "query gate": Case(
        lambda s, h, q, gate: s * torch.sigmoid(gate[h, q]), lambda b, h, n, m: {"gate": (h, n)},
        ("q",),
    ),
    "all": Case(
        _both, lambda b, h, n, m: {"t": (b,), "slopes": (h,), "bias": (h, 321, 7)},
        ("bh", "bh", "qk"),
    ),
    "branches": Case(
        _gated, lambda b, h, n, m: {"gate": (n,), "floor": (h,)}, ("q", "bh")
    ),
}  # fmt: skip


def tables_of(case: Case, sizes: tuple[int, int, int, int], dtype=torch.float64, seed: int = 0):
    """Random tables by name; those that index others are integers."""
    generator = torch.Generator().manual_seed(seed)
    made = {}
    for name, shape in case.shapes(*sizes).items():
        if name == "place":
            made[name] = torch.randint(7, shape, generator=generator)
        else:
            t = torch.randn(shape, generator=generator, dtype=torch.float64) / 2
            made[name] = t.to(dtype).requires_grad_()
    return made


def numbers(shape: tuple[int, ...], wanted: tuple[str, ...]) -> dict[str, Tensor]:
    """b, h, q and k of scores of this shape."""
    axes = {name: torch.arange(n).view(-1, *[1] * (3 - i)) for i, (name, n) in
            enumerate(zip("bhqk", shape, strict=True))}  # fmt: skip
    return {name: axes[name] for name in wanted if name in axes}


def oracle(
    q: Tensor, k: Tensor, v: Tensor, allowed: Tensor | None, fn: Callable[..., Any],
    names: tuple[str, ...], tables: dict[str, Tensor], sink: Tensor | None = None,
    dropout_p: float = 0.0, seed: int = 0,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Return out, LSE and maxima in float64 by autograd, on all scores at once."""
    group = q.shape[1] // k.shape[1]
    q, k, v = q.double(), *(t.double().repeat_interleave(group, 1) for t in (k, v))
    s = q @ k.mT * q.shape[-1] ** -0.5
    tables = {name: t.double() if t.is_floating_point() else t for name, t in tables.items()}
    torch.set_default_dtype(torch.float64)  # of integers beside reals
    try:
        x = fn(s=s, **numbers(s.shape, names), **tables)
    finally:
        torch.set_default_dtype(torch.float32)
    if allowed is not None:
        x = x.masked_fill(~allowed, -math.inf)
    largest = x.amax(-1)
    if sink is not None:
        x = torch.cat([x, sink.double()[:, None, None].expand(*x.shape[:3], 1)], -1)
        v = torch.nn.functional.pad(v, (0, 0, 0, 1))
    empty = (x == -math.inf).all(-1, keepdim=True)
    lse = x.masked_fill(empty, 0.0).logsumexp(-1, keepdim=True)
    p = (x - lse).exp()
    if dropout_p:
        keep = keep_mask(torch.tensor([seed]), *s.shape, dropout_p)
        if sink is not None:
            keep = torch.nn.functional.pad(keep, (0, 1), value=True)
        p = p * keep * keep_scale(dropout_p)
    return p @ v, lse.masked_fill(empty, -math.inf).squeeze(-1), largest
