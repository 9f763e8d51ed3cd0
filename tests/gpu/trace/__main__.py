"""A training run in which every call of the attention is watched for a result that stands out.

    python -m tests.gpu.trace task=text attention=flash steps=5000
    python -m tests.gpu.trace task=text attention=flash compile=false graph=false

The overrides are those of experiments.train. A call stands out where a result is not finite, or a
hundred times as large as in the calls before. What the first such call of every place in the model
was given and gave is kept, in the captured graph too; at the end it is run again, by the backend
that ran it and by others. A fault that comes and goes shows as a second answer that differs.
"""

import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from hydra import compose, initialize_config_module
from torch import Tensor

from experiments.lra import run as training
from experiments.lra.settings import make_settings
from experiments.training.step import Trainer
from sparseflash.backends.protocol import NO_TERMS, Saved
from sparseflash.plan import Plan, plan_for
from sparseflash.schedule import as_tensors, from_tensors
from sparseflash.testing import relative_error

TIMES = 100.0  # the usual size, from which a result stands out
SETTLED = 20  # calls before a usual size is known
OTHERS = ("triton", "cpu")  # backends that run a kept call again, where they can


@dataclass
class Place:
    """One call of the model: forward or backward of one layer."""

    direction: str
    plan: Plan | None = None
    numbers: list[int] | None = None  # of the schedule that its calls bring
    usual: dict[str, Tensor] = field(default_factory=dict)
    kept: dict[str, Tensor] = field(default_factory=dict)
    step: Tensor | None = None  # of the call that is kept; -1: none
    calls: Tensor | None = None


class Watch:
    """Stands between the plans and their callers while a step is taken."""

    def __init__(self):
        self.places: list[Place] = []
        self.number = 0
        self.stepping = False
        self.forward, self.backward = Plan.forward, Plan.backward

    def run_forward(self, plan, q, k, v, seed, terms, schedule):
        results = self.forward(plan, q, k, v, seed, terms, schedule)
        given = {"q": q, "k": k, "v": v, "seed": seed}
        found = {"out": results.out, "lse": results.lse}
        self.look("forward", plan, schedule, given, found)
        return results

    def run_backward(self, plan, dout, dlse, saved, schedule):
        results = self.backward(plan, dout, dlse, saved, schedule)
        given = {"dout": dout, "dlse": dlse, **saved._replace(terms=None)._asdict()}
        found = dict(zip(("dq", "dk", "dv"), results[:3], strict=True))
        self.look("backward", plan, schedule, given, found)
        return results

    @torch.no_grad()
    def look(self, direction, plan, schedule, given, found) -> None:
        if not self.stepping:
            return
        if self.number == len(self.places):
            self.places.append(Place(direction))
        place = self.places[self.number]
        self.number += 1
        tensors, numbers = ([], None) if schedule is None else as_tensors(schedule)
        place.plan, place.numbers = plan, numbers
        device = given["q"].device
        if place.step is None or place.calls is None:  # in the warm-up: not in the captured graph
            place.step = torch.full((), -1, dtype=torch.int64, device=device)
            place.calls = torch.zeros((), dtype=torch.int64, device=device)
            place.usual = {name: torch.zeros((), device=device) for name in found}
        strange = torch.zeros((), dtype=torch.bool, device=device)
        for name, t in found.items():
            # the LSE of a row with nothing to attend to is -inf
            size = (t.clamp(min=-1e4) if name == "lse" else t).abs().amax().float()
            usual = place.usual[name]
            large = (size > TIMES * usual) & (place.calls > SETTLED) & (usual > 0)
            odd = large | ~size.isfinite()
            usual.copy_(torch.where(odd, usual, usual + (size - usual) / SETTLED))
            strange = strange | odd
        everything = given | found | {f"schedule{i}": t for i, t in enumerate(tensors)}
        for name, t in everything.items():
            if t is not None and name not in place.kept:
                place.kept[name] = torch.zeros_like(t)
        now = strange & (place.step < 0)
        for name, kept in place.kept.items():
            kept.copy_(torch.where(now, everything[name], kept))
        place.step.copy_(torch.where(now, place.calls, place.step))
        place.calls.add_(1)

    def report(self) -> None:
        kept = [p for p in self.places if p.step is not None and p.step.item() >= 0]
        if not kept:
            print(f"no result of {len(self.places)} places stood out", flush=True)
        for place in sorted(kept, key=lambda p: p.step.item()):  # pyright: ignore
            self._report(place)

    def _report(self, place: Place) -> None:
        number, t = self.places.index(place), place.kept
        names = ("out", "lse") if place.direction == "forward" else ("dq", "dk", "dv")
        assert place.step is not None and place.plan is not None
        plan = place.plan
        own = plan.forward_backend if place.direction == "forward" else plan.backward_backend
        print(f"\nplace {number}, {place.direction}, call {place.step.item()}, {own}:")
        for name in names:
            size = t[name].nan_to_num().abs().max().item()
            usual = place.usual[name].item()
            print(f"  {name}: largest {size:.3g}, usually {usual:.3g}{_where(t[name], usual)}")
        for name in [own] * 3 + [name for name in OTHERS if name != own]:
            try:
                again = self._again(place, name)
            except Exception as error:
                print(f"  {name} cannot run it: {' '.join(str(error).split())[:150]}")
                continue
            pairs = zip(names, again, strict=True)
            errors = [f"{n} {relative_error(t[n], x):.2g}" for n, x in pairs]
            print(f"  again by {name}, relative difference: {', '.join(errors)}", flush=True)

    def _again(self, place: Place, backend: str) -> Sequence[Tensor]:
        t, schedule = place.kept, None
        assert place.plan is not None
        if place.numbers is not None:
            n = sum(name.startswith("schedule") for name in t)
            schedule = from_tensors([t[f"schedule{i}"] for i in range(n)], place.numbers)
        problem = place.plan.problem
        problem = problem._replace(options=problem.options._replace(backend=backend))
        plan, qkv = plan_for(problem, schedule=schedule), (t["q"], t["k"], t["v"])
        if place.direction == "forward":
            return self.forward(plan, *qkv, t.get("seed"), NO_TERMS, schedule)[:2]
        saved = Saved(*qkv, t["out"], t["lse"], t.get("seed"))
        return self.backward(plan, t["dout"], t.get("dlse"), saved, schedule)[:3]


def _where(t: Tensor, usual: float) -> str:
    """Which rows stand out."""
    odd = ~t.isfinite() | (t.abs() > TIMES * usual)
    odd = odd.any(-1) if t.dim() == 4 else odd & (t != float("-inf"))
    if not odd.any():
        return ""
    at = odd.nonzero()
    rows = at[:, 2].unique().tolist()
    return (
        f"; {len(at)} of {odd.numel()} rows stand out, {int(t.isnan().sum())} numbers are NaN; "
        f"(batch, head) {at[:, :2].unique(dim=0)[:6].tolist()}, rows {rows[:12]} to {rows[-1]}"
    )


def main(overrides: Sequence[str]) -> Any:
    watch = Watch()
    Plan.forward = lambda *call: watch.run_forward(*call)
    Plan.backward = lambda *call: watch.run_backward(*call)
    body = Trainer._body

    def watched(trainer: Trainer) -> None:
        watch.number, watch.stepping = 0, True
        body(trainer)
        watch.stepping = False

    Trainer._body = watched
    words = ["tensorboard=false", *overrides]
    with initialize_config_module("experiments.conf", version_base="1.3"):
        settings = make_settings(compose("train", words), words)
    try:
        training.train(settings)
    finally:
        watch.report()


if __name__ == "__main__":
    main(sys.argv[1:])
