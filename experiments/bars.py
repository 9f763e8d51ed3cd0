"""Where a provider stands, from the CSV of experiments.speed alone.

    python -m experiments.speed grid=limits csv=runs/limits/limits.csv workers=12
    python -m experiments.bars csv=runs/limits/limits.csv

For each shape and direction: time, share of the ideal, ratio to each peer, and how much of
1 / density its speed-up over its own dense attention is. Then uneven masks beside even ones, small
blocks beside blocks of 128, and the worst and the mean of every bar.
"""

from collections.abc import Iterable, Sequence
from itertools import groupby
from pathlib import Path
from typing import NamedTuple

import hydra
import numpy as np
from omegaconf import DictConfig

from experiments.bench.cases import CAUSAL, DENSE
from experiments.bench.rows import SpeedRow
from experiments.bench.speed_table import newest, shape_of, shape_text
from experiments.common.records import OK, read
from experiments.common.text_table import aligned

PEERS = ("fa4", "sdpa_cudnn", "flex", "triton")
WHOLE = 128  # the block size that smaller ones are compared with
ALIKE = 0.1  # densities this near, relatively, are compared


class Score(NamedTuple):
    """One number of a bar: above 1 is better than what it is compared with."""

    bar: str
    direction: str
    case: str
    value: float


def scores(rows: Sequence[SpeedRow], own: str) -> list[Score]:
    """Every comparison that the measured rows allow for the provider `own`."""
    measured = [row for row in newest(rows) if row.status == OK]
    ours = [row for row in measured if row.provider == own]
    others = {(_place(r), r.provider): r for r in measured}
    found = []
    for row in ours:
        for peer in (*PEERS, f"{own}_deterministic"):
            if peer != own and (other := others.get((_place(row), peer))):
                found.append(_score(f"{peer} time / {own} time", row, other.ms / row.ms))
        if row.fraction:
            found.append(_score("ideal time / time", row, row.fraction))
        dense = next((r for r in ours if r.mask == DENSE and shape_of(r) == shape_of(row)), None)
        if dense and row.mask != DENSE:
            share = dense.ms / row.ms * row.density
            found.append(_score("speed-up over own dense x density", row, share))
        if even := _alike(row, ours):
            relative = (even.ms / even.density) / (row.ms / row.density)
            found.append(_score("even time / uneven time, at one density", row, relative))
        if whole := _whole(row, ours):
            found.append(
                _score(f"time at {WHOLE} / time at smaller blocks", row, whole.ms / row.ms)
            )
    return found


def _score(bar: str, row: SpeedRow, value: float) -> Score:
    block = "" if row.mask == DENSE else f" {row.block_q}x{row.block_k}"
    return Score(bar, row.direction, f"{row.mask}{block} N {row.n_q} D {row.head_dim}", value)


def _place(row: SpeedRow) -> tuple[object, ...]:
    """What rows of two providers share when they measure the same thing."""
    return (*shape_of(row), row.mask, row.block_q, row.block_k)


def _alike(row: SpeedRow, rows: Iterable[SpeedRow]) -> SpeedRow | None:
    """The random mask nearest in density to a structured one."""
    if _random(row) or row.mask == DENSE:
        return None
    same = (r for r in rows if shape_of(r) == shape_of(row) and _random(r))
    near = [r for r in same if (r.block_q, r.block_k) == (row.block_q, row.block_k)]
    near = [r for r in near if abs(r.density / row.density - 1) <= ALIKE]
    return min(near, key=lambda r: abs(r.density - row.density), default=None)


def _whole(row: SpeedRow, rows: Iterable[SpeedRow]) -> SpeedRow | None:
    """The random mask of the same density in blocks of 128."""
    if not _random(row) or max(row.block_q, row.block_k) >= WHOLE:
        return None
    same = (r for r in rows if shape_of(r) == shape_of(row) and _random(r))
    whole = (r for r in same if r.block_q == r.block_k == WHOLE)
    return next((r for r in whole if abs(r.density / row.density - 1) < 0.02), None)


def _random(row: SpeedRow) -> bool:
    return row.mask.startswith("random_blocks")


def report(rows: Sequence[SpeedRow], own: str) -> str:
    """The comparisons as text. ValueError where `own` has no measured row."""
    mine = [row for row in newest(rows) if row.status == OK and row.provider == own]
    if not mine:
        names = sorted({row.provider for row in rows if row.status == OK})
        raise ValueError(f"no measured row of {own!r}; the file has {', '.join(names) or 'none'}")
    found = scores(rows, own)
    parts = [_shape_table(list(group), rows, own) for group in _by_shape(mine)]
    parts += [_details(found, bar) for bar in dict.fromkeys(s.bar for s in found) if _small(bar)]
    parts.append(_summary(found))
    refused = {(r.provider, r.mask, r.n_q, r.head_dim, r.direction, r.status): None
               for r in newest(rows) if r.status != OK}  # fmt: skip
    if refused:
        parts.append("not measured\n" + "\n".join(" ".join(map(str, key)) for key in refused))
    return "\n\n".join(parts)


def _by_shape(rows: list[SpeedRow]) -> Iterable[Iterable[SpeedRow]]:
    order = list(dict.fromkeys(shape_of(r) for r in rows))
    rows = sorted(rows, key=lambda r: (order.index(shape_of(r)), r.block_q, r.mask != CAUSAL))
    return (group for _, group in groupby(rows, shape_of))


def _shape_table(mine: list[SpeedRow], rows: Sequence[SpeedRow], own: str) -> str:
    """Our rows of one shape and direction, each with its ratios."""
    per_case: dict[str, dict[str, float]] = {}
    for score in scores([r for r in rows if shape_of(r) == shape_of(mine[0])], own):
        per_case.setdefault(score.case, {})[score.bar] = score.value
    bars = [f"{peer} time / {own} time" for peer in (*PEERS, f"{own}_deterministic")]
    bars.append("speed-up over own dense x density")
    shown = [bar for bar in bars if any(bar in values for values in per_case.values())]
    names = [bar.split(" time")[0] if " time" in bar else "own dense x density" for bar in shown]
    lines = [["mask", "block", "density", "ms", "TFLOP/s", "of ideal", *names]]
    for row in sorted(mine, key=lambda r: (-r.block_q if r.block_q else -999, -r.density)):
        values = per_case[_score("", row, 0).case]
        share = "" if row.fraction is None else f"{100 * row.fraction:.0f}%"
        block = "" if row.mask == DENSE else f"{row.block_q}x{row.block_k}"
        cells = [f"{values[bar]:.3f}" if bar in values else "" for bar in shown]
        cells = [f"{row.density:.4f}", f"{row.ms:.3f}", f"{row.tflops:.4g}", share, *cells]
        lines.append([row.mask, block, *cells])
    return f"{mine[0].direction}, {own}: {shape_text(mine[0])}\n" + aligned(lines)


def _small(bar: str) -> bool:
    return bar.startswith(("even time", "time at"))


def _details(found: Sequence[Score], bar: str) -> str:
    lines = [["case", "direction", "value"]]
    lines += [[s.case, s.direction, f"{s.value:.3f}"] for s in found if s.bar == bar]
    return f"{bar}\n" + aligned(lines)


def _summary(found: Sequence[Score]) -> str:
    """Worst and geometric mean of every bar."""
    lines = [["bar", "direction", "cases", "mean", "worst", "where"]]
    for (bar, direction), group in groupby(sorted(found), lambda s: (s.bar, s.direction)):
        values = list(group)
        worst = min(values, key=lambda s: s.value)
        mean = np.exp(np.mean(np.log([s.value for s in values])))
        numbers = [str(len(values)), f"{mean:.3f}", f"{worst.value:.3f}"]
        lines.append([bar, direction, *numbers, worst.case])
    return "summary (above 1 is better)\n" + aligned(lines, left=(0, 1, 5))


@hydra.main(version_base="1.3", config_path="conf", config_name="bars")
def entry(config: DictConfig) -> None:
    text = report(read(config.csv, SpeedRow), config.own)
    print(text)
    Path(config.csv).with_suffix(".bars.txt").write_text(text + "\n")


if __name__ == "__main__":
    entry()
