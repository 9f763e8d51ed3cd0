"""Tables of times beside those of peers, for the pages that show them."""

import re
from collections.abc import Sequence
from textwrap import shorten

import numpy as np

from experiments.bench.cases import DENSE
from experiments.bench.reports.columns import COLUMNS, about, layout_text, measured
from experiments.bench.reports.table import SHAPE, grouped, newest
from experiments.bench.rows import SpeedRow
from experiments.common import text_table
from experiments.common.records import OK

TIMES = "ms, and in brackets peer time / our time: above 1 ours is faster."
LEVEL = 0.03  # times this near, relatively, are level
NAMES = COLUMNS | {
    "fa4_window": "FlashAttention-4, its window",
    "fa4_varlen": "FlashAttention-4, its varlen",
    "cudnn_flex": "cuDNN Frontend, its intervals",
    "flex_flash": "FlexAttention on FlashAttention-4",
}


def against_peers(rows: Sequence[SpeedRow]) -> str:
    """Times of ours and of every peer, a table a shape; then what has no time, and why.

    Empty where none of our providers has a time.
    """
    timed = measured(rows)
    if not any(r.own for r in timed):
        return ""
    parts = [about(timed, TIMES)]
    shape = [name for name in SHAPE if name != "direction"]
    for group in grouped(timed, lambda r: tuple(getattr(r, name) for name in shape)):
        first, names = group[0], [p for p in COLUMNS if any(r.provider == p for r in group)]
        heads = f"{first.heads} heads"
        if first.kv_heads != first.heads:
            heads = f"{first.heads} query and {first.kv_heads} key heads"
        parts.append(f"{heads} of {first.head_dim}, {first.n_q:,} tokens, {layout_text(first)}:")
        lines = [["mask", "density", "direction", *(COLUMNS[p] for p in names)]]
        for same in grouped(group, lambda r: (r.mask, r.block_q, r.block_k, r.direction)):
            times = {r.provider: _time(r, same) for r in same}
            case = _short_mask(same[0]), f"{same[0].density:.3g}", same[0].direction
            lines.append([*case, *(times.get(p, "") for p in names)])
        parts.append(text_table.markdown(lines, left=(0, 2)))
    lines = [["not measured", "direction", "cases", "why"]]
    failed = [r for r in newest(rows) if r.status != OK]
    for same in grouped(failed, lambda r: (r.provider, r.direction, r.status)):
        why = shorten(same[0].status, 150, placeholder=" ...")
        lines.append([NAMES[same[0].provider], same[0].direction, str(len(same)), why])
    return "\n\n".join([*parts, *([text_table.markdown(lines, left=(0, 1, 3))] * bool(failed))])


def peer_counts(rows: Sequence[SpeedRow]) -> str:
    """For every peer and direction, in how many cases ours is faster, level and slower.

    Empty where no peer has a time beside one of ours.
    """
    place = lambda r: (*(getattr(r, name) for name in SHAPE), r.mask, r.block_q, r.block_k)  # noqa: E731
    ratios: dict[tuple[str, str], list[float]] = {}
    for same in grouped(measured(rows), place):
        ours = [r for r in same if r.own]
        for row in same if ours else ():
            if not row.own:
                ratios.setdefault((row.provider, row.direction), []).append(row.ms / ours[0].ms)
    counted = "cases", "ours faster", f"within {100 * LEVEL:.0f} %", "ours slower"
    lines = [["peer", "direction", *counted, "mean ratio", "least", "most"]]
    for peer, direction in sorted(ratios, key=lambda key: (list(COLUMNS).index(key[0]), key[1])):
        found = np.array(ratios[peer, direction])
        faster, slower = (found > 1 + LEVEL).sum(), (found < 1 - LEVEL).sum()
        counts = map(str, (len(found), faster, len(found) - faster - slower, slower))
        means = np.exp(np.log(found).mean()), found.min(), found.max()
        lines.append([NAMES[peer], direction, *counts, *(f"{value:.2f}" for value in means)])
    return text_table.markdown(lines, left=(0, 1)) if ratios else ""


def _short_mask(row: SpeedRow) -> str:
    """The text of a mask, long lists of numbers left out."""
    text = re.sub(r"\((\d+, ){4,}\d+\)", "(...)", row.mask)
    return "none" if row.mask == DENSE else f"`{text}`"


def _time(row: SpeedRow, same: Sequence[SpeedRow]) -> str:
    """Milliseconds, of a peer with its time / ours at the same case."""
    ours = next((r for r in same if r.own), None)
    time = text_table.short(row.ms)
    return time if row.own or ours is None else f"{time} ({row.ms / ours.ms:.2f})"
