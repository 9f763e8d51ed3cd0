"""Dense and block-sparse attention of sparseflash."""

from collections.abc import Hashable
from typing import Any, cast

import torch
from torch import Tensor

import masks
import sparseflash
from experiments.lra.models.attention.base import Attention
from experiments.lra.models.attention.padding import (
    BLOCK,
    HIDDEN,
    blocks_of,
    hide_padding,
    skip_padding,
)
from masks import Mask
from sparseflash.schedule import Schedule

SHORTEST = 1024  # tokens from which it pays to skip padding


class Flash(Attention):
    """softmax(q k^T / sqrt(D)) v over the allowed keys, without a score matrix in memory.

    padding: what happens where lengths are given. "hide" gives q and k further features, and runs
        the same blocks whatever the lengths; "skip" makes the block lists of every sequence on the
        device, once a step, and leaves its padding out; "auto" skips where the length is a multiple
        of 128 and at least 1024.
    backend: of sparseflash.
    """

    mask: Mask | None = None
    sees_itself = True  # every query its own key

    def __init__(self, *, padding: str = "auto", backend: str = "auto", **sizes):
        super().__init__(**sizes)
        self.backend = backend
        if padding not in ("auto", "hide", "skip"):
            raise ValueError(f"padding is {padding!r}; choose auto, hide or skip")
        if padding == "skip" and self.length % BLOCK:
            raise ValueError(
                f"padding is skip and the length {self.length} no multiple of {BLOCK};"
                " take padding=hide"
            )
        fits = self.length % BLOCK == 0 and self.length >= SHORTEST
        self.skips = padding == "skip" or (padding == "auto" and fits)
        if self.causal:
            self.mask = masks.causal()

    def pattern(self) -> Mask | None:
        return self.mask

    def prepares(self) -> Hashable:
        return ("skip", self.mask) if self.skips else None

    @torch.compiler.disable()
    def prepare(self, lengths: Tensor, dtype: torch.dtype) -> Schedule:
        blocks = blocks_of(self.mask, self.length, self.heads, lengths.device)
        selection = skip_padding(blocks, lengths)
        shape = (len(lengths), self.length, self.heads, self.head_dim)
        like = torch.empty(shape, dtype=dtype, device=lengths.device).transpose(1, 2)
        options = {"dropout_p": self.dropout_p, "backend": self.backend}
        return sparseflash.plan(selection, like, like, like, **options)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, lengths: Any) -> Tensor:
        scale = q.shape[-1] ** -0.5
        hide, mask, seed = isinstance(lengths, Tensor), self.mask, None
        if self.dropout_p > 0:
            seed = torch.randint(2**63 - 1, (1,), device=q.device)
        if hide:
            q, k = hide_padding(q, k, lengths, scale)
        elif lengths is not None:
            mask = lengths
        out, lse = sparseflash.attention(
            q, k, v, mask, scale=scale, return_lse=True,
            dropout_p=self.dropout_p, seed=seed, backend=self.backend,
        )  # fmt: skip
        if hide and not self.sees_itself:  # maybe it sees nothing but padding
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
            mask = default_mask(self.length, class_token=self.class_token)
        mask = (masks.parse(mask) if isinstance(mask, str) else mask).layer(self.layer)
        self.mask = mask & masks.causal() if self.causal else mask
        blind = masks.diagonals((0,)) - self.mask
        self.sees_itself = blind.build(self.length, heads=self.heads).nnz == 0


def default_mask(length: int, *, class_token: bool = False) -> Mask:
    """Fixed butterfly and local blocks: of 64 tokens up to 2048, where 128 would leave few.

    class_token: the first token sees all others, and they see it.
    """
    block = 64 if length <= 2048 else 128
    mask = masks.butterfly(block) | masks.local(block) >> masks.snap(block)
    return mask | masks.global_tokens(1) if class_token else mask
