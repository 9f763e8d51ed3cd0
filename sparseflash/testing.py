"""Inputs, the float64 oracle and the tolerance rule, shared by the tests and the benchmarks."""

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from sparseflash.dropout import keep_scale

TOLERANCE = {torch.float32: 1e-5, torch.float64: 1e-12}


def make_qkv(
    batch: int,
    heads: int,
    n_q: int,
    n_k: int,
    head_dim: int,
    *,
    kv_heads: int | None = None,
    v_head_dim: int | None = None,
    seed: int = 0,
    requires_grad: bool = False,
    **to: Any,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return standard normal q (batch, heads, n_q, head_dim) and k, v (batch, kv_heads, n_k,
    head_dim).

    kv_heads, v_head_dim: those of q and k where None. to: `dtype` (float32 by default), `device`.
    Drawn on the CPU in float64, so that the values are the same on every device and, up to
    rounding, in every dtype.
    """
    to.setdefault("dtype", torch.float32)
    generator = torch.Generator("cpu").manual_seed(seed)
    kv_heads = heads if kv_heads is None else kv_heads

    def draw(heads: int, length: int, head_dim: int = head_dim) -> Tensor:
        shape = (batch, heads, length, head_dim)
        x = torch.randn(shape, generator=generator, dtype=torch.float64, device="cpu")
        return x.to(**to).requires_grad_(requires_grad)

    return draw(heads, n_q), draw(kv_heads, n_k), draw(kv_heads, n_k, v_head_dim or head_dim)


def oracle(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dense_mask: Tensor | None = None,
    scale: float | None = None,
    keep: Tensor | None = None,
    dropout_p: float = 0.0,
    sink: Tensor | None = None,
    score: Callable[[Tensor], Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    """Attention in float64 by plain torch operations, differentiable by autograd.

    dense_mask: bool, broadcastable to (B, Hq, N_q, N_k), True where a query may attend to a key.
    keep: bool of that shape, the probabilities that dropout leaves, scaled up for dropout_p.
    sink: as in `attention`. score: a function of all scores (B, Hq, N_q, N_k), before the mask.
    Returns out (B, Hq, N_q, D_v) and the natural-log lse (B, Hq, N_q) of the softmax before
    dropout.
    A query with nothing to attend to has out 0, lse -inf and gradients 0.
    """
    scores = logits(q, k, dense_mask, scale, score)
    v = v.double().repeat_interleave(q.shape[1] // k.shape[1], dim=1)
    if sink is not None:  # one more key, whose value is 0
        column = sink.double()[:, None, None].expand(*scores.shape[:3], 1)
        scores, v = torch.cat([scores, column], -1), F.pad(v, (0, 0, 0, 1))
        keep = None if keep is None else F.pad(keep, (0, 1), value=True)
    attends = (scores != -math.inf).any(-1, keepdim=True)
    # An empty row is given finite scores first: -inf minus -inf would be NaN, also in backward.
    finite_lse = scores.masked_fill(~attends, 0.0).logsumexp(-1, keepdim=True)
    p = (scores - finite_lse).exp()
    lse = finite_lse.masked_fill(~attends, -math.inf).squeeze(-1)
    if keep is not None:
        p = p * keep * keep_scale(dropout_p)
    return p @ v, lse


def logits(
    q: Tensor,
    k: Tensor,
    dense_mask: Tensor | None = None,
    scale: float | None = None,
    score: Callable[[Tensor], Tensor] | None = None,
) -> Tensor:
    """Return the logits (B, Hq, N_q, N_k) of `oracle` without a sink, -inf where masked."""
    q, k = q.double(), k.double().repeat_interleave(q.shape[1] // k.shape[1], dim=1)
    scores = q @ k.transpose(-1, -2) * (q.shape[-1] ** -0.5 if scale is None else scale)
    scores = scores if score is None else score(scores)
    return scores if dense_mask is None else scores.masked_fill(~dense_mask, -math.inf)


def relative_error(actual: Tensor, expected: Tensor) -> float:
    """|actual - expected| / |expected| in the Frobenius norm; NaN, or unlike infinities, give inf.

    Entries where both are the same infinity (the lse of an empty row) count as equal. Where
    nothing but zeros is expected, the error is the root mean square of `actual`.
    """
    actual, expected = actual.detach().double(), expected.detach().double()
    if actual.shape != expected.shape:
        raise ValueError(f"shapes {tuple(actual.shape)} and {tuple(expected.shape)} differ")
    same_infinity = expected.isinf() & (actual == expected)
    actual, expected = (x.masked_fill(same_infinity, 0.0) for x in (actual, expected))
    norm = expected.norm().item() or math.sqrt(max(expected.numel(), 1))
    error = (actual - expected).norm().item() / norm
    return error if math.isfinite(error) else math.inf


def assert_close(
    actual: Tensor, oracle64: Tensor, same_precision: Tensor | None = None, *, name: str
) -> None:
    """Assert that `actual` is as near to the float64 oracle as its dtype can ask for.

    float32 and float64: relative error below 1e-5 and 1e-12. bfloat16 and float16: no more than
    the error of `same_precision`, the same computation by plain torch operations in that dtype,
    give or take four roundings of the error itself.
    """
    error = relative_error(actual, oracle64)
    if actual.dtype in TOLERANCE:
        limit = TOLERANCE[actual.dtype]
    elif same_precision is None:
        raise ValueError(f"{name}: {actual.dtype} is judged against same_precision; pass it")
    else:
        rounding = 4 * torch.finfo(actual.dtype).eps
        limit = relative_error(same_precision, oracle64) * (1 + rounding)
    assert error <= limit, f"{name}: relative error {error:.3g} above {limit:.3g}"
