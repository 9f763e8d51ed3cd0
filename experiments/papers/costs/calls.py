"""Attention with a term of the softmax, or with row maxima, and its gate against float64."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

import sparseflash
from experiments.bench.cases import Case
from experiments.bench.gate import Gate
from experiments.papers.attention.measure import Step, draw
from sparseflash import Terms
from sparseflash.testing import logits, oracle, relative_error

FIELDS = ("sink", "softcap", "slopes", "bias")
LOW_CAP = "low_softcap"
TERMS = ("sink", "softcap", LOW_CAP, "slopes", "bias")
NONE, ALL, MAX = "none", "all", "max"
LEARNED = ("sink", "bias")
# Scores are about 1. Both are so low that the gate sees whether there is a cap. Below 15, few
# scores reach 0.4 of it, as in models that were trained with one; below 2, most of them do.
CAPS = {"softcap": 15.0, LOW_CAP: 2.0}


def terms_of(name: str, heads: int, radius: int, device: torch.device) -> Terms | None:
    """The term of that name, all of them, or None; what is learned has a gradient."""
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
    field = "softcap" if name in CAPS else name
    names = FIELDS if name == ALL else [each for each in FIELDS if each == field]
    return Terms(**{each: values[each] for each in names}) if names else None


def learned(terms: Terms | None) -> dict[str, Tensor]:
    """The terms that have a gradient."""
    values = {} if terms is None else {name: getattr(terms, name) for name in LEARNED}
    return {name: value for name, value in values.items() if value is not None}


@dataclass(frozen=True, eq=False)
class TermStep(Step):
    """Forward and backward of attention with terms; maxima: a call that gives the row maxima."""

    terms: Terms | None = None
    maxima: Callable[[], Tensor] | None = None


def step_of(case: Case, backend: str, term: str, radius: int, device: torch.device) -> TermStep:
    """The call of a case with a term, or with the row maxima, on inputs of its own."""
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
    """The largest relative error of output, dq, dk, dv and, where they are kept, the row maxima;
    and that of the gradients of terms.

    As in `Gate`, the incoming gradient is zero outside the sampled rows, which therefore determine
    all gradients, those of the terms too.
    """
    gate = Gate(case, *step.qkv)
    out, (dq, dk, dv, *grads) = step.forward(), _all(step.both(gate.dout))
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
    of_terms = [relative_error(*pair) for pair in zip(grads, totals, strict=True)]
    return max(errors), max(of_terms, default=None)


def _all(grads: tuple[Tensor | None, ...]) -> list[Tensor]:
    assert all(grad is not None for grad in grads)
    return [grad for grad in grads if grad is not None]


def _of_heads(terms: Terms | None, exact: dict[str, Tensor], heads: slice) -> Terms | None:
    """The terms of some heads, those that are learned in float64."""
    if terms is None:
        return None
    slopes = None if terms.slopes is None else terms.slopes[heads]
    return terms._replace(slopes=slopes, **{name: value[heads] for name, value in exact.items()})
