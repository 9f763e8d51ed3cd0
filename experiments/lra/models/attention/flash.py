"""Dense and block-sparse attention of sparseflash."""

from typing import Any, Literal

import torch
from torch import Tensor, nn

import masks
import sparseflash
from experiments.lra.models.attention.base import Attention, register
from masks import BlockMask, Mask
from sparseflash.dynamic.lengths import SHORTEST, attend_within, check_skippable, skippable
from sparseflash.layers import plan_lengths
from sparseflash.schedule.blocks import Schedule

LONGEST = {16: 256, 32: 512, 64: 2048}  # tokens of the sequences that take such blocks


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
    blocks: BlockMask | Mask | None = None  # of the mask, at this length

    def __init__(
        self, *, padding: Literal["auto", "hide", "skip"] = "auto", backend: str = "auto", **sizes
    ):
        super().__init__(**sizes)
        self.without_plan = padding  # "auto" hides inside torch.compile
        self.backend = backend
        self._check_padding()

    def _take(self, mask: Mask, block_size: int | None = None) -> None:
        """Attend under this mask, cut into blocks of `block_size` tokens where it is given."""
        self.mask = self.blocks = mask
        if block_size is not None:
            heads = self.heads if mask.per_head else None
            self.blocks = mask.build(self.length, block_size=block_size, heads=heads)

    def _check_padding(self) -> None:
        """Find whether padding is skipped. Raises ValueError where that is asked for in vain."""
        given = self.blocks, self.length, self.length
        fits = skippable(*given)
        if self.without_plan == "skip":
            check_skippable(*given, "take padding=hide")
        long = self.without_plan == "auto" and self.length >= SHORTEST
        self.padding = "skip" if self.without_plan == "skip" or (long and fits) else "hide"

    def pattern(self) -> Mask | None:
        return self.mask

    def with_projections(
        self, dim: int, *, bias: bool, rotary: nn.Module | None
    ) -> sparseflash.BlockSparseAttention:
        return sparseflash.BlockSparseAttention(
            dim, self.heads, head_dim=self.head_dim, mask=self.blocks, bias=bias, rotary=rotary,
            dropout=self.dropout, padding=self.padding, backend=self.backend,
        )  # fmt: skip

    def plan(self, lengths: Tensor, dtype: torch.dtype) -> Tensor | Schedule:
        if self.padding == "hide":
            return lengths
        shape = (self.length, (self.heads, self.heads), self.head_dim)
        return plan_lengths(self.blocks, lengths, *shape, dtype, lengths.device, **self._options)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, lengths: Tensor | Schedule | None) -> Tensor:
        mask = self.blocks
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
    block_size: tokens of the blocks that the mask is cut into; None takes `default_block`.
    The further options are those of `Flash`.
    """

    def __init__(self, *, mask: Mask | str | None = None, block_size: int | None = None, **options):
        super().__init__(**options)
        if mask is None:
            mask = default_mask(self.length, class_token=self.class_token)
        mask = (masks.parse(mask) if isinstance(mask, str) else mask).layer(self.layer)
        least = 32 if self.without_plan == "skip" else 16  # blocks whose padding is skipped
        self._take(mask, block_size or max(least, default_block(self.length)))
        self._check_padding()


def default_block(length: int) -> int:
    """Return the block size at which the default mask skips most of its blocks."""
    return next((size for size in (16, 32, 64) if length <= LONGEST[size]), 128)


def default_mask(length: int, *, class_token: bool = False) -> Mask:
    """Return fixed butterfly and local blocks of `default_block` tokens.

    class_token: the first token sees all others, and they see it.
    """
    block = default_block(length)
    mask = masks.butterfly(block) | masks.local(block) >> masks.snap(block)
    return mask | masks.global_tokens(1) if class_token else mask
