"""Rows of experiments.papers.attention_table as the appendix's tables, two figures and words."""

from collections.abc import Callable, Sequence
from functools import partial
from itertools import product
from pathlib import Path

from matplotlib import pyplot as plt
from matplotlib.axes import Axes

from experiments.common.figures import (
    PAGE,
    curve,
    file_name,
    length_axis,
    plain_log_axis,
    save,
    style,
    token_text,
)
from experiments.common.records import OK, torches
from experiments.common.text_table import MISSING, markdown
from experiments.papers.attention.methods import METHODS, VARIANTS
from experiments.papers.attention.rows import LengthRow

Value = Callable[[LengthRow], float | None]
OURS = ("flash", "sparse")
NOT_YET = "Not measured yet."


def newest(rows: Sequence[LengthRow]) -> list[LengthRow]:
    """One row a cell of the tables: the last that was measured, with the device, the heads and the
    dtype of the last row.
    """
    shared = lambda r: (r.device, r.heads, r.dtype)  # noqa: E731
    here = [row for row in rows if shared(row) == shared(rows[-1])]
    cell = lambda r: (r.method, r.direction, r.dropout, r.padding, r.n, *_kind(r))  # noqa: E731
    return list({cell(row): row for row in here}.values())


def _kind(row: LengthRow) -> tuple[int, bool]:
    """What the rows of a table have in common besides dropout and padding."""
    return row.head_dim, row.causal


def variant_name(row: LengthRow) -> str:
    """Dropout, padding and a causal mask in words."""
    words = [f"dropout {row.dropout:g}"] * bool(row.dropout) + ["key padding"] * row.padding
    text = " and ".join(words) or "no dropout, no padding"
    return f"{text}, causal" if row.causal else text


def tables(rows: Sequence[LengthRow]) -> str:
    """Every table as Markdown, with what is missing and why, and the crossing points."""
    rows = newest(rows)
    parts = []
    for kind in dict.fromkeys(map(_kind, rows)):
        parts += _parts([row for row in rows if _kind(row) == kind])
    if reasons := missing(rows):
        parts += ["## What is missing, and why", markdown(reasons, left=(0, 1, 2))]
    return "\n\n".join(parts) + "\n"


def _parts(rows: Sequence[LengthRow]) -> list[str]:
    """The tables of one head dim, causal or not."""
    first = rows[-1]
    shape = f"Batch {max(r.batch for r in rows)}, {first.heads} heads of {first.head_dim}"
    parts = [f"{shape}, {first.dtype}, {first.device}, torch {torches(rows)}."]
    for variant in dict.fromkeys(map(variant_name, rows)):
        own = [row for row in rows if variant_name(row) == variant]
        for direction in dict.fromkeys(row.direction for row in own):
            found = [row for row in own if row.direction == direction]
            what = "forward and backward" if direction == "both" else direction
            parts += [f"## Milliseconds, {what}: {variant}", table(found, time_of)]
        found = [row for row in own if row.direction == "both"]
        what = "MiB at the peak" if any(r.peak_mib for r in found) else "MiB kept for the backward"
        parts += [f"## {what}: {variant}", table(found, memory_of)]
        if sentences := crossings(found):
            parts.append(bullets(sentences))
    return parts


def bullets(sentences: Sequence[str]) -> str:
    """A list in Markdown."""
    return "\n".join(f"- {sentence}" for sentence in sentences)


def named(rows: Sequence[LengthRow]) -> dict[str, Callable[[], str]]:
    """The tables that a page may hold: WHAT_VARIANT, with _d128 and _causal where that is so.

    WHAT: ms | forward | backward (milliseconds) | gain (times as fast as standard attention) |
    memory | crossings. VARIANT: plain | dropout | padding | both.
    """
    rows, found = newest(rows), {}
    kinds = dict.fromkeys([*map(_kind, rows), *product((64, 128), (False, True))])
    for variant, (head_dim, causal) in product(VARIANTS, kinds):
        end = f"_{variant}" + (f"_d{head_dim}" if head_dim != 64 else "") + "_causal" * causal
        same = (*VARIANTS[variant], head_dim, causal)
        own = [r for r in rows if (bool(r.dropout), r.padding, *_kind(r)) == same]
        both = [row for row in own if row.direction == "both"]
        found |= {
            f"ms{end}": partial(_table, both, time_of),
            f"gain{end}": partial(_table, both, gains(both)),
            f"memory{end}": partial(_table, both, memory_of),
            f"crossings{end}": lambda both=both: bullets(crossings(both)) or NOT_YET,
        }
        for name in ("forward", "backward"):
            way = [row for row in own if row.direction == name]
            found[name + end] = partial(_table, way, time_of)
    return found


def _table(rows: Sequence[LengthRow], value: Value) -> str:
    return table(rows, value) if rows else NOT_YET


def gains(rows: Sequence[LengthRow]) -> Value:
    """How many times as fast a row is as standard attention of its length."""
    base = {row.n: row.ms for row in rows if row.method == "standard" and row.status == OK}
    return lambda row: base[row.n] / row.ms if row.status == OK and row.n in base else None


def time_of(row: LengthRow) -> float | None:
    """Milliseconds, where there are any."""
    return row.ms_median if row.status == OK else None


def memory_of(row: LengthRow) -> float | None:
    """MiB: the peak of a GPU, or what is kept for the backward."""
    return row.saved_mib if row.peak_mib is None else row.peak_mib


def table(rows: Sequence[LengthRow], value: Value) -> str:
    """Methods down, lengths across; the best of a length is bold: the least, of gains the most."""
    lengths = sorted({row.n for row in rows})
    cells = {(row.method, row.n): value(row) for row in rows}
    known = {n: [x for (_, m), x in cells.items() if m == n and x is not None] for n in lengths}
    pick = min if value in (time_of, memory_of) else max
    best = {n: pick(known[n], default=None) for n in lengths}

    def text(method: str, n: int) -> str:
        found = cells.get((method, n))
        if found is None:
            return MISSING
        shown = f"{found:.3g}" if found < 1000 else f"{found:,.0f}"
        return f"**{shown}**" if found == best[n] else shown

    lines = [["attention", *(f"{n:,}" for n in lengths)]]
    for name in METHODS:
        if any(method == name for method, _ in cells):
            lines.append([METHODS[name].label, *(text(name, n) for n in lengths)])
    return markdown(lines)


def missing(rows: Sequence[LengthRow]) -> list[list[str]]:
    """A line for each method and reason, with the lengths; the head first."""
    found: dict[tuple[str, str], list[int]] = {}
    for row in rows:
        if row.status != OK:
            reason = row.status.split(": a call")[0].split(": needs about")[0]
            found.setdefault((METHODS[row.method].label, reason), []).append(row.n)
    if not found:
        return []
    head = ["attention", "reason", "lengths"]
    return [
        head,
        *([m, why, ", ".join(f"{n:,}" for n in sorted(set(ns)))] for (m, why), ns in found.items()),
    ]


def crossings(rows: Sequence[LengthRow]) -> list[str]:
    """From which length on each of ours is faster than each other attention, in words."""
    times = {(row.method, row.n): t for row in rows if (t := time_of(row)) is not None}
    found = []
    for own in OURS:
        groups: dict[str, list[str]] = {}
        for other in METHODS:
            if other == own or METHODS[other].kind in OURS:
                continue
            shared = [n for n in sorted({n for m, n in times if m == other}) if (own, n) in times]
            if shared:
                groups.setdefault(_when(own, other, shared, times), []).append(METHODS[other].label)
        found += [
            f"{METHODS[own].label}: {when} {_list(labels)}" for when, labels in groups.items()
        ]
    return [f"{sentence}." for sentence in found]


def _when(own: str, other: str, lengths: list[int], times: dict[tuple[str, int], float]) -> str:
    """The crossing of two methods: the first length from which on ours is always the faster."""
    faster = [times[own, n] < times[other, n] for n in lengths]
    if all(faster):
        return "at every length that both ran, faster than"
    if not faster[-1]:
        return f"at {lengths[-1]:,} tokens not faster than"
    start = len(faster) - faster[::-1].index(False)
    return f"from {lengths[start]:,} tokens on, faster than"


def _list(words: Sequence[str]) -> str:
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} and {words[-1]}"


def draw_all(rows: Sequence[LengthRow], out: Path) -> list[Path]:
    """The two figures: forward and backward, time and memory against length; plain rows."""
    plain = [r for r in newest(rows) if r.direction == "both" and not r.dropout and not r.padding]
    found = []
    for kind in sorted(set(map(_kind, plain))):
        found += _draw_kind([row for row in plain if _kind(row) == kind], out)
    return found


def _draw_kind(plain: Sequence[LengthRow], out: Path) -> list[Path]:
    """The figures of one head dim, causal or not."""
    head_dim, causal = _kind(plain[0])
    words = [f"d{head_dim}"] * (head_dim != 64) + ["causal"] * causal
    peak = any(row.peak_mib for row in plain)
    wanted = {
        "runtime": ("ms, forward and backward", time_of),
        "memory": ("MiB at the peak" if peak else "MiB kept for the backward", memory_of),
    }
    with style():
        return [
            path
            for name, (label, value) in wanted.items()
            for path in _draw(plain, label, value, out / file_name(name, *words, plain[0].device))
        ]


def _draw(rows: Sequence[LengthRow], label: str, value: Value, stem: Path) -> list[Path]:
    """A panel a group of methods, each with a legend of its own; ours is in every one."""
    shown = [name for name in METHODS if any(r.method == name and value(r) for r in rows)]
    if not shown:  # no row has a time
        return []
    groups = dict.fromkeys(METHODS[name].group for name in shown)
    figure, panels = plt.subplots(1, len(groups), figsize=(PAGE, 3.6), squeeze=False, sharey=True)
    for axes, group in zip(panels[0], groups, strict=True):
        axes.set_title(group, loc="left")
        _panel(axes, rows, [n for n in shown if METHODS[n].group == group or n == "sparse"], value)
        axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.22))
    panels[0][0].set_ylabel(label)
    return save(figure, stem, option="plots")


def _panel(axes: Axes, rows: Sequence[LengthRow], names: Sequence[str], value: Value) -> None:
    lengths = sorted({row.n for row in rows})
    for name in names:
        points = [(r.n, y) for r in rows if r.method == name and (y := value(r)) is not None]
        if points:
            n, y = zip(*sorted(points), strict=True)
            curve(axes, n, y, METHODS[name].style, METHODS[name].label)
    length_axis(axes, lengths[:: 2 if len(lengths) > 8 else 1])
    plain_log_axis(axes)


def describe(row: LengthRow) -> str:
    """A row as one line."""
    text = f"{row.method:10} {row.direction:8} N {token_text(row.n):>5}  {variant_name(row):32}"
    if row.status != OK:
        return f"{text} {row.status}"
    memory = memory_of(row)
    return f"{text} {row.ms:10.3f} ms" + (f"  {memory:.1f} MiB" if memory else "")
