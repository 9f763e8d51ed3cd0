"""Dense and block-sparse attention of sparseflash."""

from typing import Any, Literal

import torch
from torch import Tensor, nn

import masks
import sparseflash
from experiments.lra.models.attention.base import Attention
from experiments.lra.models.attention.registry import register
from masks import Mask
from sparseflash.layers import plan_lengths
from sparseflash.lengths import BLOCK, SHORTEST, attend_within
from sparseflash.schedule import Schedule


@register("flash", label="FlashAttention", style=("#0072B2", "s", "-"))
class Flash(Attention):
    """softmax(q k^T / sqrt(D)) v over the allowed keys, without a score matrix in memory.

    padding: how keys beyond the lengths are left out. "hide" gives q and k further features, and
        runs the same blocks for all lengths. "skip" makes the block lists of every sequence on the
        device, once a step, and leaves its padding out. "auto" skips where the length is a
        multiple of 128 and at least 1024.
    backend: of sparseflash.
    """

    mask: Mask | None = None

    def __init__(
        self, *, padding: Literal["auto", "hide", "skip"] = "auto", backend: str = "auto", **sizes
    ):
        super().__init__(**sizes)
        if padding == "skip" and self.length % BLOCK:
            raise ValueError(
                f"padding is skip and the length {self.length} no multiple of {BLOCK};"
                " take padding=hide"
            )
        fits = self.length % BLOCK == 0 and self.length >= SHORTEST
        self.padding = "skip" if padding == "skip" or (padding == "auto" and fits) else "hide"
        self.without_plan = padding  # "auto" hides inside torch.compile
        self.backend = backend
        if self.causal:
            self.mask = masks.causal()

    def pattern(self) -> Mask | None:
        return self.mask

    def with_projections(
        self, dim: int, *, bias: bool, rotary: nn.Module | None
    ) -> sparseflash.BlockSparseAttention:
        return sparseflash.BlockSparseAttention(
            dim, self.heads, head_dim=self.head_dim, mask=self.mask, bias=bias, rotary=rotary,
            dropout=self.dropout, padding=self.padding, backend=self.backend,
        )  # fmt: skip

    def plan(self, lengths: Tensor, dtype: torch.dtype) -> Tensor | Schedule:
        if self.padding == "hide":
            return lengths
        shape = (self.length, (self.heads, self.heads), self.head_dim)
        return plan_lengths(self.mask, lengths, *shape, dtype, lengths.device, **self._options)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, lengths: Tensor | Schedule | None) -> Tensor:
        mask = self.mask
        if isinstance(lengths, Schedule):
            mask, lengths = lengths, None
        given = (q, k, v, mask, lengths, self.without_plan)
        return attend_within(sparseflash.attention, *given, **self._options)

    @property
    def _options(self) -> dict[str, Any]:
        return {"dropout_p": self.dropout_p, "backend": self.backend}


@register("sparse", label="block-sparse", style=("#D55E00", "D", "-"))
class Sparse(Flash):
    """Flash attention under a block mask.

    mask: a `masks.Mask` or its text; None takes `default_mask`. A mask of `masks.layers` gives
        each layer its own.
    The further options are those of `Flash`.
    """

    def __init__(self, *, mask: Mask | str | None = None, **options):
        super().__init__(**options)
        if mask is None:
            mask = default_mask(self.length, class_token=self.class_token)
        mask = (masks.parse(mask) if isinstance(mask, str) else mask).layer(self.layer)
        self.mask = mask & masks.causal() if self.causal else mask


def default_mask(length: int, *, class_token: bool = False) -> Mask:
    """Fixed butterfly and local blocks: of 64 tokens up to 2048, where 128 would leave few.

    class_token: the first token sees all others, and they see it.
    """
    block = 64 if length <= 2048 else 128
    mask = masks.butterfly(block) | masks.local(block) >> masks.snap(block)
    return mask | masks.global_tokens(1) if class_token else mask
