"""Plans: all that calls of one problem share, prepared once and kept in the cache."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from masks import BlockLists, BlockMask, Mask
from masks.spec import find
from sparseflash.backends.cpu_choices import block_size_for
from sparseflash.backends.layouts import WITH_COPIES, CopiesBackward, CopiesForward, copies_for
from sparseflash.backends.protocol import (
    Backward,
    Forward,
    Gradients,
    Results,
    Saved,
    TermTensors,
    Walk,
)
from sparseflash.backends.registry import BACKENDS, NothingBackward, NothingForward, choose
from sparseflash.cache import cache
from sparseflash.decoding.triton import FewQueries, is_for_few
from sparseflash.problem import Layout, Options, Problem, describe, key_of
from sparseflash.request import Request, request_of, wants_grad
from sparseflash.schedule.blocks import (
    Schedule,
    ScheduleFacts,
    TileLists,
    as_tensors,
    schedule_for,
)
from sparseflash.schedule.tile_lists import tile_lists
from sparseflash.schedule.tile_spec import TileSpec


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
    ) -> Results:  # fmt: skip
        """schedule: that of this call, where the mask of the problem is made at run time."""
        walk = self.forward_walk or _walk(schedule, self.run_forward.specs, self.problem)
        return self.run_forward(q, k, v, seed, walk, terms)

    def backward(
        self, dout: Tensor, dlse: Tensor | None, saved: Saved, schedule: Schedule | None
    ) -> Gradients:
        assert self.run_backward is not None
        walk = self.backward_walk or _walk(schedule, self.run_backward.specs, self.problem)
        return self.run_backward(dout, dlse, saved, walk)

    @property
    def specs(self) -> tuple[TileSpec, ...]:
        """The work lists of both directions, none of them twice."""
        wanted = dict.fromkeys(self.run_forward.specs)
        if self.run_backward is not None:
            wanted |= dict.fromkeys(self.run_backward.specs)
        return tuple({spec._replace(sms=0): spec for spec in wanted}.values())

    def lists(self, schedule: Schedule | None) -> tuple[TileLists, ...]:
        """Return the lists of `specs`."""
        return tuple(tile_lists(schedule, spec, self.problem.device) for spec in self.specs)


def plan_for(
    problem: Problem, mask: Mask | BlockMask | None = None, schedule: Schedule | None = None
) -> Plan:
    """Return the plan of a problem, from the cache.

    mask: looked up by its key where it is None. schedule: one whose facts are `problem.mask`, for
        calls that bring their own.
    Raises ValueError where no backend, or not the named one, can run the problem in every direction
    that is asked for.
    """
    plan = cache.get(problem)
    if plan is not None:
        return plan
    if 0 in (problem.batch, problem.n_q, problem.n_k):
        nothing_to_do = Walk(None, ())
        backward = NothingBackward() if problem.needs_grad else None
        run = NothingForward(problem), backward, nothing_to_do, nothing_to_do
        plan = Plan(problem, "none", "none" if backward else None, *run)
        cache.put(problem, plan, ())
        return plan
    forward = choose(problem, "forward")
    backward = choose(problem, "backward") if problem.needs_grad else None
    dynamic = schedule is not None
    if isinstance(problem.mask, str):
        extents = problem.n_q, problem.n_k, problem.batch, problem.heads
        mask = find(problem.mask) if mask is None else mask
        assert mask is not None
        on_cpu = all(backend is None or backend.name == "cpu" for backend in (forward, backward))
        size = block_size_for(mask, *extents[:2], problem.heads) if on_cpu else 128
        schedule = schedule_for(mask, *extents, problem.device, size, kv_heads=problem.kv_heads)
    few = forward.name in ("hopper", "triton") and is_for_few(problem, schedule and schedule.facts)
    copies, cut = None, problem  # what the kernels run
    named = [backend.name for backend in (forward, backward) if backend is not None]
    if not few and set(named) <= WITH_COPIES:
        copies = copies_for(problem, schedule)
    if copies is not None:
        cut, schedule = copies.problem(problem), copies.schedule
    run_forward = (FewQueries if few else forward.plan_forward)(cut, schedule)
    run_backward = backward.plan_backward(cut, schedule) if backward else None
    if copies is not None:
        run_forward = CopiesForward(run_forward, copies)
        run_backward = run_backward and CopiesBackward(run_backward, copies)
    walks: list[Walk | None] = [None, None]
    tensors: list[Tensor] = []
    if not dynamic:
        tensors += copies.tensors if copies else as_tensors(schedule)[0] if schedule else []
        for i, run in enumerate((run_forward, run_backward)):
            if run is not None:
                walk = walks[i] = _walk(schedule, run.specs, problem)
                tensors += (t for lists in walk.lists for t in lists.tensors)
    names = forward.name, backward.name if backward else None
    plan = Plan(problem, *names, run_forward, run_backward, *walks)
    cache.put(problem, plan, tensors)
    return plan


def prepared(
    problem: Problem, mask: Mask | BlockMask | None = None, schedule: Schedule | None = None
) -> Plan:
    """`plan_for`, without a backward where the named backend has none: `attention` refuses it only
    where it needs gradients.
    """
    name = problem.options.backend
    if name != "auto" and BACKENDS[name].unsupported(problem, "backward") is not None:
        problem = problem._replace(needs_grad=False)
    return plan_for(problem, mask, schedule)


def plan_of_call(
    q: Tensor, k: Tensor, v: Tensor, mask: Any, options: Options, terms: TermTensors
) -> tuple[Plan, Tensor, Tensor, Tensor, Schedule | None]:
    """Return the plan of an eager call, and the tensors and the schedule to run it with.

    The plan of a call that came before costs little: only what finding it needs is checked.
    """
    needs_grad = wants_grad(q, k, v, terms)
    if mask is None or isinstance(mask, (Mask, BlockMask)):
        plan, dtype, device = None, q.dtype, q.device
        if k.dtype is v.dtype is dtype and k.device == v.device == device:
            key = None if mask is None else mask.key
            try:
                plan = cache.get(key_of(q, k, v, key, options, needs_grad))
            except RuntimeError:  # of sparse and nested tensors, which are refused below
                pass
        if plan is not None:
            return plan, q, k, v, None
    request = request_of(q, k, v, mask, options, terms, needs_grad=needs_grad)
    plan = plan_for(problem_of(request), request.mask, request.schedule)
    return plan, request.q, request.k, request.v, request.schedule


def problem_of(request: Request) -> Problem:
    """Return what the plan of a call depends on."""
    q, k, v, mask, schedule, options, _, needs_grad = request
    identity = schedule.facts if schedule is not None else mask.key if mask is not None else None
    return describe(q, k, v, identity, options, needs_grad)


def traced_specs(
    layouts: tuple[Layout, ...], dtype: torch.dtype, device: torch.device,
    numbers: tuple[int, ...], options: tuple[Any, ...], needs_grad: bool,
) -> tuple[tuple[Any, ...], ...]:  # fmt: skip
    """Return the fields of each `TileSpec` of calls with a selection.

    layouts: shapes and strides of q, k and v; numbers: the ints of a `ScheduleFacts`.
    torch.compile calls it while it traces, and takes the result for a constant. That works with
    plain tuples only.
    """
    facts = ScheduleFacts(*numbers, lists=())
    fields = *layouts, dtype, device, facts, Options(*options), "", needs_grad
    problem = Problem._make(fields)
    nothing = torch.empty(0, device="meta")
    lists = BlockLists(nothing, nothing, torch.empty(facts.entries, device="meta"), nothing)
    made = prepared(problem, schedule=Schedule(lists, lists, nothing, *facts[:7]))
    return tuple(tuple(spec) for spec in made.specs)


# what torch.compiler.assume_constant_result does, which takes seconds to import the compiler
traced_specs._dynamo_marked_constant = True  # pyright: ignore[reportFunctionMemberAccess]


def traced_plan(request: Request) -> Schedule:
    """Return the schedule of a call with its lists, as torch.compile traces it: they become part of
    its graph.
    """
    schedule, qkv = request.schedule, (request.q, request.k, request.v)
    assert schedule is not None
    known = [t.shape for t in qkv] + [t.stride() for t in qkv] + [schedule.facts[:8]]
    # the lists belong to these lengths: len(range(n)) is n itself where n is a symbol
    *layouts, facts = (tuple(len(range(n)) for n in numbers) for numbers in known)
    device = request.q.device
    made = traced_specs(
        tuple(layouts), request.q.dtype, device, facts, tuple(request.options), request.needs_grad
    )
    specs = [TileSpec(*spec) for spec in made]
    return schedule.with_lists(tuple(tile_lists(schedule, spec, device) for spec in specs))


def _walk(schedule: Schedule | None, specs: Sequence[TileSpec], problem: Problem) -> Walk:
    return Walk(schedule, tuple(tile_lists(schedule, spec, problem.device) for spec in specs))
