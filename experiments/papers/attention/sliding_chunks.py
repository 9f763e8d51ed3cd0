"""Longformer's attention in its published form: overlapping chunks of the queries and keys."""

import torch
import torch.nn.functional as F
from torch import Tensor

from experiments.lra.models.attention.base import Attention
from experiments.lra.models.attention.standard import softmax_attention
from masks import Mask, longformer


class SlidingChunks(Attention):
    """The window and the global first token of Beltagy et al. (arXiv 2004.05150), in torch.

    Chunks of `window` tokens, which overlap by half, are multiplied, and what is outside of the
    window is masked: twice the work and memory of the window. All tokens share one projection.

    window: keys to both sides together, even.
    """

    def __init__(self, *, window: int = 512, **sizes):
        super().__init__(**sizes)
        self.window, self.side = window, window // 2

    def pattern(self) -> Mask:
        return longformer(self.window)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, lengths: Tensor | None) -> Tensor:
        n, w = q.shape[2], self.side
        real = None if lengths is None else torch.arange(n, device=q.device) < lengths[:, None]
        first = softmax_attention(
            q[:, :, :1], k, v, None if real is None else real[:, None, None], self.dropout_p
        )
        padded = (F.pad(t, (0, 0, w, w + -n % w)) for t in (q * self.head_dim**-0.5, k, v))
        qs, ks, vs = padded
        # [B, H, chunks + 1, 2w, 2w]: chunk c and the next one, which overlaps the next pair
        pairs = qs.unfold(2, 2 * w, w).mT @ ks.unfold(2, 2 * w, w)
        # [B, H, chunks, w, 3w]: a query's own chunk of keys and those beside it
        scores = torch.cat([pairs[:, :, :-1, w:, :w], pairs[:, :, 1:, :w]], -1)
        scores = scores.masked_fill(~self._allowed(scores, n, lengths), -torch.inf)
        token = qs[:, :, w:-w].unflatten(2, (-1, w)) @ k[:, :, None, :1].mT  # the global key
        p = F.dropout(torch.cat([token, scores], -1).softmax(-1), self.dropout_p)
        out = p[..., :1] * v[:, :, None, :1] + p[..., 1:] @ vs.unfold(2, 3 * w, w).mT
        return torch.cat([first, out.flatten(2, 3)[:, :, 1:n]], 2)

    def _allowed(self, scores: Tensor, n: int, lengths: Tensor | None) -> Tensor:
        """Bool (B or 1, 1, chunks, w, 3w): keys in the window but the global one."""
        w, chunks = self.side, scores.shape[2]
        i = torch.arange(w, device=scores.device)[:, None]
        j = torch.arange(3 * w, device=scores.device)
        key = torch.arange(chunks, device=scores.device)[:, None, None] * w + j - w
        ends = n if lengths is None else lengths[:, None, None, None, None]
        return (i <= j) & (j <= i + 2 * w) & (key > 0) & (key < ends)
