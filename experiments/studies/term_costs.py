"""What the terms of the softmax cost: time of a call with a term over that without, same backend.

Sinks, soft-capping by a cap that few or most scores come near, slopes and the bias by distance,
forward and backward, and the row maxima, forward: dense and on a random mask. Calls pass the gate
with the gradients of their terms, and take turns with those without. See docs/guide/attention.md.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from itertools import product
from typing import Any

import torch
from torch import Tensor

import sparseflash
from experiments.bench.cases import DENSE, DTYPES, Case
from experiments.bench.gate import LIMIT, Gate, WrongResult, learned
from experiments.bench.step import Step, draw
from experiments.bench.timing import measure
from experiments.common.rows import OK, Row, last_versions
from experiments.common.tables import MISSING, markdown, pivot
from experiments.studies import runner
from experiments.studies.runner import Run
from sparseflash import Terms
from sparseflash.kernels.common.device import nvidia_capability
from sparseflash.testing import logits, relative_error

KEY = "term provider direction batch heads kv_heads n head_dim dtype block radius round".split()
NONE, MAX = "none", "max"
TERMS = ("sink", "softcap", "low_softcap", "slopes", "bias")
# Scores are about 1. Both are so low that the gate sees whether there is a cap. Below 15, few
# scores reach 0.4 of it, as in models that were trained with one; below 2, most of them do.
CAPS = {"softcap": 15.0, "low_softcap": 2.0}
RADIUS = 128  # of the bias: longest distance with an entry of its own
OF_TERMS = 4  # the limit of their gradients over that of the others: sums of roundings that cancel
BACKENDS = {
    "hopper": (NONE, "sink", MAX),
    **dict.fromkeys(("triton", "cpu"), (NONE, *TERMS, MAX)),
}
# the cost that is allowed
BARS = {"sink": 0.05, MAX: 0.05} | dict.fromkeys(TERMS[1:], 0.15)


@dataclass(kw_only=True)
class Options(runner.Options):
    name: str = "term_costs"
    densities: list[float] = field(default_factory=lambda: [1.0, 0.25])  # 1: no mask
    batch: int
    heads: int
    seq_len: int
    head_dims: list[int]
    dtype: str
    block: int  # tokens of a block of the masks
    rounds: int = 3


DEFAULTS = {
    "cuda": Options(
        batch=2, heads=16, seq_len=8192, head_dims=[64, 128], dtype="bfloat16", block=128,
        seconds=0.06,
    ),
    "cpu": Options(batch=1, heads=2, seq_len=512, head_dims=[64], dtype="float32", block=64),
}  # fmt: skip


@dataclass(frozen=True)
class Group:
    """Calls measured in turn: a case on one backend, with each of its terms and without."""

    case: Case
    provider: str  # the backend

    def row(self) -> Row:
        case = self.case
        sizes = {n: getattr(case, n) for n in "batch heads kv_heads head_dim dtype".split()}
        sizes |= {"n": case.n_q, "block": case.block_q, "radius": RADIUS}
        return sizes | {"mask": case.mask, "density": case.density, "provider": self.provider}


def cases(run: Run) -> list[Group]:
    """Return each head dim, density and backend."""
    o, found = run.options, []
    hopper = run.device.type == "cuda" and nvidia_capability(run.device) == (9, 0)
    own = ["hopper", "triton"] if hopper else ["triton" if run.device.type == "cuda" else "cpu"]
    for head_dim, density, backend in product(o.head_dims, o.densities, own):
        mask, block = f"random_blocks({density}, block={o.block})", o.block
        if density == 1:
            mask, block = DENSE, 0
        sizes = o.batch, o.heads, o.heads, o.seq_len, o.seq_len, head_dim, o.dtype
        case = Case(mask, *sizes, block, block)
        if block:
            case.check()
        found.append(Group(case, backend))
    return found


def ways(group: Group, run: Run) -> list[Row]:
    """Return the terms that a backend has, and none of them, in their directions."""
    return [
        {"term": term, "direction": direction}
        for term in BACKENDS[group.provider]
        for direction in (("forward",) if term == MAX else ("forward", "backward"))
    ]


def opened(group: Group, run: Run) -> Callable[[Row], dict[str, Any]]:
    """Return what measures a direction of a term."""

    @cache
    def prepared(term: str) -> tuple[TermStep, dict[str, Any]]:
        step = step_of(group.case, group.provider, term, run.device)
        return step, passed(*gate_errors(group.case, step), LIMIT[DTYPES[group.case.dtype]])

    def one(row: Row) -> dict[str, Any]:
        step, errors = prepared(row["term"])
        call = step.call(row["direction"])
        return errors | measure(call, run.device, run.options.seconds)._asdict()

    return one


def passed(error: float, of_terms: float | None, limit: float) -> dict[str, Any]:
    """Return the errors as fields of a row. Raise WrongResult if one is beyond its limit."""
    if not error < limit:
        raise WrongResult(f"wrong result: error {error:.3g}, limit {limit:g}", error)
    if of_terms is not None and not of_terms < (most := OF_TERMS * limit):
        text = f"wrong gradient of a term: error {of_terms:.3g}, limit {most:g}"
        raise WrongResult(text, of_terms)
    return {"error": error, "term_error": of_terms}


def terms_of(name: str, heads: int, device: torch.device) -> Terms | None:
    """Return the term of that name, or None; what is learned has a gradient."""
    generator = torch.Generator(device).manual_seed(1)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, device=device, generator=generator).requires_grad_()

    values = {
        "sink": normal(heads),
        "softcap": CAPS.get(name, CAPS["softcap"]),
        # those of ALiBi, arXiv 2108.12409
        "slopes": 2.0 ** (-8 / heads * torch.arange(1, heads + 1, device=device)),
        "bias": normal(heads, 2 * RADIUS + 1),
    }
    own = "softcap" if name in CAPS else name
    return Terms(**{own: values[own]}) if own in values else None


@dataclass(frozen=True, eq=False)
class TermStep(Step):
    """Forward and backward of attention with terms; maxima: a call that gives the row maxima."""

    terms: Terms | None = None
    maxima: Callable[[], Tensor] | None = None


def step_of(case: Case, backend: str, term: str, device: torch.device) -> TermStep:
    """Return the call of a case with a term, or with the row maxima, on inputs of its own."""
    terms, blocks = terms_of(term, case.heads, device), case.blocks
    options: dict[str, Any] = {"terms": terms, "backend": backend}
    options["return_max_scores"] = term == MAX

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        found = sparseflash.attention(q, k, v, blocks, **options)
        return found[0] if term == MAX else found

    qkv, maxima = draw(case, device), None
    if term == MAX:
        maxima = lambda: sparseflash.attention(*qkv, blocks, **options)[1]  # noqa: E731
    return TermStep(attend, qkv, tuple(learned(terms).values()), terms, maxima)


def gate_errors(case: Case, step: TermStep) -> tuple[float, float | None]:
    """Return the largest relative error of output, dq, dk, dv and, where they are kept, the row
    maxima; and that of the gradients of terms, which the sampled rows determine too.
    """
    gate = Gate(case, *step.qkv, terms=step.terms)
    dq, dk, dv, *grads = step.both(gate.dout)
    assert dq is not None and dk is not None and dv is not None
    errors = [gate.forward_error(step.forward()), gate.backward_error(dq, dk, dv)]
    if step.maxima is not None:
        found = step.maxima()
        for b, heads, g in gate.samples:
            q, k, _, seen = gate.inputs(b, heads, g)
            wanted = logits(q, k, seen).amax(-1)[0]
            errors.append(relative_error(found[b, heads, gate.rows], wanted))
    parts = zip(*(slice_[4:] for slice_ in gate.expected), strict=True)
    totals = [torch.stack(same).sum(0) for same in parts]
    of_terms = [relative_error(a, b) for a, b in zip(grads, totals, strict=True) if a is not None]
    return max(errors), max(of_terms, default=None)


def tables(frame: Any) -> dict[str, str]:
    """Return, for each shape, calls down and terms across: the median cost of the rounds in
    percent, over the call without terms in the same round; ! above its bar.
    """
    rows = last_versions(frame[frame.status == OK], KEY)
    shape = "batch heads kv_heads radius dtype device".split()
    call = "provider mask n head_dim direction".split()
    base = rows[rows.term == NONE].set_index([*shape, *call, "round"]).ms_median
    place = rows.set_index([*shape, *call, "round"]).index
    rows = rows.assign(cost=rows.ms_median.to_numpy() / base.reindex(place).to_numpy() - 1)
    found = {}
    groups: Any = rows.groupby(shape, sort=False)
    for sizes, own in groups:
        table = pivot(own, call, "term", _cell).rename(
            columns={"provider": "backend", "n": "N", "head_dim": "D", NONE: "ms"}
        )
        found["terms" if not found else f"terms: {', '.join(map(str, sizes))}"] = markdown(
            table, left=(0, 1, 4)
        )
    return found


def _cell(rows: Any) -> str:
    term, cost = rows.term.iloc[0], rows.cost.median()
    if term == NONE:
        return f"{rows.ms_median.median():.3f}"
    above = " !" if cost > BARS.get(term, 9) else ""
    return MISSING if cost != cost else f"{100 * cost:+.1f}{above}"
