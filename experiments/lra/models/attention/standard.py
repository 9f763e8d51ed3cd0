"""Attention with the score matrix in memory."""

import torch
import torch.nn.functional as F
from torch import Tensor

from experiments.lra.models.attention.base import Attention
from experiments.lra.models.attention.registry import register
from sparseflash.lengths import real_tokens

ALIGNED = 8  # keys: rows of bfloat16 scores are then whole 16 bytes, as tensor cores take them


@register("standard", label="Transformer", style=("#000000", "o", "-"))
class Standard(Attention):
    """softmax(q k^T / sqrt(D)) v over the whole score matrix."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor, lengths: Tensor | None) -> Tensor:
        n = k.shape[2]
        allowed = None if lengths is None else real_tokens(lengths, n)[:, None, None]
        if self.causal:
            lower = torch.ones(q.shape[2], n, dtype=torch.bool, device=q.device).tril()
            allowed = lower if allowed is None else allowed & lower
        return softmax_attention(q, k, v, allowed, self.dropout_p)


def softmax_attention(
    q: Tensor, k: Tensor, v: Tensor, allowed: Tensor | None, dropout_p: float
) -> Tensor:
    """softmax(q k^T / sqrt(D)) v with the scores in the dtype of q, the softmax inside in float32.

    allowed: bool that broadcasts over the scores; a query with nothing to attend to takes the mean
    of v.
    """
    n = k.shape[-2]
    if more := -n % ALIGNED:  # a class token makes 1025 of 1024
        k, v = F.pad(k, (0, 0, 0, more)), F.pad(v, (0, 0, 0, more))
        if allowed is not None and allowed.shape[-1] == n:
            allowed = F.pad(allowed, (0, more))
    scores = (q * q.shape[-1] ** -0.5) @ k.mT
    if allowed is not None:
        scores = scores.masked_fill_(~allowed, torch.finfo(scores.dtype).min)
    if more:
        scores = scores.masked_fill_(torch.arange(n + more, device=q.device) >= n, -torch.inf)
    return F.dropout(scores.softmax(-1), dropout_p) @ v
