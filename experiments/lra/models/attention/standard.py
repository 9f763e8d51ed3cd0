"""Attention with the score matrix in memory: the Transformer's, local as in the Long Range Arena,
and Linformer (Wang et al., arXiv 2006.04768).
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from experiments.lra.models.attention.base import Attention, budget, real_tokens, register
from masks import Mask, block_diagonal

ALIGNED = 8  # keys: rows of bfloat16 scores are then whole 16 bytes, as tensor cores take them


@register("standard", label="Transformer", style=("#000000", "o", "-"))
class Standard(Attention):
    """softmax(q k^T / sqrt(D)) v over the whole score matrix."""

    scattered = True

    def attend(self, q: Tensor, k: Tensor, v: Tensor, lengths: Tensor | None) -> Tensor:
        n = k.shape[2]
        allowed = None if lengths is None else real_tokens(lengths, n)[:, None, None]
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
        if lengths is None and n == windows * window:
            return None
        ends = n if lengths is None else lengths[:, None, None, None, None]
        return torch.arange(windows * window, device=q.device).view(windows, 1, window) < ends


@register("linformer", label="Linformer", style=("#009E73", "^", "--"))
class Linformer(Attention):
    """softmax(q (E^T k)^T / sqrt(D)) F^T v with learned projections E and F of the tokens.

    A layer has its own two, which its heads share.

    rank: columns of E and F; None: a sixteenth of the length, at most 256.
    shared: every head has one projection of its own instead, for k, v and all layers, which starts
        near 0, as in the Nystromformer port (there of rank 256).
    same_kv: E is F, and starts at a standard deviation of 1 / sqrt(N), as in google's code, where
        padding counts (of rank 16, and 32 for Text).
    """

    scattered = True

    def __init__(
        self, *, rank: int | None = None, shared: bool = False, same_kv: bool = False, **sizes
    ):
        super().__init__(**sizes)
        if shared and same_kv:
            raise ValueError("shared and same_kv are both True: choose one")
        self.rank = rank or budget(self.length, share=16, most=256)
        self.shared = shared
        if shared:
            self.project = nn.Parameter(0.02 * torch.randn(self.heads, self.length, self.rank))
        else:
            shape, std = (self.length, self.rank), (self.length if same_kv else self.rank) ** -0.5
            self.project_k = nn.Parameter(std * torch.randn(shape))
            self.project_v = self.project_k if same_kv else nn.Parameter(std * torch.randn(shape))

    def share(self, first: Attention) -> None:
        if self.shared:
            assert isinstance(first, Linformer)
            self.project = first.project

    def attend(self, q: Tensor, k: Tensor, v: Tensor, lengths: Tensor | None) -> Tensor:
        if self.shared:
            if lengths is not None:
                real = real_tokens(lengths, k.shape[2])[:, None, :, None]
                k, v = torch.where(real, k, 0), torch.where(real, v, 0)
            k, v = (self.project.to(x.dtype).mT @ x for x in (k, v))
        else:
            k = self._project(k, self.project_k, lengths)
            v = self._project(v, self.project_v, lengths)
        return softmax_attention(q, k, v, None, self.dropout_p)

    def _project(self, x: Tensor, projection: Tensor, lengths: Tensor | None) -> Tensor:
        """(B, H, rank, D); padding tokens count as zeros."""
        tokens = x.transpose(1, 2).flatten(2)
        if lengths is not None:
            tokens = torch.where(real_tokens(lengths, x.shape[2])[:, :, None], tokens, 0)
        short = projection.to(x.dtype).mT @ tokens
        return short.unflatten(2, (x.shape[1], x.shape[3])).transpose(1, 2)
