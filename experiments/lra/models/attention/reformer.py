"""Reformer: attention within the buckets of a hash (Kitaev et al., arXiv 2001.04451)."""

import torch
import torch.nn.functional as F
from torch import Tensor

from experiments.lra.models.attention.base import Attention, budget, refuse_causal
from experiments.lra.models.attention.clusters import by_round, softmax_of_rounds, sort_tokens, take
from experiments.lra.models.attention.registry import register

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
    """

    shared_qk = True
    rotations: Tensor

    def __init__(self, *, bucket: int | None = None, hashes: int = 2, **sizes):
        super().__init__(**sizes)
        refuse_causal(self)
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
        scores = (queries * q.shape[-1] ** -0.5) @ keys.mT
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
