"""Local attention as in the Long Range Arena: blocks of tokens that see only themselves."""

import torch
import torch.nn.functional as F
from torch import Tensor

from experiments.lra.models.attention.base import Attention, budget
from experiments.lra.models.attention.registry import register
from experiments.lra.models.attention.standard import softmax_attention
from masks import Mask, block_diagonal


@register("local", label="local attention", style=("#56B4E9", "X", "-."))
class Local(Attention):
    """softmax(q k^T / sqrt(D)) v within consecutive windows of tokens.

    window: tokens of one; None: a sixteenth of the length, at most 256.
    """

    def __init__(self, *, window: int | None = None, **sizes):
        super().__init__(**sizes)
        self.window = min(window or budget(self.length, share=16, most=256), self.length)

    def pattern(self) -> Mask:
        return block_diagonal(self.window)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, lengths: Tensor | None) -> Tensor:
        n, window = q.shape[2], self.window
        fill = -n % window
        if fill:
            q, k, v = (F.pad(t, (0, 0, 0, fill)) for t in (q, k, v))
        q, k, v = (t.unflatten(2, (-1, window)) for t in (q, k, v))
        out = softmax_attention(q, k, v, self._allowed(q, lengths, n), self.dropout_p).flatten(2, 3)
        return out[:, :, :n] if fill else out

    def _allowed(self, q: Tensor, lengths: Tensor | None, n: int) -> Tensor | None:
        """Bool that broadcasts over the scores (B, H, windows, window, window), or None."""
        windows, window = q.shape[2:4]
        allowed = None
        if lengths is not None or n < windows * window:
            ends = n if lengths is None else lengths[:, None, None, None, None]
            keys = torch.arange(windows * window, device=q.device).view(windows, 1, window)
            allowed = keys < ends
        if self.causal:
            lower = torch.ones(window, window, dtype=torch.bool, device=q.device).tril()
            allowed = lower if allowed is None else allowed & lower
        return allowed
