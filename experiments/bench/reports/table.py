"""Rows as text: one table a shape and direction, masks down and providers across."""

import statistics
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import replace
from typing import TypeVar

from experiments.bench.cases import DENSE, LAYOUTS
from experiments.bench.rows import SLACK, SpeedRow
from experiments.common.records import OK
from experiments.common.text_table import aligned

SHAPE = "device direction batch heads kv_heads n_q n_k head_dim v_dim dtype layout".split()


T = TypeVar("T", bound=Hashable)


def grouped(rows: Iterable[SpeedRow], key: Callable[[SpeedRow], T]) -> list[list[SpeedRow]]:
    """Rows with the same key together, in the order in which the keys come first."""
    groups: dict[T, list[SpeedRow]] = defaultdict(list)
    for row in rows:
        groups[key(row)].append(row)
    return list(groups.values())


def shape_of(row: SpeedRow) -> tuple[object, ...]:
    """What rows must share to be compared: everything but mask, blocks and provider."""
    return tuple(getattr(row, name) for name in SHAPE)


def best_dense(
    rows: Sequence[SpeedRow], *, own: bool = False
) -> dict[tuple[object, ...], SpeedRow]:
    """The fastest dense row of each shape, or with `own` of ours alone."""
    dense = [row for row in newest(rows) if row.mask == DENSE and row.status == OK]
    dense = [row for row in dense if row.own or not own]
    return {shape_of(g[0]): min(g, key=lambda row: row.ms) for g in grouped(dense, shape_of)}


def newest(rows: Sequence[SpeedRow]) -> list[SpeedRow]:
    """One row for all that measure the same thing: with the last versions and source, the rounds
    together.
    """
    place = lambda r: (shape_of(r), r.mask, r.block_q, r.block_k, r.provider)  # noqa: E731
    return [_together(found) for found in grouped(rows, place)]


def _together(rows: Sequence[SpeedRow]) -> SpeedRow:
    """The last row; of several rounds the median, with their number in place of `round` and their
    range in place of the percentiles.
    """
    last = rows[-1]
    by_round = {row.round: row for row in rows if row.versions == last.versions}
    times = [row.ms for row in by_round.values() if row.status == OK]
    if len(by_round) == 1 or not times:
        return last
    median = statistics.median(times)
    ok = next(row for row in by_round.values() if row.status == OK)
    rate = None if ok.tflops is None else ok.tflops * ok.ms / median
    return replace(
        ok, round=len(times), ms_median=median, ms_p20=min(times), ms_p80=max(times), tflops=rate
    )


def tables(rows: Sequence[SpeedRow], known: Sequence[SpeedRow] = ()) -> str:
    """A table for each shape and direction of `rows`, and why cells are empty.

    Each cell: milliseconds, the speed-up over our own dense attention, which is looked up in `rows`
    and `known`, and the ideal time as a share of the measured one, with ! above 100 %.
    """
    dense = best_dense([*known, *rows], own=True)
    rows = newest(rows)
    groups = grouped(sorted(rows, key=_shape_order), shape_of)
    parts = [_table(group, dense.get(shape_of(group[0]))) for group in groups]
    notes = {f"! {row.warning}": None for row in rows if row.warning}
    notes |= {f"{r.provider} {r.direction}: {r.status}": None for r in rows if r.status != OK}
    notes |= dict.fromkeys(filter(None, (_too_good(r, dense.get(shape_of(r))) for r in rows)))
    parts += ["\n".join(notes)] if notes else []
    return "\n\n".join(parts)


def _shape_order(row: SpeedRow) -> tuple[str, ...]:
    values = [getattr(row, name) for name in SHAPE if name != "direction"]
    order = [f"{v:012}" if isinstance(v, int) else v for v in values]
    return (*order, "0" if row.direction == "forward" else "1")


def _table(rows: list[SpeedRow], dense: SpeedRow | None) -> str:
    first = rows[0]
    providers = list(dict.fromkeys(r.provider for r in rows))
    masks = list(dict.fromkeys((-r.density, r.mask, r.block_q, r.block_k) for r in rows))
    cells = {(r.mask, r.block_q, r.block_k, r.provider): _cell(r, dense) for r in rows}
    lines = [["mask", "density", "block", *providers]]
    for density, mask, block_q, block_k in sorted(masks, key=lambda m: (m[0], m[1] != DENSE, m)):
        block = "" if mask == DENSE else f"{block_q}x{block_k}"
        found = [cells.get((mask, block_q, block_k, p), "") for p in providers]
        lines.append([mask, f"{-density:.4f}", block, *found])
    title = f"{first.direction}, ms (speed-up over our own dense) share of the ideal: "
    return f"{title}{shape_text(first)}\n{aligned(lines)}"


def shape_text(row: SpeedRow) -> str:
    """The shape and the device of a row in words, without what is usual."""
    heads = f"{row.heads}" + ("" if row.heads == row.kv_heads else f"/{row.kv_heads}")
    v_dim = "" if row.v_dim == row.head_dim else f", v_dim {row.v_dim}"
    layout = "" if row.layout == LAYOUTS[0] else f", {row.layout}"
    return (
        f"batch {row.batch}, heads {heads}, {row.n_q} x {row.n_k} tokens, "
        f"head_dim {row.head_dim}{v_dim}, {row.dtype}{layout}, {row.device}"
    )


def share_text(row: SpeedRow) -> str:
    """The ideal time as a share of the measured one: "81%", "107%!", or nothing."""
    if row.fraction is None:
        return ""
    return f"{100 * row.fraction:.0f}%" + ("!" if row.fraction > SLACK else "")


def _too_good(row: SpeedRow, dense: SpeedRow | None) -> str:
    """Return a note on a speed-up over our own dense attention that no density can give."""
    if row.status != OK or dense is None or not row.own or not row.density:
        return ""
    share = dense.ms / row.ms * row.density
    if share <= SLACK:
        return ""
    return (
        f"! {row.provider} {row.direction} {row.mask}: {100 * share:.0f} % of the ideal speed-up:"
        " dense attention was measured slower than it is, so measure again on an idle machine"
    )


def _cell(row: SpeedRow, dense: SpeedRow | None) -> str:
    if row.status != OK:
        return "-"
    times = "" if dense is None else f"({dense.ms / row.ms:.2f}x)"
    return f"{row.ms:.3f} {times:>8} {share_text(row):>4}".rstrip()
