"""Attention with the score matrix in memory."""

import torch
import torch.nn.functional as F
from torch import Tensor

from experiments.models.attention.base import Attention, real_tokens


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
    scores = (q * q.shape[-1] ** -0.5) @ k.mT
    if allowed is not None:
        scores = scores.masked_fill_(~allowed, torch.finfo(scores.dtype).min)
    return F.dropout(scores.softmax(-1), dropout_p) @ v
