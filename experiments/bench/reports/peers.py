"""Tables of times beside those of peers, for the pages that show them."""

import re
from collections.abc import Callable, Sequence
from textwrap import shorten

import numpy as np

from experiments.bench.cases import CAUSAL, DENSE
from experiments.bench.reports.columns import (
    COLUMNS,
    about,
    both,
    by_direction,
    layout_text,
    measured,
    rate,
)
from experiments.bench.reports.table import SHAPE, grouped, newest
from experiments.bench.rows import SpeedRow
from experiments.common import text_table
from experiments.common.records import OK

TIMES = "ms, and in brackets peer time / our time: above 1 ours is faster."
RATIOS = ("fa4", "cudnn_blocks", "cudnn_flex", "sdpa_cudnn")
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


def rates(rows: Sequence[SpeedRow]) -> str:
    """TFLOP/s of every provider, forward / backward, and the times of peers over ours; a line a
    case, with what cases differ in. Empty where none of our providers has a time.
    """
    timed = measured(rows)
    if not any(r.own for r in timed):
        return ""
    names = [p for p in COLUMNS if any(r.provider == p for r in timed)]
    peers = [p for p in names if not next(r for r in timed if r.provider == p).own]
    told = {name: [describe(r) for r in timed] for name, describe in CASE.items()}
    varied = [name for name, texts in told.items() if len(set(texts)) > 1] or ["mask"]
    head = [COLUMNS[p] for p in names] + [f"{COLUMNS[p]}, time / ours" for p in peers]
    lines = [[*varied, *head]]
    for same in grouped(timed, lambda r: tuple(describe(r) for describe in CASE.values())):
        speeds = [
            both({d: rate(r.tflops) for d, r in _of(p, same).items() if r.tflops}) for p in names
        ]
        lines.append([*(CASE[name](same[0]) for name in varied), *speeds, *_ratios(same, peers)])
    return f"{about(timed)}\n\n{text_table.markdown(lines, left=range(len(varied)))}"


def ratios(rows: Sequence[SpeedRow], peers: Sequence[str] = RATIOS) -> str:
    """Times of peers over ours at the length and layout of the first row: no mask, causal, and
    random blocks by density. Empty where there are none.
    """
    timed = measured(rows)
    chosen = [
        r for r in timed
        if (r.n_q, r.layout) == (timed[0].n_q, timed[0].layout)
        and (r.mask in (DENSE, CAUSAL) or r.random)
    ]  # fmt: skip
    names = [p for p in peers if any(r.provider == p for r in chosen)]
    lines = [["head dim", "mask", *(COLUMNS[p] for p in names)]]
    order = lambda r: (-r.head_dim, r.mask != DENSE, r.mask != CAUSAL, -r.density)  # noqa: E731
    for same in grouped(sorted(chosen, key=order), lambda r: (r.head_dim, r.mask)):
        lines.append([_head_dim(same[0]), _short_mask(same[0]), *_ratios(same, names)])
    return text_table.markdown(lines, left=(0, 1)) if names else ""


def _ratios(same: Sequence[SpeedRow], peers: Sequence[str]) -> list[str]:
    """Of every peer the time over ours at one case, forward / backward."""
    ours = by_direction(_ours(same))
    return [
        both({d: f"{r.ms / ours[d].ms:.2f}" for d, r in _of(peer, same).items() if d in ours})
        for peer in peers
    ]


def _of(provider: str, same: Sequence[SpeedRow]) -> dict[str, SpeedRow]:
    return by_direction([row for row in same if row.provider == provider])


def _ours(same: Sequence[SpeedRow]) -> list[SpeedRow]:
    """The rows of our first provider in the order of the columns: before its other forms."""
    by_provider = {r.provider: r for r in same if r.own}
    first = next((p for p in COLUMNS if p in by_provider), None)
    return [r for r in same if r.provider == first]


def _heads(row: SpeedRow) -> str:
    grouped_heads = f", {row.kv_heads} of keys" if row.kv_heads != row.heads else ""
    return f"{row.batch} x {row.heads}{grouped_heads}"


def _head_dim(row: SpeedRow) -> str:
    return str(row.head_dim) + (f", values of {row.v_dim}" if row.v_dim != row.head_dim else "")


def peer_counts(rows: Sequence[SpeedRow]) -> str:
    """For every peer and direction, in how many cases ours is faster, level and slower.

    Empty where no peer has a time beside one of ours.
    """
    place = lambda r: (*(getattr(r, name) for name in SHAPE), r.mask, r.block_q, r.block_k)  # noqa: E731
    ratios: dict[tuple[str, str], list[float]] = {}
    for same in grouped(measured(rows), place):
        ours = _ours(same)
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


CASE: dict[str, Callable[[SpeedRow], str]] = {  # what tells a case: names of columns, and texts
    "head dim": _head_dim,
    "mask": _short_mask,
    "tokens": lambda row: f"{row.n_q:,}",
    "batch x heads": _heads,
    "layout": layout_text,
}


def _time(row: SpeedRow, same: Sequence[SpeedRow]) -> str:
    """Milliseconds, of a peer with its time / ours at the same case."""
    time, ours = text_table.short(row.ms), _ours(same)
    return f"{time} ({row.ms / ours[0].ms:.2f})" if ours and not row.own else time
