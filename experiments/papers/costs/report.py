"""Rows of terms as lines and as a table."""

from collections.abc import Iterable
from statistics import median

from experiments.common.records import OK, last_versions
from experiments.common.text_table import MISSING, aligned
from experiments.papers.costs.calls import NONE
from experiments.papers.rows import TermRow

BARS = {
    "sink": 0.05,
    "softcap": 0.15,
    "low_softcap": 0.15,
    "slopes": 0.15,
    "bias": 0.15,
    "max": 0.05,
}  # the cost that is allowed


def describe(row: TermRow) -> str:
    """A row as one line of text."""
    what = f"{row.provider:6} {row.term:11} {row.direction:8} {row.mask:32} D {row.head_dim:<3}"
    what += f" N {row.n:<6} round {row.round}"
    if row.status != OK or row.ms_median is None:
        return f"{what}  {row.status}"
    cost = "" if row.cost is None else f"{100 * row.cost:+6.1f} %"
    of_terms = "" if row.term_error is None else f", of the term {row.term_error:.1e}"
    return f"{what} {row.ms:9.3f} ms {cost:9} error {row.error:.1e}{of_terms}"


def table(rows: Iterable[TermRow]) -> str:
    """For each shape: calls down, terms across: the median cost of the rounds in percent, ! above
    its bar.

    The first number is the time without terms, in milliseconds.
    """
    found: dict[str, dict[tuple[str, ...], dict[str, list[TermRow]]]] = {}
    for row in last_versions(rows):
        if row.status == OK and row.ms_median is not None:
            what = row.provider, row.mask, str(row.n), str(row.head_dim), row.direction
            shape = f"batch {row.batch}, {row.heads}/{row.kv_heads} heads, radius {row.radius}"
            calls = found.setdefault(f"{shape}, {row.dtype}, {row.device}", {})
            calls.setdefault(what, {}).setdefault(row.term, []).append(row)
    return "\n\n".join(f"{shape}\n{_table(calls)}" for shape, calls in found.items())


def _table(found: dict[tuple[str, ...], dict[str, list[TermRow]]]) -> str:
    terms = list(dict.fromkeys(term for cells in found.values() for term in cells if term != NONE))
    lines = [["backend", "mask", "N", "D", "direction", "ms", *terms]]
    for what, cells in found.items():
        base = f"{median(row.ms for row in cells[NONE]):.3f}" if NONE in cells else MISSING
        lines.append([*what, base, *(_cell(term, cells.get(term, [])) for term in terms)])
    return aligned(lines, left=(0, 1, 4))


def _cell(term: str, rows: list[TermRow]) -> str:
    costs = [row.cost for row in rows if row.cost is not None]
    if not costs:
        return MISSING
    cost = median(costs)
    return f"{100 * cost:+.1f}{' !' if term in BARS and cost > BARS[term] else ''}"
