"""Rows of picks as lines and as a table."""

from collections.abc import Iterable
from statistics import median

from experiments.common.records import OK, last_versions
from experiments.common.text_table import MISSING, aligned
from experiments.papers.rows import PickRow


def describe(row: PickRow) -> str:
    """A row as one line of text."""
    what = f"{row.provider:9} {row.direction:8} {row.mask:26} heads {row.heads}/{row.kv_heads}"
    what += f" N {row.n:<6} round {row.round}"
    if row.status != OK:
        return f"{what}  {row.status}"
    return (
        f"{what} {row.ms:9.3f} ms {row.tflops:6.1f} TFLOP/s, share {row.share:.4f}"
        f"  error {row.error:.1e}"
    )


def tables(rows: Iterable[PickRow]) -> str:
    """For each device, dtype and batch: shapes down, providers across.

    A cell is the median time of the rounds in ms, and TFLOP/s.

    TFLOP/s are of the pairs that are allowed, so that of two providers the faster one has more.
    """
    found: dict[str, dict[tuple[str, ...], dict[str, list[PickRow]]]] = {}
    for row in last_versions(rows):
        if row.status == OK:
            heads = f"{row.heads}/{row.kv_heads}"
            what = row.mask, heads, str(row.n), str(row.head_dim), row.direction
            table = found.setdefault(f"{row.device}, {row.dtype}, batch {row.batch}", {})
            table.setdefault(what, {}).setdefault(row.provider, []).append(row)
    return "\n\n".join(f"{title}\n{_table(table)}" for title, table in found.items())


def _table(found: dict[tuple[str, ...], dict[str, list[PickRow]]]) -> str:
    names = list(dict.fromkeys(name for cells in found.values() for name in cells))
    lines = [["selector", "heads", "N", "D", "direction", *names]]
    for what, cells in found.items():
        lines.append([*what, *(_cell(cells.get(name)) for name in names)])
    return aligned(lines, left=(0, 1, 4))


def _cell(rows: list[PickRow] | None) -> str:
    if not rows:
        return MISSING
    ms, rate = median(row.ms for row in rows), median(row.tflops or 0 for row in rows)
    return f"{ms:.3f} / {rate:.0f}"
