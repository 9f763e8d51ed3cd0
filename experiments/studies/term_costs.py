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

import numpy as np
import torch
from torch import Tensor

import sparseflash
from experiments.bench.cases import DENSE, DTYPES, Case
from experiments.bench.gate import LIMIT, Gate
from experiments.bench.timing import measure
from experiments.common.rows import OK, Row, last_versions
from experiments.common.tables import MISSING, markdown, pivot
from experiments.studies import runner
from experiments.studies.runner import Run, choices
from experiments.studies.step import Step, draw
from sparseflash import Terms
from sparseflash.kernels.common.device import nvidia_capability
from sparseflash.testing import logits, oracle, relative_error

KEY = "term provider direction batch heads kv_heads n head_dim dtype block radius round".split()
FIELDS = ("sink", "softcap", "slopes", "bias")
NONE, ALL, MAX = "none", "all", "max"
TERMS = ("sink", "softcap", "low_softcap", "slopes", "bias")
LEARNED = ("sink", "bias")
# Scores are about 1. Both are so low that the gate sees whether there is a cap. Below 15, few
# scores reach 0.4 of it, as in models that were trained with one; below 2, most of them do.
CAPS = {"softcap": 15.0, "low_softcap": 2.0}
OF_TERMS = 4  # the limit of their gradients over that of the others: sums of roundings that cancel
BACKENDS = {
    "hopper": (NONE, "sink", MAX),
    **dict.fromkeys(("triton", "cpu"), (NONE, *TERMS, ALL, MAX)),
}
# the cost that is allowed
BARS = {"sink": 0.05, MAX: 0.05} | dict.fromkeys(TERMS[1:], 0.15)


@dataclass(kw_only=True)
class Options(runner.Options):
    name: str = "term_costs"
    # all: the four terms together; max: the row maxima, no term; low_softcap: a cap that most
    # scores reach, where softcap is one that few come near
    terms: list[str] = field(default_factory=lambda: [*TERMS, MAX])
    backends: list[str] = field(default_factory=list)  # none: all of the device that have terms
    densities: list[float] = field(default_factory=lambda: [1.0, 0.25])  # 1: no mask
    batch: int
    heads: int
    kv_heads: int | None = None  # null: heads
    seq_len: int
    head_dims: list[int]
    dtype: str
    block: int  # tokens of a block of the masks
    radius: int = 128  # of the bias: longest distance with an entry of its own
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
    radius: int

    def row(self) -> Row:
        case = self.case
        sizes = {n: getattr(case, n) for n in "batch heads kv_heads head_dim dtype".split()}
        sizes |= {"n": case.n_q, "block": case.block_q, "radius": self.radius}
        return sizes | {"mask": case.mask, "density": case.density, "provider": self.provider}


def cases(run: Run) -> list[Group]:
    """Return each head dim, density and backend."""
    o, found = run.options, []
    hopper = run.device.type == "cuda" and nvidia_capability(run.device) == (9, 0)
    own = ["hopper", "triton"] if hopper else ["triton" if run.device.type == "cuda" else "cpu"]
    choices(o, terms=(*TERMS, ALL, MAX), backends=BACKENDS)
    for head_dim, density, backend in product(o.head_dims, o.densities, o.backends or own):
        mask, block = f"random_blocks({density}, block={o.block})", o.block
        if density == 1:
            mask, block = DENSE, 0
        sizes = o.batch, o.heads, o.kv_heads or o.heads, o.seq_len, o.seq_len, head_dim, o.dtype
        case = Case(mask, *sizes, block, block)
        if block:
            case.check()
        found.append(Group(case, backend, o.radius))
    return found


def ways(group: Group, run: Run) -> list[Row]:
    """Return the terms that a backend has, and none of them, in their directions."""
    terms = [NONE, *(t for t in BACKENDS[group.provider] if t in run.options.terms and t != NONE)]
    if terms == [NONE]:
        return []
    return [
        {"term": term, "direction": direction}
        for term in terms
        for direction in (("forward",) if term == MAX else ("forward", "backward"))
    ]


def opened(group: Group, run: Run) -> Callable[[Row], dict[str, Any]]:
    """Return what measures a direction of a term."""
    limit = LIMIT[DTYPES[group.case.dtype]]

    @cache
    def prepared(term: str) -> tuple[TermStep, dict[str, Any]]:
        step = step_of(group.case, group.provider, term, group.radius, run.device)
        error, of_terms = gate_errors(group.case, step)
        return step, {"error": error, "term_error": of_terms} | verdict(error, of_terms, limit)

    def one(row: Row) -> dict[str, Any]:
        step, found = prepared(row["term"])
        if "status" in found:
            return found
        call = step.call(row["direction"])
        return found | measure(call, run.device, run.options.seconds)._asdict()

    return one


def verdict(error: float, of_terms: float | None, limit: float) -> dict[str, str]:
    """Return the status of a call with these errors if it is not timed."""
    if not error < limit:
        return {"status": f"wrong result: error {error:.3g}, limit {limit:g}"}
    if of_terms is not None and not of_terms < OF_TERMS * limit:
        most = OF_TERMS * limit
        return {"status": f"wrong gradient of a term: error {of_terms:.3g}, limit {most:g}"}
    return {}


def terms_of(name: str, heads: int, radius: int, device: torch.device) -> Terms | None:
    """Return the term of that name, all of them, or None; what is learned has a gradient."""
    generator = torch.Generator(device).manual_seed(1)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, device=device, generator=generator).requires_grad_()

    values = {
        "sink": normal(heads),
        "softcap": CAPS.get(name, CAPS["softcap"]),
        # those of ALiBi, arXiv 2108.12409
        "slopes": 2.0 ** (-8 / heads * torch.arange(1, heads + 1, device=device)),
        "bias": normal(heads, 2 * radius + 1),
    }
    own = "softcap" if name in CAPS else name
    names = FIELDS if name == ALL else [each for each in FIELDS if each == own]
    return Terms(**{each: values[each] for each in names}) if names else None


def learned(terms: Terms | None) -> dict[str, Tensor]:
    """Return the terms that have a gradient."""
    values = {} if terms is None else {name: getattr(terms, name) for name in LEARNED}
    return {name: value for name, value in values.items() if value is not None}


@dataclass(frozen=True, eq=False)
class TermStep(Step):
    """Forward and backward of attention with terms; maxima: a call that gives the row maxima."""

    terms: Terms | None = None
    maxima: Callable[[], Tensor] | None = None


def step_of(case: Case, backend: str, term: str, radius: int, device: torch.device) -> TermStep:
    """Return the call of a case with a term, or with the row maxima, on inputs of its own."""
    terms, blocks = terms_of(term, case.heads, radius, device), case.blocks
    options: dict[str, Any] = {"terms": terms, "backend": backend}
    options["return_max_scores"] = term == MAX

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        found = sparseflash.attention(q, k, v, blocks, **options)
        return found[0] if term == MAX else found

    qkv, maxima = draw(case, device), None
    if term == MAX:
        maxima = lambda: sparseflash.attention(*qkv, blocks, **options)[1]  # noqa: E731
    return TermStep(attend, qkv, tuple(learned(terms).values()), terms, maxima)


@torch.enable_grad()
def gate_errors(case: Case, step: TermStep) -> tuple[float, float | None]:
    """Return the largest relative error of output, dq, dk, dv and, where they are kept, the row
    maxima; and that of the gradients of terms.

    As in `Gate`, the incoming gradient is zero outside the sampled rows, which therefore determine
    all gradients, those of the terms too.
    """
    gate = Gate(case, *step.qkv)
    out, (dq, dk, dv, *grads) = step.forward(), step.both(gate.dout)
    assert dq is not None and dk is not None and dv is not None
    maxima = None if step.maxima is None else step.maxima()
    place = gate.rows - case.n_q
    own = learned(step.terms)
    exact = {name: value.detach().double().requires_grad_() for name, value in own.items()}
    totals = [torch.zeros_like(value) for value in exact.values()]
    errors = []
    for b, heads, g in gate.samples:
        given = step.qkv[0][b, heads, gate.rows], step.qkv[1][b, g], step.qkv[2][b, g]
        q, k, v = inputs = [t.detach().double().requires_grad_() for t in given]
        terms = _of_heads(step.terms, exact, heads)
        rows = gate.rows.cpu().numpy()
        allowed = np.stack([case.allowed(b, h, rows) for h in range(heads.start, heads.stop)])
        seen = torch.from_numpy(allowed).to(q.device)[None]
        expected, _ = oracle(q[None], k[None, None], v[None, None], seen, terms=terms, place=place)
        dout = gate.dout[b, heads, gate.rows].double()[None]
        wanted = torch.autograd.grad(expected, (*inputs, *exact.values()), dout)
        sampled = torch.zeros_like(dq[b, heads], dtype=torch.float64)
        sampled[:, gate.rows] = wanted[0]
        pairs = (
            (out[b, heads, gate.rows], expected[0]), (dq[b, heads], sampled),
            (dk[b, g], wanted[1]), (dv[b, g], wanted[2]),
        )  # fmt: skip
        errors += [relative_error(*pair) for pair in pairs]
        if maxima is not None:
            wanted_max = logits(q[None], k[None, None], seen).amax(-1)[0]
            errors.append(relative_error(maxima[b, heads, gate.rows], wanted_max))
        for total, grad in zip(totals, wanted[3:], strict=True):
            total += grad
    of_terms = [relative_error(a, b) for a, b in zip(grads, totals, strict=True) if a is not None]
    return max(errors), max(of_terms, default=None)


def _of_heads(terms: Terms | None, exact: dict[str, Tensor], heads: slice) -> Terms | None:
    """Return the terms of some heads, those that are learned in float64."""
    if terms is None:
        return None
    slopes = None if terms.slopes is None else terms.slopes[heads]
    return terms._replace(slopes=slopes, **{name: value[heads] for name, value in exact.items()})


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
