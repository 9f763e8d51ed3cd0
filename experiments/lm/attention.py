"""The three attentions of a language model: one set of parameters, one function."""

import re
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import masks
from experiments.lra.models.attention.standard import softmax_attention
from masks import Mask
from sparseflash import BlockSparseAttention, attention, select
from sparseflash.distributed import ContextParallel
from sparseflash.select import Selector
from sparseflash.select.tokens import TokenSelector

MOBA = re.compile(r"moba\((\d+), *(\d+)\)")  # chunk in tokens, chunks of a query
BLOCKS = (128, 64, 32, 16)  # block sizes of MoBA: the largest that divides a chunk


class Sparse(BlockSparseAttention):
    """`sparseflash.attention` under the mask.

    `packed`, set by the model before each call, holds the document lengths of every sequence.
    """

    packed: tuple[tuple[int, ...], ...] | None = None

    def attend(self, q: Tensor, k: Tensor, v: Tensor, lengths: object = None) -> Tensor:
        mask = self.mask
        if self.packed is not None:
            documents = masks.documents(self.packed)
            if isinstance(mask, ContextParallel):
                mask, documents = None, mask.with_mask(mask.source & documents)  # type: ignore
            mask = documents if mask is None else mask & documents  # type: ignore[operator]
        if isinstance(mask, Selector):
            if isinstance(mask, TokenSelector) and q.is_cuda:
                mask = with_room(mask, q)
            mask = mask(q, k)
        return attention(q, k, v, mask, **self._options)  # type: ignore[arg-type]


def with_room(selector: TokenSelector, q: Tensor) -> TokenSelector:
    """Return the selector with room for all blocks that q (B, H, N, D) may pick, those of its
    own chunk and the ones before it. Then no step waits for the GPU to count them, and a CUDA
    graph holds it.
    """
    batch, heads, n, _ = q.shape
    block_q, block_k = selector.block_size
    chunks = sum(-(-end // selector.chunk) for end in range(block_q, n + block_q, block_q))
    return replace(selector, capacity=batch * heads * chunks * (selector.chunk // block_k))


class Explicit(BlockSparseAttention):
    """What the attentions with a token mask share: the mask as a bool tensor.

    `packed`, set by the model before each call, holds the document number of every token (B, N).
    """

    packed: Tensor | None = None

    def __init__(self, *sizes: int, **options: Any):
        super().__init__(*sizes, **options)
        self.causal = str(self.mask) == str(masks.causal())  # a text in `attend` breaks a graph

    def allowed(self, q: Tensor) -> Tensor | None:
        """Bool (B or 1, H or 1, N, N): the pairs that may attend; None: all."""
        n = q.shape[2]
        allowed = self._pairs(n, q.device)
        if self.packed is not None:
            same = (self.packed[:, :, None] == self.packed[:, None, :])[:, None]
            allowed = same if allowed is None else allowed & same
        return allowed

    def _pairs(self, n: int, device: torch.device) -> Tensor | None:
        if self.mask is None:
            return None
        if self.causal:
            return torch.ones(n, n, dtype=torch.bool, device=device).tril()
        kept = self.__dict__.get("_kept")  # not a buffer: it is no part of a checkpoint
        if kept is None or kept.shape[-1] != n or kept.device != device:
            assert isinstance(self.mask, Mask)
            kept = torch.from_numpy(self.mask.build(n, heads=self.heads).to_dense()).to(device)
            self.__dict__["_kept"] = kept
        return kept


class Standard(Explicit):
    """Matrix product, softmax, matrix product, with the scores in memory."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor, lengths: object = None) -> Tensor:
        return softmax_attention(q, k, v, self.allowed(q), self._options["dropout_p"])


class Sdpa(Explicit):
    """torch's scaled_dot_product_attention, which picks its own kernel."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor, lengths: object = None) -> Tensor:
        causal = self.packed is None and self.causal
        allowed = None if causal else self.allowed(q)
        p = self._options["dropout_p"]
        return F.scaled_dot_product_attention(q, k, v, allowed, dropout_p=p, is_causal=causal)


ATTENTIONS: dict[str, type[BlockSparseAttention]] = {
    "sparse": Sparse,
    "standard": Standard,
    "sdpa": Sdpa,
}


def resolve(text: str | None) -> Mask | Selector:
    """Return the causal mask of a text; None: every earlier pair.

    moba(chunk, k) is the selector of that name. Raises ValueError for a text that is no mask.
    """
    if text is not None and (found := MOBA.fullmatch(text)):
        return _moba(*map(int, found.groups()))
    if text is None or text == "dense":
        return masks.causal()
    mask = masks.parse(text)
    parts = mask.parts if mask.kind == "&" else (mask,)
    return mask if masks.causal() in parts else mask & masks.causal()


def _moba(chunk: int, k: int) -> Selector:
    block = next((size for size in BLOCKS if chunk % size == 0), None)
    if block is None or not k:
        raise ValueError(
            f"mask=moba({chunk}, {k}): give a chunk that is a multiple of 16, and 1 or more of them"
        )
    return select.moba(chunk, k, block)
