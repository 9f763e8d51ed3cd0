"""Dense and block-sparse attention of sparseflash."""

from typing import cast

import torch
from torch import Tensor

import masks
import sparseflash
from experiments.models.attention.base import Attention
from experiments.models.attention.padding import (
    BLOCK,
    HIDDEN,
    hide_padding,
    prefix_tiles,
    skip_padding,
)
from masks import Mask


class Flash(Attention):
    """softmax(q k^T / sqrt(D)) v over the allowed keys, without a score matrix in memory.

    padding: "hide" gives q and k further features where lengths are given, which runs the same
        blocks whatever the lengths; "skip" makes the block lists of every sequence on the device
        and leaves its padding out, which saves time where much is padding (no torch.compile).
    backend: of sparseflash.
    """

    mask: Mask | None = None
    sees_itself = True  # every query its own key
    tiles: Tensor

    def __init__(self, *, padding: str = "auto", backend: str = "auto", **sizes):
        super().__init__(**sizes)
        self.padding, self.backend = padding, backend
        if padding not in ("auto", "hide", "skip"):
            raise ValueError(f"padding is {padding!r}; choose auto, hide or skip")
        if padding == "skip":
            if self.length % BLOCK:
                raise ValueError(
                    f"padding is skip and the length {self.length} no multiple of {BLOCK};"
                    " take padding=hide"
                )
            self.register_buffer("tiles", prefix_tiles(), persistent=False)
        if self.causal:
            self.mask = masks.causal()

    def attend(self, q: Tensor, k: Tensor, v: Tensor, lengths: Tensor | None) -> Tensor:
        scale = q.shape[-1] ** -0.5
        mask, seed = self.mask, None
        if self.dropout_p > 0:
            seed = torch.randint(2**63 - 1, (1,), device=q.device)
        if lengths is not None and self.padding == "skip":
            heads = self.heads if mask is not None and mask.per_head else 1
            real = skip_padding(lengths, q.shape[2], heads, self.tiles)
            mask = real if mask is None else real & mask
        elif lengths is not None:
            q, k = hide_padding(q, k, lengths, scale)
        out, lse = sparseflash.attention(
            q, k, v, mask, scale=scale, return_lse=True,
            dropout_p=self.dropout_p, seed=seed, backend=self.backend,
        )  # fmt: skip
        if lengths is not None and not self.sees_itself:  # maybe it sees nothing but padding
            out = out.masked_fill((lse < HIDDEN / 2).unsqueeze(-1), 0.0)
        return cast(Tensor, out)


class Sparse(Flash):
    """Flash attention under a block mask.

    mask: a `masks.Mask` or its text; None takes `default_mask`. One that differs from layer to
        layer gives each layer its own.
    padding, backend: as in `Flash`.
    """

    def __init__(
        self,
        *,
        mask: Mask | str | None = None,
        padding: str = "auto",
        backend: str = "auto",
        **sizes,
    ):
        super().__init__(padding=padding, backend=backend, **sizes)
        if mask is None:
            mask = default_mask(self.length)
        mask = (masks.parse(mask) if isinstance(mask, str) else mask).layer(self.layer)
        self.mask = mask & masks.causal() if self.causal else mask
        blind = masks.diagonals((0,)) - self.mask
        self.sees_itself = blind.build(self.length, heads=self.heads).nnz == 0


def default_mask(length: int) -> Mask:
    """Fixed butterfly and local blocks: of 64 tokens up to 2048, where 128 would leave few."""
    block = 64 if length <= 2048 else 128
    return masks.butterfly(block) | masks.local(block) >> masks.snap(block)
