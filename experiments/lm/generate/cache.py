"""The keys and values of a layer, and its attention of new tokens to them."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from masks import Mask
from sparseflash import BlockSparseAttention, Rotary, attention, decode
from sparseflash.select import Selection
from sparseflash.select.pool import pool
from sparseflash.select.tokens import TokenSelector

BLOCK_Q = 16  # of a selection for one query: the least that a mask may have


class Cache:
    """Keys and values of one sequence in a layer, which `attend` adds to and reads.

    The first call has the prompt, each further one a token.

    Args:
        layer: its mask is taken as in training, for windows of `room` tokens.
    """

    def __init__(self, layer: BlockSparseAttention, room: int):
        self.layer, self.room, self.length = layer, room, 0

    def attend(self, q: Tensor, k: Tensor, v: Tensor, lengths: object = None) -> Tensor:
        """`BlockSparseAttention.attend` for tokens that follow those in the cache."""
        start = self.length
        if not start:
            self._allocate(k, v)
        self.length = end = start + q.shape[2]
        self.lengths.fill_(end)
        self.k[:, :, start:end], self.v[:, :, start:end] = k, v
        if not start:
            return self._prompt(q, k, v)
        return self._token(q)

    def _allocate(self, k: Tensor, v: Tensor) -> None:
        self.k, self.v = (t.new_zeros(1, t.shape[1], self.room, t.shape[3]) for t in (k, v))
        self.lengths = torch.zeros(1, dtype=torch.int32, device=k.device)

    def _prompt(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        mask = self.layer.mask
        assert isinstance(mask, Mask)
        heads = self.layer.heads if mask.per_head else None
        return attention(q, k, v, mask.build(self.room, heads=heads).crop(q.shape[2]))

    def _token(self, q: Tensor) -> Tensor:
        assert isinstance(self.layer.mask, Mask)
        return decode(q, self.k, self.v, self.layer.mask, lengths=self.lengths)


class MobaCache(Cache):
    """A cache with the mean key of every whole chunk, by which a token picks chunks."""

    def _allocate(self, k: Tensor, v: Tensor) -> None:
        super()._allocate(k, v)
        assert isinstance(self.layer.mask, TokenSelector)
        self.moba = self.layer.mask
        chunks = -(-self.room // self.moba.chunk)
        self.means = k.new_zeros(1, k.shape[1], chunks, k.shape[3], dtype=torch.float32)

    def _prompt(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        whole = self.length // self.moba.chunk
        if whole:
            (mean,) = pool((k[:, :, : whole * self.moba.chunk], self.moba.chunk, ["mean"]))
            self.means[:, :, :whole] = mean
        return attention(q, k, v, self.moba(q, k))

    def _token(self, q: Tensor) -> Tensor:
        out = decode(q, self.k, self.v, self._picked(q), lengths=self.lengths)
        whole, rest = divmod(self.length, self.moba.chunk)
        if not rest:
            last = self.k[:, :, self.length - self.moba.chunk : self.length]
            self.means[:, :, whole - 1] = last.float().mean(2)
        return out

    def _picked(self, q: Tensor) -> Selection:
        """The token's own chunk, and the whole ones of the best scores."""
        chunk, (_, block) = self.moba.chunk, self.moba.block_size
        own = (self.length - 1) // chunk
        scores = (q.float() * self.means[:, :, :own]).sum(3)  # no matmul, which autocast rounds
        best = scores.topk(min(self.moba.k - 1, own)).indices.unsqueeze(2)
        picked = torch.zeros(*q.shape[:3], self.means.shape[2], dtype=torch.bool, device=q.device)
        picked.scatter_(3, best, True)[..., own] = True
        picked = picked.repeat_interleave(chunk // block, 3)[..., : -(-self.room // block)]
        most = q.shape[1] * self.moba.k * (chunk // block)
        sizes = {"n_q": 1, "n_k": self.room, "max_blocks": most}
        return Selection.from_layout(picked, (BLOCK_Q, block), **sizes)


class Later(nn.Module):
    """`Rotary` for tokens that follow those in a cache."""

    def __init__(self, rotary: Rotary, cache: Cache):
        super().__init__()
        self.rotary, self.cache = rotary, cache

    def forward(self, x: Tensor) -> Tensor:
        return self.rotary(x, self.cache.length)


@contextmanager
def caches(layers: Sequence[BlockSparseAttention], room: int) -> Iterator[None]:
    """Within it, the layers attend through caches of their own."""
    rotaries = [layer.rotary for layer in layers]
    for layer in layers:
        cache = (MobaCache if isinstance(layer.mask, TokenSelector) else Cache)(layer, room)
        layer.attend = cache.attend  # pyright: ignore[reportAttributeAccessIssue]
        if isinstance(layer.rotary, Rotary):
            layer.rotary = Later(layer.rotary, cache)
    try:
        yield
    finally:
        for layer, rotary in zip(layers, rotaries, strict=True):
            del layer.attend
            layer.rotary = rotary
