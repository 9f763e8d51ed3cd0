"""Sorting tokens into clusters and back, for the attentions that hash: batched, no host sync."""

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor


class Order(NamedTuple):
    """The tokens of every head, sorted in every round of hashing."""

    token: Tensor  # int64 (B, H, R, N)  the token at each place
    place: Tensor  # int64 (B, H, R, N)  the place of each token; the inverse


def sort_tokens(key: Tensor) -> Order:
    """Sort the tokens of (B, H, R, N) by key; equal ones stay in order."""
    token = key.sort(dim=-1, stable=True).indices
    places = torch.arange(token.shape[-1], device=token.device).expand_as(token)
    return Order(token, token.scatter(-1, token, places))


def take(x: Tensor, index: Tensor, sources: Tensor) -> Tensor:
    """Rows index (B, H, M) of x (B, H, N, D): (B, H, M, D), with a gradient that scatters nothing.

    sources: (B, H, L, N), the L rows of the result in which each row of x is. Their gradients are
    gathered and summed, which is faster than atomic additions and always the same bits.
    """
    return _Take.apply(x, index, sources)  # type: ignore[return-value]


class _Take(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, index: Tensor, sources: Tensor) -> Tensor:
        ctx.save_for_backward(sources)
        return _rows(x, index)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[override]
        (sources,) = ctx.saved_tensors
        grads = _rows(grad, sources.flatten(2)).unflatten(2, sources.shape[2:])
        return grads.sum(2) if sources.shape[2] > 1 else grads.squeeze(2), None, None


def _rows(x: Tensor, index: Tensor) -> Tensor:
    """x[b, h, index[b, h]] by whole rows."""
    batch, heads, n, dim = x.shape
    first = torch.arange(batch * heads, device=x.device).view(batch, heads, 1) * n
    rows = x.reshape(-1, dim).index_select(0, (index + first).flatten())
    return rows.view(batch, heads, index.shape[2], dim)


def by_round(places: Tensor) -> Tensor:
    """Places (B, H, R, N) within a round as places among all rounds."""
    rounds, n = places.shape[2:]
    return places + n * torch.arange(rounds, device=places.device)[:, None]


def softmax_of_rounds(scores: Tensor, v: Tensor, order: Order, dropout_p: float) -> Tensor:
    """(B, H, N, D): softmax(scores) v of each round, weighted by the sums of exp(scores).

    scores: (B, H, R * clusters, queries, keys), queries in sorted order; v: (.., keys, D).
    """
    scores = scores.to(torch.promote_types(scores.dtype, torch.float32))
    lse = scores.logsumexp(-1, keepdim=True)
    p = (scores - lse).exp().to(v.dtype)
    out = (F.dropout(p, dropout_p) @ v).flatten(2, 3)
    places, tokens = by_round(order.place), by_round(order.token)
    rounds = places.shape[2:]
    places, tokens = places.flatten(2), tokens.flatten(2).unsqueeze(2)
    out = take(out, places, tokens).unflatten(2, rounds)
    lse = take(lse.flatten(2, 3), places, tokens).unflatten(2, rounds)
    return (out * lse.softmax(2)).sum(2).to(v.dtype)
