"""SMYRF: balanced clusters from asymmetric hashing (Daras et al., arXiv 2010.05315)."""

import torch
import torch.nn.functional as F
from torch import Tensor

from experiments.lra.models.attention.base import Attention, budget, refuse_causal
from experiments.lra.models.attention.clusters import by_round, softmax_of_rounds, sort_tokens, take
from experiments.lra.models.attention.registry import register
from sparseflash.lengths import real_tokens


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
        refuse_causal(self)
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
