"""Attention of an empty batch, of no queries or over no keys: the results of the empty sum."""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from sparseflash.backends.protocol import (
    NO_TERMS,
    Gradients,
    Results,
    Saved,
    TermTensors,
    Walk,
    empty_out,
)
from sparseflash.backends.terms import sink_gradient
from sparseflash.problem import Problem


class Forward(NamedTuple):
    problem: Problem
    specs = ()

    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, seed: Tensor | None, walk: Walk,
        terms: TermTensors = NO_TERMS,
    ) -> Results:  # fmt: skip
        out, lse = nothing(q, v)
        max_scores = lse.clone() if self.problem.options.max_scores else None
        if terms.sink is not None:
            lse.copy_(terms.sink[:, None])
        return Results(out, lse, max_scores)


class Backward(NamedTuple):
    specs = ()

    def __call__(self, dout: Tensor, dlse: Tensor | None, saved: Saved, walk: Walk) -> Gradients:
        bias = saved.terms.bias
        of_bias = None if bias is None else torch.zeros_like(bias)
        dq, dk, dv = (torch.zeros_like(t) for t in saved[:3])
        return Gradients(dq, dk, dv, sink_gradient(dout, dlse, saved), of_bias)


def nothing(q: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Return out (B, H, N_q, D_v) of zeros and lse (B, H, N_q) of -inf."""
    dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
    lse = torch.full(q.shape[:3], -math.inf, dtype=dtype, device=q.device)
    return empty_out(q, v).zero_(), lse
