"""Soft-capping, biases by distance and sinks, by plain torch. See `sparseflash.Terms`."""

import math

import torch
from torch import Tensor

from sparseflash.backends.protocol import Saved, TermTensors


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
