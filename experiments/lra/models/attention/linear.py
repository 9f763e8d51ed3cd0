"""Linear attention (Katharopoulos et al., arXiv 2006.16236)."""

import torch
import torch.nn.functional as F
from torch import Tensor

from experiments.lra.models.attention.base import Attention, refuse_causal
from experiments.lra.models.attention.registry import register
from sparseflash.lengths import real_tokens


@register("linear", label="linear attention", style=("#CC79A7", "v", "--"))
class Linear(Attention):
    """f(q) (f(k)^T v) / f(q) f(k)^T 1 with f = elu + 1. It has no probabilities to drop.

    normalise: False divides by the square root of the length instead of by the sum of the weights,
        as the Nystromformer port does.
    eps: added to the denominator.
    """

    def __init__(self, *, normalise: bool = True, eps: float = 1e-6, **sizes):
        super().__init__(**sizes)
        refuse_causal(self)
        self.normalise, self.eps = normalise, eps

    def attend(self, q: Tensor, k: Tensor, v: Tensor, lengths: Tensor | None) -> Tensor:
        fq, fk = _elu_plus_1(q), _elu_plus_1(k)
        if self.normalise:
            return linear_attention(fq, fk, v, lengths, self.eps)
        if lengths is not None:
            v = torch.where(real_tokens(lengths, v.shape[2])[:, None, :, None], v, 0)
        share = v.shape[2] ** -0.25  # of each factor, so that neither grows out of the dtype
        return (fq * share) @ ((fk * share).mT @ v)


def linear_attention(
    fq: Tensor, fk: Tensor, v: Tensor, lengths: Tensor | None, eps: float = 0.0
) -> Tensor:
    """fq (fk^T v) / (fq fk^T 1 + eps) from features (B, H, N, M).

    Further columns of ones beside v make the denominator in the same two products, and padding is
    zeroed there: the features, which may be many more, are read twice and never written again.
    """
    head_dim = v.shape[-1]
    wide_v = F.pad(v, (0, 8 - head_dim % 8), value=1.0)
    if lengths is not None:
        wide_v = torch.where(real_tokens(lengths, v.shape[2])[:, None, :, None], wide_v, 0)
    sums = fq @ (fk.mT @ wide_v)
    denominator = sums[..., head_dim : head_dim + 1]
    denominator = denominator.to(torch.promote_types(v.dtype, torch.float32)) + eps
    return (sums[..., :head_dim] / denominator).to(v.dtype)


def _elu_plus_1(x: Tensor) -> Tensor:
    """elu(x) + 1, where it is small too as exact as the dtype can be."""
    return F.relu(x) + x.clamp(max=0).exp()
