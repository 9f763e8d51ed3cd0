"""Rows of decoding as lines and as tables."""

from collections.abc import Iterable, Sequence
from statistics import median

from experiments.common.records import OK, last_versions
from experiments.common.text_table import MISSING, aligned
from experiments.papers.decoding.cases import SELECTED
from experiments.papers.rows import DecodeRow

BAR, BAR_KEYS = 0.8, 65536  # the share of a copy's bandwidth that is asked for, at so many keys


def describe(row: DecodeRow) -> str:
    """A row as one line of text."""
    cache = f"pages of {row.page}" if row.page else "contiguous"
    what = f"{row.provider:15} {row.step:17} {row.mask:50} {cache:12} n_q {row.n_q:<2} N {row.n:<7}"
    if row.status != OK:
        return f"{what} {row.status}"
    return (
        f"{what} {1000 * row.ms:9.2f} us {row.read_mb:8.1f} MB {row.gbs:7.0f} GB/s "
        f"{100 * (row.share or 0):4.0f} % of a copy  error {row.error:.1e}"
    )


def tables(rows: Iterable[DecodeRow]) -> str:
    """For each mask, cache, number of queries and shape: keys down, providers across; and the bar.

    A cell is the median time of the rounds in microseconds, and the share of a copy's bandwidth.
    """
    found: dict[tuple[str, int, int, str], dict[int, dict[str, list[DecodeRow]]]] = {}
    for row in last_versions(rows):
        if row.status == OK:
            mask = SELECTED if row.mask.startswith(SELECTED) else row.mask
            name = row.provider + ("" if row.step == "decode" else ", choosing")
            shape = f"batch {row.batch}, {row.heads}/{row.kv_heads} heads of {row.head_dim}"
            what = mask, row.page, row.n_q, f"{shape}, {row.dtype}, {row.device}"
            line = found.setdefault(what, {}).setdefault(row.n, {})
            same = [r for r in line.get(name, []) if r.mask == row.mask]  # as many chosen blocks
            line[name] = [*same, row]
    text = []
    for (mask, page, n_q, shape), table in found.items():
        names = list(dict.fromkeys(name for line in table.values() for name in line))
        lines = [["keys", *names]]
        for n, line in sorted(table.items()):
            lines.append([str(n), *(_cell(line.get(name)) for name in names)])
        cache = f"pages of {page} tokens" if page else "a contiguous cache"
        text.append(f"{mask}, {n_q} queries, {cache}; {shape}\n{aligned(lines)}\n")
        if BAR_KEYS in table:
            text += [_bar(name, some) for name, some in table[BAR_KEYS].items()]
    return "\n".join(text)


def _cell(rows: Sequence[DecodeRow] | None) -> str:
    if not rows:
        return MISSING
    share = median(row.share or 0 for row in rows)
    return f"{1000 * median(row.ms for row in rows):.1f} us {100 * share:3.0f} %"


def _bar(name: str, rows: Sequence[DecodeRow]) -> str:
    share = median(row.share or 0 for row in rows)
    verdict = "reached" if share >= BAR else "missed"
    return f"bar of {100 * BAR:.0f} % at {BAR_KEYS} keys: {name} {verdict}, {100 * share:.0f} %\n"
