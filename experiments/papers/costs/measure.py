"""Measuring calls with and without terms in turn, so that both meet the same clock."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch

from experiments.bench.cases import DTYPES, Case
from experiments.bench.gate import LIMIT
from experiments.bench.timing import measure
from experiments.common.processes import processes
from experiments.common.records import OK
from experiments.papers.attention.measure import free, why
from experiments.papers.costs.calls import ALL, MAX, NONE, TERMS, TermStep, gate_errors, step_of
from experiments.papers.rows import TermRow

DIRECTIONS = ("forward", "backward")
OF_TERMS = 4  # the limit of their gradients over that of the others: sums of roundings that cancel
BACKENDS = {
    "hopper": (NONE, "sink", MAX),
    **dict.fromkeys(("triton", "cpu"), (NONE, *TERMS, ALL, MAX)),
}


@dataclass(frozen=True)
class Group:
    """Calls measured in turn: a case on one backend, with each of its terms and without."""

    case: Case
    backend: str
    terms: tuple[str, ...]
    radius: int
    rounds: int

    def rows(self, device: torch.device, command: str) -> list[TermRow]:
        """The rows before they are measured; each round begins with another term."""
        case, found = self.case, []
        sizes = {
            name: getattr(case, name) for name in "batch heads kv_heads head_dim dtype".split()
        }
        for number in range(self.rounds):
            first = number % len(self.terms)
            for term in (*self.terms[first:], *self.terms[:first]):
                found += [
                    TermRow(
                        term=term, provider=self.backend, direction=direction, round=number + 1,
                        mask=case.mask, density=case.density, n=case.n_q, block=case.block_q,
                        radius=self.radius, **sizes, **TermRow.origin(str(device), command),
                    )
                    for direction in DIRECTIONS[: 1 if term == MAX else 2]  # no gradient
                ]  # fmt: skip
        return found


def measured(
    group: Group, device: torch.device, seconds: float, rows: Sequence[TermRow]
) -> list[TermRow]:
    """The rows of a group, all of them measured again: a cost needs both of its times."""
    steps: dict[str, TermStep] = {}
    errors: dict[str, tuple[float, float | None]] = {}
    status: dict[str, str] = {}
    for term in group.terms:
        try:
            steps[term] = step_of(group.case, group.backend, term, group.radius, device)
            errors[term] = gate_errors(group.case, steps[term])
            status[term] = verdict(*errors[term], group.case.dtype)
        except Exception as error:
            status[term] = why(error)
    found = [replace(row, status=status[row.term]) for row in rows]
    calls = {term: steps[term].calls(DIRECTIONS) for term in status if status[term] == OK}
    for i, row in enumerate(found):
        if row.status != OK:
            continue
        try:
            times = measure(calls[row.term][row.direction], device, seconds)
        except Exception as error:
            found[i] = replace(row, status=why(error))
            continue
        error, of_terms = errors[row.term]
        found[i] = replace(row, error=error, term_error=of_terms, **times._asdict())
    steps.clear()
    calls.clear()
    free(device)
    return [with_cost(row, found) for row in found]


def verdict(error: float, of_terms: float | None, dtype: str) -> str:
    """OK, or why a call with these errors is not timed."""
    limit = LIMIT[DTYPES[dtype]]
    if not error < limit:
        return f"wrong result: error {error:.3g}, limit {limit:g}"
    if of_terms is not None and not of_terms < OF_TERMS * limit:
        return f"wrong gradient of a term: error {of_terms:.3g}, limit {OF_TERMS * limit:g}"
    return OK


def with_cost(row: TermRow, rows: Sequence[TermRow]) -> TermRow:
    """The row with its time over that of the call without terms in its round."""
    same = [r for r in rows if (r.term, r.direction, r.round) == (NONE, row.direction, row.round)]
    if row.term == NONE or not row.ms_median or not same or not same[0].ms_median:
        return row
    return replace(row, cost=row.ms_median / same[0].ms_median - 1)


def warm(groups: Sequence[Group], device: torch.device, workers: int) -> None:
    """Compiles the kernels of all groups in processes of their own, into the caches on disk.

    What fails there fails again where it is measured, and its row says why.
    """
    kinds = [(group, term) for group in groups for term in group.terms]
    with processes(workers) as pool:
        for done in [pool.submit(partial(_once, device=device), *kind) for kind in kinds]:
            done.exception()


def _once(group: Group, term: str, device: torch.device) -> None:
    step = step_of(group.case, group.backend, term, group.radius, device)
    step.forward()
    step.both()
