"""Objectives of training, and their means over a split."""

import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from experiments.common.progress import progress
from experiments.lra.training.config import Settings
from experiments.lra.training.data import Batch, DeviceSplit, stream
from experiments.lra.training.device import (
    autocast,
    capture,
    random_state,
    set_random_state,
    warm_up,
)
from experiments.lra.training.distributed import Group
from sparseflash.lengths import real_tokens

SEED = 20_011  # of the random draws of an evaluation: hashes, hidden tokens, examples

Sums = tuple[Tensor, Tensor, Tensor]
# (model, batch, weights of the examples or None) -> three sums over the examples, or the
# predicted tokens: cross-entropy (float32, differentiable), number of right answers, number of all
Objective = Callable[[nn.Module, Batch, Tensor | None], Sums]


def objective_of(settings: Settings) -> Objective:
    """The objective that a run minimises."""
    if settings.pretrain is None:
        return classify
    return Predict(settings.mask_share if settings.pretrain == "masked" else None)


def classify(model: nn.Module, batch: Batch, weights: Tensor | None) -> Sums:
    """The class of an example."""
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
        found = np.zeros(sum(map(len, parts)), bool)
        for rank, part in enumerate(parts):
            found[rank :: group.world] = part
        return found


class Predict:
    """Self-pretraining (Amos et al., arXiv 2310.02980): the loss of predicted tokens, no padding.

    share: of the tokens of each sequence, drawn at random, which are hidden from the model and
        predicted. None: every token after the first is predicted from those before it.
    """

    def __init__(self, share: float | None):
        self.share = share

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
        if self.share is None:
            places = torch.arange(1, n, device=device).expand(size, -1)
            return places, None if lengths is None else places < lengths[:, None]
        order, count = torch.rand(size, n, device=device), max(1, round(self.share * n))
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


class Evaluator:
    """Evaluates a model on the same examples in the same order each time.

    Every example counts once, whatever the batch size and the number of processes.

    Args:
        examples: how many examples of the split are drawn, once; None: all of them.
        forward: the model, compiled; None: the model itself.
    """

    def __init__(
        self,
        model: nn.Module,
        split: DeviceSplit,
        objective: Objective,
        group: Group,
        *,
        batch: int,
        dtype: torch.dtype,
        examples: int | None = None,
        forward: nn.Module | None = None,
    ):
        self.model, self.split, self.objective = model, split, objective
        self.forward = model if forward is None else forward
        self.group, self.device, self.dtype = group, group.device, dtype
        n = len(split)
        chosen = torch.arange(n)
        if examples is not None and examples < n:
            # A random draw, because official files often have their labels in order.
            chosen = torch.randperm(n, generator=torch.Generator().manual_seed(SEED))[:examples]
        self.examples = len(chosen)
        own = chosen[group.rank :: group.world]
        share = math.ceil(self.examples / group.world)  # of the process with the most examples
        batch = min(batch, share)
        self.batches = math.ceil(share / batch)
        size = self.batches * batch
        rows = torch.cat([own, own.new_zeros(size - len(own))]).view(self.batches, batch)
        weights = (torch.arange(size) < len(own)).float().view(self.batches, batch)
        self._rows, self._weights = rows.to(self.device), weights.to(self.device)
        self._batch = torch.zeros(1, dtype=torch.int64, device=self.device)
        self._sums = torch.zeros(3, dtype=torch.float64, device=self.device)
        self._graph: Any = None

    def prepare(self, pool: Any) -> None:
        """Captures a batch as a CUDA graph, in the memory pool of the training step."""
        with self._quiet():
            if warm_up(self._body, self.device):
                self._graph = capture(self._body, self.device, pool)

    def __call__(self, progress_of: str | None = None) -> dict[str, float]:
        """Mean loss and accuracy. Leaves the random streams of training as they are.

        With `progress_of` it shows the progress on stderr, under this name.
        """
        batches: Iterable[int] = range(self.batches)
        if progress_of is not None:
            batches = progress(batches, self.batches, progress_of)
        with self._quiet():
            self._sums.zero_()
            self._batch.zero_()
            for _ in batches:
                if self._graph is None:
                    self._body()
                else:
                    self._graph.replay()
            loss, right, count = self.group.sum(self._sums).tolist()
        return {"loss": loss / count, "accuracy": right / count}

    @torch.no_grad()
    def _body(self) -> None:
        rows = self._rows.index_select(0, self._batch).flatten()
        weights = self._weights.index_select(0, self._batch).flatten()
        with autocast(self.device, self.dtype):
            sums = self.objective(self.forward, self.split.batch(rows), weights)
        self._sums.add_(torch.stack(sums))
        # The remainder, because the warm-up may run more often than there are batches.
        self._batch.add_(1).remainder_(self.batches)

    @contextmanager
    def _quiet(self) -> Iterator[None]:
        """Evaluation mode with its own random streams; training's are restored afterwards."""
        before = random_state(self.device)
        torch.manual_seed(stream(SEED, self.group.rank))
        self.model.eval()
        try:
            yield
        finally:
            self.model.train()
            set_random_state(before, self.device)
