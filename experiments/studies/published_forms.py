"""Longformer and BigBird in their published forms: overlapping chunks, and gathered blocks."""

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from experiments.lra.models.attention.base import Attention
from experiments.lra.models.attention.standard import softmax_attention
from masks import Mask, bigbird, longformer


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
        """Return bool (B or 1, 1, chunks, w, 3w): keys in the window but the global one."""
        w, chunks = self.side, scores.shape[2]
        i = torch.arange(w, device=scores.device)[:, None]
        j = torch.arange(3 * w, device=scores.device)
        key = torch.arange(chunks, device=scores.device)[:, None, None] * w + j - w
        ends = n if lengths is None else lengths[:, None, None, None, None]
        return (i <= j) & (j <= i + 2 * w) & (key > 0) & (key < ends)


class BlockedGather(Attention):
    """The internal construction of Zaheer et al. (arXiv 2007.14062), in torch.

    The first and the last block of queries see all keys. Those between gather their blocks of keys
    and values, and multiply them densely: first, last, window and random ones.

    block: tokens of a block, a multiple of 16. random: random blocks of a row.
    """

    lists: Tensor
    real: Tensor

    def __init__(self, *, block: int = 64, random: int = 3, **sizes):
        super().__init__(**sizes)
        self.block, self.random = block, random
        built = self.pattern().build(self.length, block_size=block, heads=self.heads)
        inner = np.broadcast_to(built.layout()[0], (self.heads, built.rows, built.cols))[:, 1:-1]
        seen = torch.from_numpy(inner > 0)
        width = int(seen.sum(-1).max()) if seen.numel() else 1
        real, lists = seen.int().sort(stable=True, dim=-1, descending=True)
        self.register_buffer("lists", lists[..., :width], persistent=False)  # [H, rows, width]
        self.register_buffer("real", real[..., :width].bool(), persistent=False)

    def pattern(self) -> Mask:
        return bigbird(self.block, self.random)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, lengths: Tensor | None) -> Tensor:
        n, b = q.shape[2], self.block
        ends = q.new_full((1,), n, dtype=torch.int32) if lengths is None else lengths
        keys = torch.arange(n + -n % b, device=q.device)
        allowed = keys < ends[:, None]  # [B or 1, N]
        last = max((n - 1) // b * b, min(b, n))  # start of the last block, or the end of all

        def whole(rows: Tensor) -> Tensor:
            return softmax_attention(rows, k, v, allowed[:, None, None, :n], self.dropout_p)

        outs = [whole(q[:, :, :b])]
        if last > b:
            outs.append(self._inner(q[:, :, b:last], k, v, allowed))
        if last < n:
            outs.append(whole(q[:, :, last:]))
        return torch.cat(outs, 2)

    def _inner(self, q: Tensor, k: Tensor, v: Tensor, allowed: Tensor) -> Tensor:
        n, b = k.shape[2], self.block
        head = torch.arange(self.heads, device=q.device)[:, None, None]

        def gather(t: Tensor) -> Tensor:  # [B, H, rows, width * b, D]
            blocks = F.pad(t, (0, 0, 0, -n % b)).unflatten(2, (-1, b))
            return blocks[:, head, self.lists].flatten(3, 4)

        # [B or 1, H, rows, width, b]
        within = allowed.unflatten(1, (-1, b))[:, self.lists] & self.real[..., None]
        within = within.flatten(3)[:, :, :, None]
        q = q.unflatten(2, (-1, b))
        return softmax_attention(q, gather(k), gather(v), within, self.dropout_p).flatten(2, 3)
