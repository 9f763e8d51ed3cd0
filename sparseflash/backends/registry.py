"""The backends, the choice among them, and what runs where there is nothing to compute."""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from sparseflash.backends import cpu, hopper, reference, triton
from sparseflash.backends.protocol import (
    NO_TERMS,
    Backend,
    Direction,
    Gradients,
    Results,
    Saved,
    TermTensors,
    Walk,
    empty_out,
)
from sparseflash.backends.terms import sink_gradient
from sparseflash.problem import Problem

# The fastest first: the order of backend="auto".
BACKENDS: dict[str, Backend] = {
    "hopper": hopper,
    "triton": triton,
    "cpu": cpu,
    "reference": reference,
}
NAMES = tuple(BACKENDS)


def reasons(problem: Problem, direction: Direction) -> dict[str, str | None]:
    """For every backend, in order of preference: why it cannot run a problem, or None."""
    return {name: backend.unsupported(problem, direction) for name, backend in BACKENDS.items()}


def choose(problem: Problem, direction: Direction) -> Backend:
    """Return the backend that the problem names, or for "auto" the first that can run this
    direction.

    Raises ValueError with the reasons where it, or none, can.
    """
    name = problem.options.backend
    refused = []
    for candidate in BACKENDS.values() if name == "auto" else (BACKENDS[name],):
        reason = candidate.unsupported(problem, direction)
        if reason is None:
            return candidate
        call = "this call" if direction == "forward" else "the backward of this call"
        refused.append(f"backend {candidate.name!r} cannot run {call}: {reason}")
    advice = ""
    if direction == "backward" and name != "auto":
        advice = "; pass backend='auto', which may take another backend for the backward"
    raise ValueError("; ".join(refused) + advice)


class NothingForward(NamedTuple):
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


class NothingBackward(NamedTuple):
    specs = ()

    def __call__(self, dout: Tensor, dlse: Tensor | None, saved: Saved, walk: Walk) -> Gradients:
        dq, dk, dv = (torch.zeros_like(t) for t in saved[:3])
        of_tables = tuple(map(torch.zeros_like, saved.terms.tables))
        return Gradients(dq, dk, dv, sink_gradient(dout, dlse, saved), of_tables)


def nothing(q: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Return out (B, H, N_q, D_v) of zeros and lse (B, H, N_q) of -inf."""
    lse = q.new_full(q.shape[:3], -math.inf, dtype=torch.promote_types(q.dtype, torch.float32))
    return empty_out(q, v).zero_(), lse
