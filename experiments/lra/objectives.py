"""The objectives of classifiers: the class of an example, or the tokens of self-pretraining."""

from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from experiments.lra.settings import Settings
from experiments.training.distributed import Group
from experiments.training.evaluate import Batch, Objective, Sums
from sparseflash.dynamic.lengths import real_tokens


def objective_of(settings: Settings, context: Any = None) -> Objective:
    """Return the objective that a run minimises; context: the processes that share a sequence."""
    if settings.pretrain is None:
        return classify
    return Predict(settings.mask_share, context)


def classify(model: nn.Module, batch: Batch, weights: Tensor | None) -> Sums:
    """Return the class of an example."""
    return _sums(*_answers(model, batch), weights)


def _answers(model: nn.Module, batch: Batch) -> tuple[Tensor, Tensor]:
    """(n,) the loss of each example, and 1 where its class is right."""
    tokens, lengths, labels = batch
    logits = model(tokens, lengths).float()
    loss = F.cross_entropy(logits, labels, reduction="none")
    return loss, (logits.argmax(-1) == labels).float()


class Recorded:
    """`classify`, which also keeps the examples that it answered rightly, for one evaluation."""

    def __init__(self) -> None:
        self._kept: list[Tensor] = []

    def __call__(self, model: nn.Module, batch: Batch, weights: Tensor | None) -> Sums:
        loss, right = _answers(model, batch)
        self._kept.append(right if weights is None else right[weights > 0])
        return _sums(loss, right, weights)

    def right(self, group: Group) -> np.ndarray:
        """bool (n,): for every example of the split, in its order; only in the first process."""
        own = torch.cat(self._kept).bool().cpu().numpy()
        parts = [np.asarray(part) for part in group.gather(own)]
        found = np.zeros(sum(map(len, parts)) // group.ways, bool)
        for rank, part in enumerate(parts):
            found[rank // group.ways :: group.replicas] = part
        return found


class Predict:
    """Self-pretraining (Amos et al., arXiv 2310.02980): the loss of predicted tokens, no padding.

    share: of the tokens of each sequence, drawn at random, which are hidden from the model and
        predicted.
    context: the processes that share each sequence, which hide the same tokens of it.
    """

    def __init__(self, share: float, context: Any = None):
        self.share, self.context = share, context

    def __call__(self, model: nn.Module, batch: Batch, weights: Tensor | None) -> Sums:
        tokens, lengths, _ = batch
        sequences = tokens.flatten(0, -2)  # of pairs, both
        places, real = self._places(sequences, None if lengths is None else lengths.flatten())
        target = sequences.gather(1, places).flatten().long()
        logits = model(tokens, lengths, places).float().flatten(0, 1)
        loss = F.cross_entropy(logits, target, reduction="none")
        right = (logits.argmax(-1) == target).float()
        if weights is not None:
            weights = weights.repeat_interleave(len(places) // len(weights))[:, None]
            real = weights.expand(places.shape) if real is None else weights * real
        return _sums(loss, right, None if real is None else real.flatten().float())

    def _places(self, tokens: Tensor, lengths: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """int64 (B, M): the places that are predicted; bool (B, M): those that count, or None."""
        (size, n), device = tokens.shape, tokens.device
        order, count = torch.rand(size, n, device=device), max(1, round(self.share * n))
        if self.context is not None:
            dist.broadcast(order, group_src=0, group=self.context)
        if lengths is None:
            return order.topk(count, sorted=False).indices, None
        places = order.masked_fill(~real_tokens(lengths, n), -1.0).topk(count).indices
        own = (self.share * lengths).round().clamp(min=1)
        real = torch.arange(count, device=device) < own[:, None]
        return torch.where(real, places, places[:, :1]), real


def _sums(loss: Tensor, right: Tensor, weights: Tensor | None) -> Sums:
    if weights is None:
        count = torch.full((), float(len(loss)), device=loss.device)
        return loss.sum(), right.sum(), count
    return (loss * weights).sum(), (right * weights).sum(), weights.sum()
