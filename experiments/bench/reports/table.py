"""Rows as text: one table a shape and direction, masks down and providers across."""

from collections.abc import Sequence
from itertools import groupby

from experiments.bench.cases import DENSE, LAYOUTS
from experiments.bench.rows import SpeedRow
from experiments.common.records import OK
from experiments.common.text_table import aligned

SHAPE = "device direction batch heads kv_heads n_q n_k head_dim v_dim dtype layout".split()


def shape_of(row: SpeedRow) -> tuple[object, ...]:
    """What rows must share to be compared: everything but mask, blocks and provider."""
    return tuple(getattr(row, name) for name in SHAPE)


def best_dense(
    rows: Sequence[SpeedRow], *, own: bool | None = None
) -> dict[tuple[object, ...], SpeedRow]:
    """The fastest dense row of each shape: of ours (own), of the peers (not own), or of all."""
    best: dict[tuple[object, ...], SpeedRow] = {}
    for row in newest(rows):
        if row.mask != DENSE or row.status != OK or own not in (None, row.own):
            continue
        shape = shape_of(row)
        if shape not in best or row.ms < best[shape].ms:
            best[shape] = row
    return best


def newest(rows: Sequence[SpeedRow]) -> list[SpeedRow]:
    """Of rows that measure the same thing with different versions or sources, the last one."""
    return list({(shape_of(r), r.mask, r.block_q, r.block_k, r.provider): r for r in rows}.values())


def tables(rows: Sequence[SpeedRow], known: Sequence[SpeedRow] = ()) -> str:
    """A table for each shape and direction of `rows`, and why cells are empty.

    Each cell: milliseconds, the speed-up over our own dense attention, which is looked up in `rows`
    and `known`, and the ideal time as a share of the measured one, with ! above 100 %.
    """
    dense = best_dense([*known, *rows], own=True)
    parts = []
    for shape, group in groupby(sorted(rows, key=_shape_order), key=shape_of):
        parts.append(_table(list(group), dense.get(shape)))
    notes = {f"! {row.warning}": None for row in rows if row.warning}
    notes |= {f"{r.provider} {r.direction}: {r.status}": None for r in rows if r.status != OK}
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
    """The ideal time as a share of the measured one: "81%", "104%!", or nothing."""
    if row.fraction is None:
        return ""
    return f"{100 * row.fraction:.0f}%" + ("!" if row.fraction > 1 else "")


def _cell(row: SpeedRow, dense: SpeedRow | None) -> str:
    if row.status != OK:
        return "-"
    times = "" if dense is None else f"({dense.ms / row.ms:.2f}x)"
    return f"{row.ms:.3f} {times:>8} {share_text(row):>4}".rstrip()
