"""The attentions that hash: Reformer (Kitaev et al., arXiv 2001.04451), within the buckets of a
hash, and SMYRF (Daras et al., arXiv 2010.05315), balanced clusters from asymmetric hashing.

Tokens are sorted into clusters and back, batched, without a host sync.
"""

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from experiments.lra.models.attention.base import Attention, budget, register
from sparseflash.dynamic.lengths import real_tokens


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


ITSELF = -5e4  # the score of a token with itself: it counts only where there is no other


@register("reformer", label="Reformer", style=("#7F7F7F", "<", ":"))
class Reformer(Attention):
    """LSH attention with q = k. Each round sorts the tokens by a random hash and cuts them into
    chunks; a chunk attends to itself and to the one before.

    Keys have unit length, buckets may mix within a chunk, and pairs of tokens that meet in several
    rounds count in each: reformer-pytorch's defaults. Padding is sorted last. Every call draws new
    hashes, in evaluation too.

    bucket: tokens of a chunk; None: a 32nd of the length, at most 128.
    hashes: rounds.
    scale: of q k / |k| in the softmax; None: 1 / sqrt(D), as in reformer-pytorch and the
        FlashAttention authors' code. 1 in trax, transformers and the Nystromformer port.
    """

    shared_qk = True
    rotations: Tensor

    def __init__(
        self, *, bucket: int | None = None, hashes: int = 2, scale: float | None = None, **sizes
    ):
        super().__init__(**sizes)
        self.scale = self.head_dim**-0.5 if scale is None else scale
        self.bucket = bucket or budget(self.length, share=32, most=128)
        self.hashes = hashes
        self.halves = max(round(self.length / self.bucket / 2), 1)  # of the hash's values
        self.register_buffer("rotations", torch.randn(self.head_dim, hashes * self.halves))

    def attend(self, q: Tensor, k: Tensor, v: Tensor, lengths: Tensor | None) -> Tensor:
        n = q.shape[2]
        fill = -n % self.bucket
        if fill:
            q, v = (F.pad(t, (0, 0, 0, fill)) for t in (q, v))
            lengths = q.new_full((len(q),), n, dtype=torch.int32) if lengths is None else lengths
        hashed = self._hash(q.detach())
        if lengths is not None:
            places = torch.arange(n + fill, device=q.device)
            padding = places >= lengths[:, None, None, None]
            hashed = hashed.masked_fill(padding, 2 * self.halves)
        order = sort_tokens(hashed)
        chunks = self.hashes * (n + fill) // self.bucket
        token = order.token.flatten(2)
        place = by_round(order.place)
        wide_token, wide_place = self._with_previous(token, place)
        queries = take(q, token, place).unflatten(2, (chunks, -1))
        keys = take(F.normalize(q, dim=-1), wide_token, wide_place).unflatten(2, (chunks, -1))
        values = take(v, wide_token, wide_place).unflatten(2, (chunks, -1))
        scores = (queries * self.scale) @ keys.mT
        token, wide_token = (t.unflatten(2, (chunks, -1)) for t in (token, wide_token))
        if lengths is not None:
            padding = wide_token >= lengths[:, None, None, None]
            scores.masked_fill_(padding[:, :, :, None], torch.finfo(scores.dtype).min)
        scores.masked_fill_(token[..., None] == wide_token[..., None, :], ITSELF)
        return softmax_of_rounds(scores, values, order, self.dropout_p)[:, :, :n]

    def _hash(self, x: Tensor) -> Tensor:
        """(B, H, R, N): which of the vectors r, -r of a round is nearest."""
        rotations = torch.randn_like(self.rotations) if self.redraw else self.rotations
        rotated = (x @ rotations.to(x.dtype)).unflatten(3, (self.hashes, self.halves))
        both = torch.cat([rotated, -rotated], dim=-1)
        dtype = torch.int16 if 2 * self.halves < 2**15 else torch.int32
        return both.argmax(-1).to(dtype).transpose(2, 3)

    def _with_previous(self, token: Tensor, place: Tensor) -> tuple[Tensor, Tensor]:
        """For chunks with the ones before them: the tokens, and the two places of each token."""
        size = self.bucket
        chunk = token.unflatten(2, (-1, size))
        wide = torch.cat([chunk, chunk.roll(1, 2)], dim=3).flatten(2)
        number, within = place // size, place % size
        here = number * (2 * size) + within
        after = (number + 1) % chunk.shape[2] * (2 * size) + size + within
        return wide, torch.cat([here, after], dim=2)


@register("smyrf", label="Smyrf", style=("#8C564B", ">", ":"))
class Smyrf(Attention):
    """Queries and keys are hashed, each sorted by the hash, and cut into clusters of equal size;
    the queries of a cluster attend to its keys. Rounds are weighted by their sums of exp(scores).

    Before hashing, two more features give all queries one length and all keys too, so that the
    nearest key is the one of the largest product: F(q) = [q, 0, sqrt(M - |q|^2)],
    G(k) = [k, sqrt(M - |k|^2), 0], M = max |q|^2 + max |k|^2. The hash is a random projection;
    clusters go by its order alone, so it is not rounded. Padding is sorted last. Every call draws
    new projections, in evaluation too.

    cluster: queries, and keys, of a cluster; None: a 32nd of the length, at most 128.
    hashes: rounds.
    """

    projections: Tensor

    def __init__(self, *, cluster: int | None = None, hashes: int = 2, **sizes):
        super().__init__(**sizes)
        self.cluster = cluster or budget(self.length, share=32, most=128)
        self.hashes = hashes
        self.register_buffer("projections", torch.randn(self.head_dim + 2, hashes))

    def attend(self, q: Tensor, k: Tensor, v: Tensor, lengths: Tensor | None) -> Tensor:
        n = q.shape[2]
        fill = -n % self.cluster
        if fill:
            q, k, v = (F.pad(t, (0, 0, 0, fill)) for t in (q, k, v))
            lengths = q.new_full((len(q),), n, dtype=torch.int32) if lengths is None else lengths
        real = None if lengths is None else real_tokens(lengths, n + fill)[:, None, :, None]
        hash_q, hash_k = self._hash(q.detach(), k.detach(), real)
        by_q, by_k = sort_tokens(hash_q), sort_tokens(hash_k)
        clusters = self.hashes * (n + fill) // self.cluster
        shape = (clusters, self.cluster)
        queries = take(q, by_q.token.flatten(2), by_round(by_q.place)).unflatten(2, shape)
        keys, values = (
            take(t, by_k.token.flatten(2), by_round(by_k.place)).unflatten(2, shape) for t in (k, v)
        )
        scores = (queries * q.shape[-1] ** -0.5) @ keys.mT
        if lengths is not None:
            padding = by_k.token.reshape(*q.shape[:2], *shape) >= lengths[:, None, None, None]
            scores.masked_fill_(padding[:, :, :, None], torch.finfo(scores.dtype).min)
        return softmax_of_rounds(scores, values, by_q, self.dropout_p)[:, :, :n]

    def _hash(self, q: Tensor, k: Tensor, real: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return the hash values of queries and keys, (B, H, R, N) each; infinity for padding."""
        wide = torch.promote_types(q.dtype, torch.float32)
        q, k = q.to(wide), k.to(wide)
        a = torch.randn_like(self.projections) if self.redraw else self.projections
        a = a.to(wide)
        square_q, square_k = (t.square().sum(-1, keepdim=True) for t in (q, k))
        if real is not None:
            square_q, square_k = (t.masked_fill(~real, 0) for t in (square_q, square_k))
        most = square_q.amax(2, keepdim=True) + square_k.amax(2, keepdim=True)
        hash_q = q @ a[:-2] + (most - square_q).sqrt() * a[-1]
        hash_k = k @ a[:-2] + (most - square_k).sqrt() * a[-2]
        if real is not None:
            hash_q, hash_k = (t.masked_fill(~real, torch.inf) for t in (hash_q, hash_k))
        return hash_q.transpose(2, 3), hash_k.transpose(2, 3)
