"""Plans: all that calls of one problem share, prepared once and kept in the cache."""

from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor

from masks import BlockMask, Mask
from masks.spec import find
from sparseflash.backends.protocol import Backward, Forward, Saved, TermTensors, Walk
from sparseflash.backends.registry import choose
from sparseflash.cache import cache
from sparseflash.problem import Problem
from sparseflash.schedule import Schedule, as_tensors, schedule_for
from sparseflash.sinks import sink_gradient
from sparseflash.tiles.lists import tile_lists
from sparseflash.tiles.tile_lists import TileLists
from sparseflash.tiles.tile_spec import TileSpec


class Plan(NamedTuple):
    """A problem with its backends and what they prepared.

    forward_walk, backward_walk: None where every call brings its own schedule.
    """

    problem: Problem
    forward_backend: str
    backward_backend: str | None  # None: no gradient was asked for
    run_forward: Forward
    run_backward: Backward | None
    forward_walk: Walk | None
    backward_walk: Walk | None

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, seed: Tensor | None, terms: TermTensors,
        schedule: Schedule | None,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        """out (B, H, N_q, D_v) and lse (B, H, N_q).

        schedule: that of this call, where the mask of the problem is made at run time.
        """
        walk = self.forward_walk or _walk(schedule, self.run_forward.specs, self.problem)
        return self.run_forward(q, k, v, seed, walk, terms)

    def backward(
        self, dout: Tensor, dlse: Tensor | None, saved: Saved, schedule: Schedule | None
    ) -> tuple[Tensor | None, ...]:
        """dq, dk, dv like q, k, v, and the gradients of sink and bias."""
        assert self.run_backward is not None
        walk = self.backward_walk or _walk(schedule, self.run_backward.specs, self.problem)
        dq, dk, dv, *dbias = self.run_backward(dout, dlse, saved, walk)
        dsink = None if saved.terms.sink is None else sink_gradient(dout, dlse, saved)
        return dq, dk, dv, dsink, *(dbias or [None])

    def lists(self, schedule: Schedule | None) -> tuple[TileLists, ...]:
        """The work lists of both directions, none of them twice."""
        specs = dict.fromkeys(self.run_forward.specs)
        if self.run_backward is not None:
            specs |= dict.fromkeys(self.run_backward.specs)
        made: tuple[TileLists, ...] = ()
        for spec in specs:
            if not any(spec.matches(lists) for lists in made):
                made += (tile_lists(schedule, spec, self.problem.device),)
        return made


def plan_for(
    problem: Problem, mask: Mask | BlockMask | None = None, schedule: Schedule | None = None
) -> Plan:
    """The plan of a problem, from the cache.

    mask: looked up by its key where it is None. schedule: one with the facts in `problem.mask`,
        where that is no key.
    Raises ValueError where no backend, or not the named one, can run the problem in every direction
    that is asked for.
    """
    plan = cache.get(problem)
    if plan is not None:
        return plan
    forward = choose(problem, "forward")
    backward = choose(problem, "backward") if problem.needs_grad else None
    dynamic = schedule is not None
    if isinstance(problem.mask, str):
        extents = problem.n_q, problem.n_k, problem.batch, problem.heads
        mask = find(problem.mask) if mask is None else mask
        schedule = schedule_for(mask, *extents, problem.device)  # pyright: ignore
    run_forward = forward.plan_forward(problem, schedule)
    run_backward = backward.plan_backward(problem, schedule) if backward else None
    walks: list[Walk | None] = [None, None]
    tensors: list[Tensor] = []
    if not dynamic:
        tensors += as_tensors(schedule)[0] if schedule else []
        for i, run in enumerate((run_forward, run_backward)):
            if run is not None:
                walk = walks[i] = _walk(schedule, run.specs, problem)
                tensors += (t for lists in walk.lists for t in lists.tensors)
    names = forward.name, backward.name if backward else None
    plan = Plan(problem, *names, run_forward, run_backward, *walks)
    cache.put(problem, plan, tensors)
    return plan


def _walk(schedule: Schedule | None, specs: Sequence[TileSpec], problem: Problem) -> Walk:
    return Walk(schedule, tuple(tile_lists(schedule, spec, problem.device) for spec in specs))
