"""Where a provider stands, from the rows of experiments.speed alone.

    python -m experiments.speed grid=limits rows=runs/limits/limits.jsonl workers=12
    python -m experiments.tools.compare runs/limits/limits.jsonl hopper

For each shape and direction: time, share of the ideal, ratio to each peer, and how much of
1 / density its speed-up over its own dense attention is. Then uneven masks beside even ones, small
blocks beside blocks of 128, and the worst and the geometric mean of every comparison.
"""

import statistics
import sys
from collections.abc import Iterable, Sequence
from itertools import groupby
from typing import Any, NamedTuple

from experiments.bench.cases import CAUSAL, DENSE
from experiments.bench.providers import PROVIDERS
from experiments.bench.tables import (
    SpeedRow,
    grouped,
    newest,
    place_of,
    shape_of,
    shape_text,
    share_text,
)
from experiments.common.checks import choose
from experiments.common.rows import read
from experiments.common.tables import aligned

WHOLE = 128  # the block size that smaller ones are compared with
ALIKE = 0.1  # densities this near, relatively, are compared
IDEAL = "ideal time / time"
OWN_DENSE = "speed-up over own dense x density"
UNEVEN = "even time / uneven time, at one density"
SMALL = f"time at {WHOLE} / time at smaller blocks"


class Score(NamedTuple):
    """One number of a comparison: above 1 is better than what it is compared with."""

    comparison: str
    direction: str
    case: str
    value: float


def report(rows: Any, own: str) -> str:
    """Return the comparisons as text. Raises ValueError if `own` has no measured row."""
    every = newest(rows)
    measured = [row for row in every if row.stable]
    choose("own", own, sorted({row.provider for row in measured}))
    mine = [row for row in measured if row.provider == own]
    found = scores(measured, own)
    parts = []
    for group in grouped(mine, shape_of):
        same = [row for row in measured if shape_of(row) == shape_of(group[0])]
        parts.append(_shape_table(group, scores(same, own), own))
    parts += [_details(found, name) for name in (UNEVEN, SMALL)]
    parts.append(_summary(found))
    refused = {(r.provider, r.mask, r.n_q, r.head_dim, r.direction, r.status): None
               for r in every if not r.ok}  # fmt: skip
    if refused:
        parts.append("not measured\n" + "\n".join(" ".join(map(str, key)) for key in refused))
    return "\n\n".join(filter(None, parts))


def scores(rows: Sequence[SpeedRow], own: str) -> list[Score]:
    """Every comparison that the measured rows allow for the provider `own`."""
    ours = [row for row in rows if row.provider == own]
    others = {(place_of(r), r.provider): r for r in rows}
    found = []

    def add(name: str, row: SpeedRow, value: float) -> None:
        found.append(Score(name, row.direction, _case_text(row), value))

    for row in ours:
        same_shape = [r for r in ours if shape_of(r) == shape_of(row)]
        for peer in PROVIDERS:
            if peer != own and (other := others.get((place_of(row), peer))):
                add(_against(peer, own), row, other.ms / row.ms)
        if row.fraction:
            add(IDEAL, row, row.fraction)
        dense = next((r for r in same_shape if r.mask == DENSE), None)
        if dense and row.mask != DENSE and row.density:
            add(OWN_DENSE, row, dense.ms / row.ms * row.density)
        if even := _alike(row, same_shape):
            add(UNEVEN, row, (even.ms / even.density) / (row.ms / row.density))
        if whole := _whole(row, same_shape):
            add(SMALL, row, whole.ms / row.ms)
    return found


def _against(peer: str, own: str) -> str:
    return f"{peer} time / {own} time"


def _case_text(row: SpeedRow) -> str:
    block = "" if row.mask == DENSE else f" {row.block_q}x{row.block_k}"
    return f"{row.mask}{block} N {row.n_q} D {row.head_dim}"


def _alike(row: SpeedRow, rows: Iterable[SpeedRow]) -> SpeedRow | None:
    """Return the random mask nearest in density to a structured one."""
    if row.random or row.mask == DENSE or not row.density:
        return None
    near = [r for r in rows if r.random and (r.block_q, r.block_k) == (row.block_q, row.block_k)]
    near = [r for r in near if abs(r.density / row.density - 1) <= ALIKE]
    return min(near, key=lambda r: abs(r.density - row.density), default=None)


def _whole(row: SpeedRow, rows: Iterable[SpeedRow]) -> SpeedRow | None:
    """Return the random mask of the same density in blocks of 128."""
    if not row.random or max(row.block_q, row.block_k) >= WHOLE:
        return None
    whole = (r for r in rows if r.random and r.block_q == r.block_k == WHOLE)
    return next((r for r in whole if abs(r.density / row.density - 1) < 0.02), None)


def _shape_table(mine: list[SpeedRow], found: Sequence[Score], own: str) -> str:
    """Our rows of one shape and direction, each with its ratios."""
    names = {_against(peer, own): peer for peer in PROVIDERS}
    names[OWN_DENSE] = "own dense x density"
    values = {(s.comparison, s.case): s.value for s in found}
    shown = [name for name in names if any(name == comparison for comparison, _ in values)]
    head = ["mask", "block", "density", "ms", "TFLOP/s", "of ideal"]
    lines = [[*head, *(names[name] for name in shown)]]
    for row in sorted(
        mine, key=lambda r: (-r.block_q if r.block_q else -999, -r.density, r.mask != CAUSAL)
    ):
        block = "" if row.mask == DENSE else f"{row.block_q}x{row.block_k}"
        ratios = [values.get((name, _case_text(row))) for name in shown]
        cells = [f"{row.density:.4f}", f"{row.ms:.3f}", f"{row.tflops:.4g}", share_text(row)]
        cells += ["" if ratio is None else f"{ratio:.3f}" for ratio in ratios]
        lines.append([row.mask, block, *cells])
    return f"{mine[0].direction}, {own}: {shape_text(mine[0])}\n" + aligned(lines)


def _details(found: Sequence[Score], comparison: str) -> str:
    lines = [[s.case, s.direction, f"{s.value:.3f}"] for s in found if s.comparison == comparison]
    head = ["case", "direction", "value"]
    return f"{comparison}\n{aligned([head, *lines])}" if lines else ""


def _summary(found: Sequence[Score]) -> str:
    """Worst and geometric mean of every comparison."""
    lines = [["comparison", "direction", "cases", "geometric mean", "worst", "where"]]
    for (name, direction), group in groupby(sorted(found), lambda s: s[:2]):
        values = list(group)
        worst = min(values, key=lambda s: s.value)
        mean = statistics.geometric_mean(s.value for s in values)
        numbers = [str(len(values)), f"{mean:.3f}", f"{worst.value:.3f}"]
        lines.append([name, direction, *numbers, worst.case])
    return "summary (above 1 is better)\n" + aligned(lines, left=(0, 1, 5))


if __name__ == "__main__":
    print(report(read(sys.argv[1]), sys.argv[2]))
