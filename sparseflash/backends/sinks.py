"""Attention sinks, around any backend: a logit z joins the denominator of every query of a head.

    lse' = logaddexp(lse, z)    out' = out exp(lse - lse')    dz = -sum exp(z - lse') delta'

with delta' = rowsum(dout out') - dlse'. From out' and lse' the backward of a backend makes the
gradients of q, k and v as ever. See docs/internals/kernels.md.
"""

import math

import torch
from torch import Tensor

from sparseflash.backends.protocol import Saved


def add_sink(out: Tensor, lse: Tensor, sink: Tensor) -> Tensor:
    """Rescale out (B, H, N_q, D_v) in place; the LSE with the sink (H,)."""
    total = torch.logaddexp(lse, sink[:, None])
    # an empty row without a sink has the LSE -inf, and -inf minus -inf would be NaN
    out.mul_((lse - total.masked_fill(total == -math.inf, 0.0)).exp_().unsqueeze(-1))
    return total


def sink_gradient(dout: Tensor, dlse: Tensor | None, saved: Saved) -> Tensor:
    """(H,) like the sink."""
    out, lse, sink = saved.out, saved.lse, saved.terms.sink
    assert sink is not None
    delta = (dout.to(lse.dtype) * out).sum(-1)
    if dlse is not None:
        delta = delta - dlse
    p = (sink[:, None] - lse.masked_fill(lse == -math.inf, math.inf)).exp_()
    return -(p * delta).sum((0, 2))
