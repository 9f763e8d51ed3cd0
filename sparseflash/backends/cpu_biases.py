"""Biases by distance, and their gradient, for the blocks of the CPU backend."""

import torch
from torch import Tensor

from sparseflash.backends.protocol import TermTensors
from sparseflash.backends.terms import distances, entry, position_bias
from sparseflash.kernels.scale import LOG2E
from sparseflash.schedule import Schedule


class Biases:
    """Slopes and bias of `Terms`, or nothing; pairs of blocks are those of `BlockGroups`."""

    def __init__(self, schedule: Schedule, terms: TermTensors, q: Tensor, *, by_query: bool):
        self.given = terms.slopes is not None or terms.bias is not None
        if not self.given:
            return
        self.terms, self.heads, self.by_query = terms, q.shape[1], by_query
        self.extents = schedule.n_q, schedule.n_k
        of_q = schedule.block_q, -(-schedule.n_q // schedule.block_q)
        of_k = schedule.block_k, -(-schedule.n_k // schedule.block_k)
        self.own, self.other = (of_q, of_k) if by_query else (of_k, of_q)
        bias = terms.bias
        # one sum for each batch entry and head, as no two threads share one
        self.sums = None if bias is None else bias.new_zeros(q.shape[0] * self.heads, bias.shape[1])

    def add(self, scores: Tensor, own: Tensor, other: Tensor) -> Tensor:
        """To scores in base 2, in place: (lists, own block, others)."""
        if not self.given:
            return scores
        pair, distance = self._places(own, other)
        return scores.add_(position_bias(self.terms, pair % self.heads, distance), alpha=LOG2E)

    def gather(self, ds: Tensor, own: Tensor, other: Tensor) -> None:
        """Add the gradients of such scores, in base e, to that of the bias."""
        if self.given and self.sums is not None:
            pair, distance = self._places(own, other)
            place = pair * self.sums.shape[1] + entry(self.sums, distance)
            self.sums.view(-1).index_add_(0, place.flatten(), ds.flatten())

    def gradient(self) -> list[Tensor]:
        """Return the gradient of the bias, if there is one."""
        if not self.given or self.sums is None:
            return []
        return [self.sums.view(-1, self.heads, self.sums.shape[1]).sum(0)]

    def _places(self, own: Tensor, other: Tensor) -> tuple[Tensor, Tensor]:
        """Return the batch entry and head of every list (lists, 1, 1), and all distances."""
        (block, n), (other_block, n_other) = self.own, self.other
        first = (own % n * block)[:, None] + torch.arange(block)
        second = (other % n_other * other_block)[..., None] + torch.arange(other_block)
        first, second = first[:, :, None], second.flatten(1)[:, None]
        q, k = (first, second) if self.by_query else (second, first)
        return (own // n)[:, None, None], distances(q, k, *self.extents)
