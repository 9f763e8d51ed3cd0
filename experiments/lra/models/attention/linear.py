"""Linear attention (Katharopoulos et al., arXiv 2006.16236), and Performer: positive orthogonal
random features (Choromanski et al., arXiv 2009.14794).
"""

from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from experiments.lra.models.attention.base import Attention, budget, real_tokens, register


@register("linear", label="linear attention", style=("#CC79A7", "v", "--"))
class Linear(Attention):
    """f(q) (f(k)^T v) / f(q) f(k)^T 1 with f = elu + 1. It has no probabilities to drop.

    normalise: False divides by the square root of the length instead of by the sum of the weights,
        as the Nystromformer port does.
    """

    scattered = True

    def __init__(self, *, normalise: bool = True, **sizes):
        super().__init__(**sizes)
        self.normalise = normalise

    def attend(self, q: Tensor, k: Tensor, v: Tensor, lengths: Tensor | None) -> Tensor:
        fq, fk = _elu_plus_1(q), _elu_plus_1(k)
        if self.normalise:
            return linear_attention(fq, fk, v, lengths, 1e-6)
        if lengths is not None:
            v = torch.where(real_tokens(lengths, v.shape[2])[:, None, :, None], v, 0)
        share = v.shape[2] ** -0.25  # of each factor, so that neither grows out of the dtype
        return (fq * share) @ ((fk * share).mT @ v)


def linear_attention(
    fq: Tensor, fk: Tensor, v: Tensor, lengths: Tensor | None, eps: float = 1e-30
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


# added to the features, as by google; the largest feature of softmax is 1
EPS = {"softmax": 1e-6, "relu": 1e-3}


@register("performer", label="Performer", style=("#E69F00", "P", "-."))
class Performer(Attention):
    """Linear attention with random features whose products estimate exp(scale q k).

    The features are computed in float32: their exponentials do not bear bfloat16. They are drawn
    once, from torch's generator, and kept with the weights. It has no probabilities to drop.

    kernel: "softmax", as above. "relu": the features are max(x, 0), with nothing random, as the
        Long Range Arena's own code has them.
    features: how many random ones; None: a 32nd of the length, at most 128.
    scale: of q k in the softmax; None: 1 / sqrt(D). The Nystromformer port has 1 / D, with 256
        features: smaller scores are estimated better.
    """

    scattered = True
    projection: Tensor | None

    def __init__(
        self,
        *,
        kernel: Literal["softmax", "relu"] = "softmax",
        features: int | None = None,
        scale: float | None = None,
        **sizes,
    ):
        super().__init__(**sizes)
        if scale is not None and scale <= 0:
            raise ValueError(f"scale is {scale!r}; it must be a number above 0")
        if kernel == "relu" and (features or scale):
            raise ValueError("features and scale are for kernel=softmax; with relu, leave them out")
        self.kernel, self.scale = kernel, self.head_dim**-0.5 if scale is None else scale
        self.eps = EPS[kernel]
        count = features or budget(self.length, share=32, most=128)
        random = orthogonal_features(count, self.head_dim) if kernel == "softmax" else None
        self.register_buffer("projection", random)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, lengths: Tensor | None) -> Tensor:
        if self.projection is None:
            fq, fk = (F.relu(x) + self.eps for x in (q, k))
            return linear_attention(fq, fk, v, lengths)
        eq, ek = (self._exponents(x, self.projection) for x in (q, k))
        # One factor for all keys cancels, and so does one for each query: the largest feature is 1,
        # whatever the lengths of q and k are.
        top = ek.detach().amax(-1, keepdim=True)
        if lengths is None:
            top = top.amax(2, keepdim=True)
        else:  # what exceeds the top of the real tokens might overflow
            real = real_tokens(lengths, k.shape[2])[:, None, :, None]
            top = torch.where(real, top.masked_fill(~real, -torch.inf).amax(2, True), top)
        fq = self._features(eq, eq.detach().amax(-1, keepdim=True))
        fk = self._features(ek, top)
        return linear_attention(fq.to(q.dtype), fk.to(k.dtype), v, lengths)

    def _exponents(self, x: Tensor, projection: Tensor) -> Tensor:
        """w y - |y|^2 / 2 for y = x sqrt(scale) and every random w: (B, H, N, features)."""
        x = x.to(torch.promote_types(x.dtype, torch.float32)) * self.scale**0.5
        return (x @ projection.to(x.dtype).T).sub_(x.square().sum(-1, keepdim=True) / 2)

    def _features(self, exponents: Tensor, top: Tensor) -> Tensor:
        return exponents.sub_(top).exp().add(self.eps)


def orthogonal_features(count: int, dim: int) -> Tensor:
    """float32 (count, dim): Gaussian rows, orthogonal to each other in groups of dim."""
    groups = -(-count // dim)
    directions = torch.linalg.qr(torch.randn(groups, dim, dim)).Q.mT.reshape(-1, dim)[:count]
    return directions * torch.randn(count, dim).norm(dim=1, keepdim=True)
