"""Examples on the device, and the order in which training takes them."""

import warnings

import numpy as np
import torch
from torch import Tensor

from experiments.lra.tasks.task import Split

Batch = tuple[Tensor, Tensor | None, Tensor]  # tokens, lengths, labels


class DeviceSplit:
    """A split as tensors on the device, where batches are gathered."""

    def __init__(self, split: Split, device: torch.device):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # mapped files are read-only
            self.tokens = torch.from_numpy(np.ascontiguousarray(split.tokens)).to(device)
        self.labels = torch.from_numpy(split.labels).to(device)
        self.lengths = None if split.lengths is None else torch.from_numpy(split.lengths).to(device)

    def __len__(self) -> int:
        return len(self.labels)

    def batch(self, rows: Tensor) -> Batch:
        """Return the examples with these numbers."""
        tokens = self.tokens.index_select(0, rows)
        lengths = None if self.lengths is None else self.lengths.index_select(0, rows)
        return tokens, lengths, self.labels.index_select(0, rows)

    @property
    def bytes(self) -> int:
        tensors = [self.tokens, self.labels, self.lengths]
        return sum(t.numel() * t.element_size() for t in tensors if t is not None)


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
