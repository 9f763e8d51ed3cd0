"""BigBird's attention in its published form: gathered blocks of keys."""

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from experiments.lra.models.attention.base import Attention
from experiments.lra.models.attention.standard import softmax_attention
from masks import Mask, bigbird


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
