"""Soft-capping, biases by distance and sinks, by plain torch. See `sparseflash.Terms`."""

import math

import torch
from torch import Tensor

from sparseflash.backends.protocol import Saved, TermTensors
from sparseflash.kernels.common.shapes import LOG2E
from sparseflash.schedule.blocks import Schedule


def capped(scores: Tensor, cap: float) -> Tensor:
    """Return the scores within -cap and cap; cap 0: as they are."""
    return (scores / cap).tanh_().mul_(cap) if cap else scores


def cap_slope(capped: Tensor, cap: float) -> Tensor:
    """Return the derivative of capped scores, by the capped scores."""
    return 1.0 - (capped / cap).square_()


def distances(q: Tensor, k: Tensor, n_q: int, n_k: int) -> Tensor:
    """Of all keys (..., 1, K) from all queries (..., Q, 1), given their numbers."""
    return k - q + (n_q - n_k)


def position_bias(terms: TermTensors, head: Tensor, distance: Tensor) -> Tensor:
    """Return what slopes and bias add to the logits of these heads at these distances."""
    total = torch.zeros((), device=distance.device)
    if terms.slopes is not None:
        total = -terms.slopes[head] * distance.abs()
    if terms.bias is not None:
        total = total + terms.bias[head, entry(terms.bias, distance)]
    return total


def entry(bias: Tensor, distance: Tensor) -> Tensor:
    """Return the column of the bias that a distance takes."""
    radius = bias.shape[1] // 2
    return distance.clamp(-radius, radius).add_(radius)


def sink_gradient(dout: Tensor, dlse: Tensor | None, saved: Saved) -> Tensor | None:
    """(H,) like the sink: -sum exp(sink - lse) delta, with delta = rowsum(dout * out) - dlse.

    out and lse are those with the sink. None where there is no sink. The kernels of other backends
    sum it where they make delta. See docs/internals/kernels.md.
    """
    out, lse, sink = saved.out, saved.lse, saved.terms.sink
    if sink is None:
        return None
    delta = (dout.to(lse.dtype) * out).sum(-1)
    if dlse is not None:
        delta = delta - dlse
    p = (sink[:, None] - lse.masked_fill(lse == -math.inf, math.inf)).exp_()
    return -(p * delta).sum((0, 2))


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
