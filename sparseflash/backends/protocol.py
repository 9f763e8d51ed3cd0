"""What a backend is: a module with the names of `Backend`."""

from collections.abc import Sequence
from typing import Any, Literal, NamedTuple, Protocol

import torch
from torch import Tensor

from sparseflash.problem import Problem
from sparseflash.schedule.blocks import Schedule, TileLists
from sparseflash.schedule.tile_spec import TileSpec

Direction = Literal["forward", "backward"]
DIRECTIONS: tuple[Direction, ...] = ("forward", "backward")


class Walk(NamedTuple):
    """What a kernel goes through: the schedule (None: dense) and the work lists made of it.

    Those of a static mask are the same objects in every call of a plan; a dynamic schedule has
    others each time, of the same extents.
    """

    schedule: Schedule | None
    lists: tuple[TileLists, ...]


class TermTensors(NamedTuple):
    """Tensors of a call beside q, k and v."""

    sink: Tensor | None = None  # (H,), float32, or float64 like q
    tables: tuple[Tensor, ...] = ()  # of `Options.score`, contiguous, in their own dtypes

    @property
    def flat(self) -> tuple[Tensor | None, ...]:
        """The sink, then the tables."""
        return self.sink, *self.tables

    @classmethod
    def of(cls, flat: Sequence[Tensor | None]) -> "TermTensors":
        """Return the terms of `flat`."""
        return cls(flat[0], tuple(flat[1:]))  # pyright: ignore[reportArgumentType]


NO_TERMS = TermTensors()


class Results(NamedTuple):
    """What a forward gives."""

    out: Tensor  # (B, H, N_q, D_v), laid out like q
    lse: Tensor  # (B, H, N_q), float32, or float64 like q
    max_scores: Tensor | None = None  # like lse; None where the problem does not ask for it

    def asked(self, return_lse: bool) -> Any:
        """out alone, or a tuple of it and what the call asks for."""
        found = (self.out, self.lse) if return_lse else self.out
        if self.max_scores is None:
            return found
        return (*found, self.max_scores) if return_lse else (found, self.max_scores)


class Saved(NamedTuple):
    """What the forward leaves for the backward."""

    q: Tensor
    k: Tensor
    v: Tensor
    out: Tensor
    lse: Tensor
    seed: Tensor | None
    terms: TermTensors = NO_TERMS


class Gradients(NamedTuple):
    """What a backward gives: like the inputs, and None for a sink that the call does not have."""

    q: Tensor
    k: Tensor
    v: Tensor
    sink: Tensor | None = None
    tables: tuple[Tensor | None, ...] = ()  # None for those without a gradient


class Forward(Protocol):
    """A forward prepared for one problem."""

    @property
    def specs(self) -> tuple[TileSpec, ...]:
        """The work lists that a call expects in `Walk.lists`."""
        ...

    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, seed: Tensor | None, walk: Walk,
        terms: TermTensors = NO_TERMS,
    ) -> Results:  # fmt: skip
        """Return what the problem asks for."""
        ...


class Backward(Protocol):
    """A backward prepared for one problem."""

    @property
    def specs(self) -> tuple[TileSpec, ...]:
        """The work lists that a call expects in `Walk.lists`."""
        ...

    def __call__(
        self, dout: Tensor, dlse: Tensor | None, saved: Saved, walk: Walk
    ) -> Gradients: ...


class Backend(Protocol):
    """A family of kernels. To add one, write its module and name it in `registry.BACKENDS`."""

    @property
    def name(self) -> str: ...

    def unsupported(self, problem: Problem, direction: Direction) -> str | None:
        """Why this backend cannot run the problem in this direction, with a remedy, or None."""
        ...

    def plan_forward(self, problem: Problem, schedule: Schedule | None) -> Forward:
        """Prepare the forward of a supported problem.

        schedule: None for dense attention. Of a dynamic one only `facts` may be used.
        """
        ...

    def plan_backward(self, problem: Problem, schedule: Schedule | None) -> Backward:
        """Prepare the backward of a supported problem, likewise."""
        ...


def empty_out(q: Tensor, v: Tensor) -> Tensor:
    """Uninitialised out (B, H_q, N_q, D_v), with heads and tokens in memory in the order of q."""
    head_dim = v.size(-1)
    if head_dim == q.size(-1):
        return torch.empty_like(q)
    batch, heads, n_q, _ = q.shape
    if q.stride(1) < q.stride(2):
        return q.new_empty(batch, n_q, heads, head_dim).transpose(1, 2)
    return q.new_empty(batch, heads, n_q, head_dim)
