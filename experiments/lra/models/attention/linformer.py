"""Linformer (Wang et al., arXiv 2006.04768)."""

import torch
from torch import Tensor, nn

from experiments.lra.models.attention.base import Attention, budget, refuse_causal
from experiments.lra.models.attention.registry import register
from experiments.lra.models.attention.standard import softmax_attention
from sparseflash.lengths import real_tokens


@register("linformer", label="Linformer", style=("#009E73", "^", "--"))
class Linformer(Attention):
    """softmax(q (E^T k)^T / sqrt(D)) F^T v with learned projections E and F of the tokens.

    A layer has its own two, which its heads share.

    rank: columns of E and F; None: a sixteenth of the length, at most 256.
    shared: every head has one projection of its own instead, for k, v and all layers, which starts
        near 0, as in the Nystromformer port (there of rank 256).
    """

    def __init__(self, *, rank: int | None = None, shared: bool = False, **sizes):
        super().__init__(**sizes)
        refuse_causal(self)
        self.rank = rank or budget(self.length, share=16, most=256)
        self.shared = shared
        if shared:
            self.project = nn.Parameter(0.02 * torch.randn(self.heads, self.length, self.rank))
        else:
            shape, std = (self.length, self.rank), self.rank**-0.5
            self.project_k = nn.Parameter(std * torch.randn(shape))
            self.project_v = nn.Parameter(std * torch.randn(shape))

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
