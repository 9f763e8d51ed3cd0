"""What a step minimises: the class of an example, or the pixels that are hidden from the model."""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

# (model, tokens, lengths, labels, weights of the examples) -> sums over examples, or hidden pixels:
# cross-entropy (float32, differentiable), how many are right, how many there are
Objective = Callable[
    [nn.Module, Tensor, Tensor | None, Tensor, Tensor | None], tuple[Tensor, Tensor, Tensor]
]


def classify(
    model: nn.Module,
    tokens: Tensor,
    lengths: Tensor | None,
    labels: Tensor,
    weights: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    logits = model(tokens, lengths).float()
    loss = F.cross_entropy(logits, labels, reduction="none")
    right = (logits.argmax(-1) == labels).float()
    return _sums(loss, right, weights)


class MaskedPixels:
    """Self-supervised pre-training: a share of the tokens is hidden, and the model names them.

    After Amos et al., "Never train from scratch" (2023).
    """

    def __init__(self, share: float):
        self.share = share

    def __call__(
        self,
        model: nn.Module,
        tokens: Tensor,
        lengths: Tensor | None,
        labels: Tensor,
        weights: Tensor | None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        most = max(1, round(self.share * tokens.shape[-1]))
        hidden = torch.rand(tokens.shape, device=tokens.device).topk(most, sorted=False).indices
        target = tokens.gather(1, hidden).flatten().long()
        logits = model(tokens, lengths, hidden).float().flatten(0, 1)
        loss = F.cross_entropy(logits, target, reduction="none")
        right = (logits.argmax(-1) == target).float()
        if weights is not None:
            weights = weights.repeat_interleave(most, output_size=len(target))
        return _sums(loss, right, weights)


def _sums(loss: Tensor, right: Tensor, weights: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    if weights is None:
        count = torch.full((), float(len(loss)), device=loss.device)
        return loss.sum(), right.sum(), count
    return (loss * weights).sum(), (right * weights).sum(), weights.sum()
