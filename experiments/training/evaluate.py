"""Examples on the device, their order in training, and the means of an objective over a split."""

import math
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from experiments.common.work import progress
from experiments.training.device import autocast, capture, warm_up
from experiments.training.distributed import Group

Batch = tuple[Tensor, Tensor | None, Tensor]  # tokens, lengths, labels


class DeviceSplit:
    """Arrays of examples as tensors on the device, where batches are gathered; None stays None."""

    def __init__(self, arrays: Iterable[np.ndarray | None], device: torch.device):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # mapped files are read-only
            self.tensors = [
                None if array is None else torch.from_numpy(np.ascontiguousarray(array)).to(device)
                for array in arrays
            ]

    def __len__(self) -> int:
        return len(self.tensors[0])  # type: ignore[arg-type]

    def batch(self, rows: Tensor) -> Batch:
        """Return the examples with these numbers."""
        found = (None if t is None else t.index_select(0, rows) for t in self.tensors)
        return tuple(found)  # type: ignore[return-value]

    @property
    def bytes(self) -> int:
        return sum(t.nbytes for t in self.tensors if t is not None)


class Order:
    """The examples of each step: permutations from (seed, epoch), one after another.

    A batch may cross from one epoch into the next, so that all have the same size.
    """

    def __init__(self, n: int, batch: int, seed: int):
        self.n, self.batch, self.seed = n, batch, seed
        self._epoch, self._kept = -1, np.empty(0, np.int64)

    def rows(self, first: int, last: int) -> Tensor:
        """int64 (last - first, batch): the examples of the steps first .. last - 1."""
        start, stop = first * self.batch, last * self.batch
        parts = []
        while start < stop:
            epoch, place = divmod(start, self.n)
            part = self._permutation(epoch)[place : place + stop - start]
            parts.append(part)
            start += len(part)
        return torch.from_numpy(np.concatenate(parts)).view(-1, self.batch)

    def _permutation(self, epoch: int) -> np.ndarray:
        if epoch != self._epoch:
            generator = torch.Generator().manual_seed(stream(self.seed, epoch))
            self._kept = torch.randperm(self.n, generator=generator).numpy()
            self._epoch = epoch
        return self._kept


def seed_everything(*numbers: int) -> None:
    """Seed torch's random streams, by the seed of a run and the rank of a process."""
    torch.manual_seed(stream(*numbers))


def stream(*numbers: int) -> int:
    """Return a seed of 63 bits for these numbers."""
    return int(np.random.SeedSequence(numbers).generate_state(1, np.uint64)[0] >> np.uint64(1))


# ---- evaluation

SEED = 20_011  # of the random draws of an evaluation: hashes, hidden tokens, examples

Sums = tuple[Tensor, Tensor, Tensor]
# (model, batch, weights of the examples or None) -> three sums over the examples, or the
# predicted tokens: cross-entropy (float32, differentiable), number of right answers, number of all
Objective = Callable[[nn.Module, Batch, Tensor | None], Sums]


class Evaluator:
    """Evaluates a model on the same examples in the same order each time.

    Every example counts once, whatever the batch size and the number of processes.

    Args:
        split: on the device, with len() and batch(rows).
        examples: how many examples of the split are drawn, once; None: all of them.
        forward: the model, compiled; None: the model itself.
    """

    def __init__(
        self,
        model: nn.Module,
        split: Any,
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
        own = chosen[group.replica :: group.replicas]
        share = math.ceil(self.examples / group.replicas)  # of the process with the most examples
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
        """Capture a batch as a CUDA graph, in the memory pool of the training step."""
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
        """Switch to evaluation mode with its own random streams."""
        with torch.random.fork_rng([self.device] if self.device.type == "cuda" else []):
            torch.manual_seed(stream(SEED, self.group.replica))
            self.model.eval()
            try:
                yield
            finally:
                self.model.train()
