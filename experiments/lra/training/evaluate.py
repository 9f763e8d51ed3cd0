"""Loss and accuracy on a split, all examples counted once whatever the batch."""

import math
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from experiments.lra.training import graph
from experiments.lra.training.data import DeviceSplit, stream
from experiments.lra.training.distributed import Group
from experiments.lra.training.objective import Objective
from experiments.lra.training.step import autocast, random_state, set_random_state

SEED = 20_011  # of what evaluation draws: hashes, hidden pixels, the examples of a part


class Evaluator:
    """Evaluates a model on the same examples in the same order each time."""

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
    ):
        self.model, self.split, self.objective = model, split, objective
        self.group, self.device, self.dtype = group, group.device, dtype
        n = len(split)
        chosen = torch.arange(n)
        if examples is not None and examples < n:
            # a draw: official files often have their labels in order
            chosen = torch.randperm(n, generator=torch.Generator().manual_seed(SEED))[:examples]
        self.examples = len(chosen)
        own = chosen[group.rank :: group.world]
        most = math.ceil(self.examples / group.world)  # of a process
        batch = min(batch, most)
        self.batches = math.ceil(most / batch)
        size = self.batches * batch
        rows = torch.cat([own, own.new_zeros(size - len(own))]).view(self.batches, batch)
        weights = (torch.arange(size) < len(own)).float().view(self.batches, batch)
        self._rows, self._weights = rows.to(self.device), weights.to(self.device)
        self._batch = torch.zeros(1, dtype=torch.int64, device=self.device)
        self._sums = torch.zeros(3, dtype=torch.float64, device=self.device)
        self._graph: Any = None

    def prepare(self, pool: Any) -> None:
        """Makes a CUDA graph of a batch, in the memory that the training step works in."""
        with self._quiet():
            if graph.warm_up(self._body, self.device):
                self._graph = graph.capture(self._body, self.device, pool)

    def __call__(self) -> dict[str, float]:
        """Mean loss and accuracy. Random streams of the training stay as they are."""
        with self._quiet():
            self._sums.zero_()
            self._batch.zero_()
            for _ in range(self.batches):
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
            found = self.objective(self.model, *self.split.batch(rows), weights)
        self._sums.add_(torch.stack(found))
        # the warm-up comes by more often than there are batches
        self._batch.add_(1).remainder_(self.batches)

    @contextmanager
    def _quiet(self):
        before = random_state(self.device)
        torch.manual_seed(stream(SEED, self.group.rank))
        self.model.eval()
        try:
            yield
        finally:
            self.model.train()
            set_random_state(before, self.device)
