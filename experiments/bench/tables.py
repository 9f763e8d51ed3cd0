"""Tables of speed: for a terminal, and in Markdown for the pages.

`tables(frame)` makes, by name:

    rates       TFLOP/s of every provider, and the times of peers over ours; a line a case
    speedups    one sentence on what sparsity brings

A cell whose rounds differ by more than 15 % is left out, and a ratio between rows of two GPUs or
two processes is marked.
"""

import re
import statistics
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

from experiments.bench.cases import DENSE, LAYOUTS
from experiments.bench.providers import PROVIDERS
from experiments.common.rows import OK, Found, found
from experiments.common.tables import aligned, markdown
from experiments.studies.runner import UNSTABLE, spread

SLACK = 1.05  # what a time may gain on the ideal one by noise
SHAPE = "device direction batch heads kv_heads n_q n_k head_dim v_dim dtype layout".split()
RATES = "TFLOP/s of the computed blocks, or times of peers over ours, forward / backward."
MARK = "*"  # of a ratio between two GPUs or two processes
T = TypeVar("T", bound=Hashable)


class SpeedRow(Found):
    """A row of experiments.speed, or several rounds of one."""

    @property
    def own(self) -> bool:
        """Whether the provider is one of ours."""
        return self.version is None

    @property
    def random(self) -> bool:
        """Whether the mask is one of random blocks, equally many in every row."""
        return bool(re.fullmatch(r"random_blocks\([^()]*\)", self.mask))

    @property
    def ms(self) -> float:
        return self.ms_median

    @property
    def ok(self) -> bool:
        return self.status == OK

    @property
    def stable(self) -> bool:
        """Whether there is a time whose rounds agree."""
        return self.ok and (self.range or 0) <= UNSTABLE


def label_of(provider: str) -> str:
    """Return the name of a provider in tables and legends."""
    return PROVIDERS[provider].label if provider in PROVIDERS else provider


def grouped(rows: Iterable[SpeedRow], key: Callable[[SpeedRow], T]) -> list[list[SpeedRow]]:
    """Return rows with the same key together, in the order in which the keys come first."""
    groups: dict[T, list[SpeedRow]] = defaultdict(list)
    for row in rows:
        groups[key(row)].append(row)
    return list(groups.values())


def shape_of(row: SpeedRow) -> tuple[object, ...]:
    """Return what rows must share to be compared: all but mask, blocks and provider."""
    return tuple(row[name] for name in SHAPE)


def place_of(row: SpeedRow) -> tuple[object, ...]:
    """Return what rows of two providers share when they measure the same thing."""
    return (*shape_of(row), row.mask, row.block_q, row.block_k)


def newest(rows: Any) -> list[SpeedRow]:
    """Return one row for all that measure the same thing: of its last versions, the rounds
    together. `rows` is a data frame or rows.
    """
    rows = found(rows, SpeedRow)
    return [_together(same) for same in grouped(rows, lambda r: (place_of(r), r.provider))]


def _together(rows: Sequence[SpeedRow]) -> SpeedRow:
    """Return the last row, or of several rounds the median, with their number in place of `round`
    and their range in place of the percentiles.
    """
    versions = lambda r: (r.torch, r.triton, r.source if r.own else r.version)  # noqa: E731
    last = rows[-1]
    by_round = {row.round: row for row in rows if versions(row) == versions(last)}
    ok = [row for row in by_round.values() if row.ok]
    if len(by_round) == 1 or not ok:
        return last
    times = [row.ms for row in ok]
    median = statistics.median(times)
    more = {"round": len(times), "ms_median": median, "ms_p20": min(times), "ms_p80": max(times)}
    more |= {"tflops": ok[0].tflops and ok[0].tflops * ok[0].ms / median, "range": spread(times)}
    for name in ("gpu", "process", "commit"):
        more[name] = "&".join(sorted({str(row[name]) for row in ok if row.get(name)})) or None
    return SpeedRow({**ok[0], **more})


def best_dense(rows: Sequence[SpeedRow], *, own: bool = False) -> dict[tuple, SpeedRow]:
    """Return the fastest dense row of each shape, or with `own` of ours alone."""
    dense = [row for row in rows if row.mask == DENSE and row.ok and (row.own or not own)]
    return {shape_of(g[0]): min(g, key=lambda row: row.ms) for g in grouped(dense, shape_of)}


# ---- for a terminal


def report(rows: Any, known: Any = ()) -> str:
    """Return a table for each shape and direction of `rows`, and why cells are empty.

    Each cell: milliseconds, the speed-up over our own dense attention, which is looked up in `rows`
    and `known`, and the ideal time as a share of the measured one, with ! above 100 %. A ~ marks
    a cell whose rounds differ by more than 15 %.
    """
    rows = newest(rows)
    dense = best_dense([*newest(known), *rows], own=True)
    order = lambda r: (*(r[n] for n in SHAPE if n != "direction"), r.direction == "backward")  # noqa: E731
    groups = grouped(sorted(rows, key=order), shape_of)
    parts = [_shape_table(group, dense.get(shape_of(group[0]))) for group in groups]
    notes = {f"! {row.warning}": None for row in rows if row.warning}
    notes |= {f"{r.provider} {r.direction}: {r.status}": None for r in rows if not r.ok}
    if any(row.ok and not row.stable for row in rows):
        notes[f"~ rounds that differ by more than {100 * UNSTABLE:.0f} %: no result"] = None
    if any(_mark(row, dense[shape_of(row)]) for row in rows if shape_of(row) in dense):
        notes[f"{MARK} a speed-up between two GPUs or two processes"] = None
    return "\n\n".join([*parts, *(["\n".join(notes)] if notes else [])])


def _shape_table(rows: list[SpeedRow], dense: SpeedRow | None) -> str:
    first = rows[0]
    providers = list(dict.fromkeys(r.provider for r in rows))
    cells = {(r.mask, r.block_q, r.block_k, r.provider): _cell(r, dense) for r in rows}
    masks = dict.fromkeys((-r.density, r.mask != DENSE, r.mask, r.block_q, r.block_k) for r in rows)
    lines = [["mask", "density", "block", *providers]]
    for density, masked, *place in sorted(masks):
        mask, *sizes = place
        block = "{}x{}".format(*sizes) if masked else ""
        texts = [cells.get((*place, p), "") for p in providers]
        lines.append([mask, f"{-density:.4f}", block, *texts])
    title = f"{first.direction}, ms (speed-up over our own dense) share of the ideal: "
    return f"{title}{caption(first)}\n{aligned(lines)}"


def caption(row: SpeedRow, *, length: bool = True) -> str:
    """Return the device and the shape of a row, without what is usual."""
    heads = f"H {row.heads}" if row.heads == row.kv_heads else f"H {row.heads}/{row.kv_heads}"
    tokens = f", N {row.n_q}" + (f" x {row.n_k}" if row.n_k != row.n_q else "")
    dims = f"D {row.head_dim}" if row.v_dim == row.head_dim else f"D {row.head_dim}/{row.v_dim}"
    layout = "" if row.layout == LAYOUTS[0] else f", {row.layout}"
    sizes = f"B {row.batch}, {heads}{tokens * length}, {dims}, {row.dtype}{layout}"
    return f"{row.device}: {sizes}"


def _cell(row: SpeedRow, dense: SpeedRow | None) -> str:
    if not row.ok:
        return "-"
    times = "" if dense is None else f"({dense.ms / row.ms:.2f}x{_mark(row, dense)})"
    of_ideal = row.ideal_ms / row.ms if row.ideal_ms else 0
    share = f"{100 * of_ideal:.0f}%{'!' * (of_ideal > SLACK)}" if of_ideal else ""
    text = f"{row.ms:.3f} {times:>8} {share:>4}".rstrip()
    return text if row.stable else f"~{text}"


# ---- for pages


def tables(rows: Any) -> dict[str, str]:
    """Return every table that the rows allow by name, as Markdown."""
    timed = [row for row in newest(rows) if row.stable]
    made = {"rates": _rates(timed), "speedups": _speedups(timed)}
    return {name: text for name, text in made.items() if text}


def _rates(rows: Sequence[SpeedRow]) -> str:
    """Return TFLOP/s of every provider and the times of peers over ours, a line a case, below what
    the rows share. Columns in which all lines agree are left out.
    """
    names = [p for p in PROVIDERS if any(r.provider == p for r in rows)]
    names += dict.fromkeys(r.provider for r in rows if r.provider not in PROVIDERS)
    own = [p for p in names if any(r.own for r in rows if r.provider == p)]
    others = [p for p in names if p not in own]
    if not own:
        return ""
    shown = [n for n, text in CASE.items() if n == "mask" or len({text(r) for r in rows}) > 1]
    lines = [[*shown, *map(label_of, names), *(f"{label_of(p)}, time / ours" for p in others)]]
    for same in grouped(rows, lambda r: tuple(text(r) for text in CASE.values())):
        cells = {p: {r.direction: r for r in same if r.provider == p} for p in names}
        ours = next((cells[p] for p in own if cells[p]), {})
        rates = ({d: r.tflops for d, r in cells[p].items() if r.tflops} for p in names)
        texts = [both({d: f"{x:.0f}" if x >= 10 else f"{x:.2g}" for d, x in c.items()})
                 for c in rates]  # fmt: skip
        ratios = ({d: f"{r.ms / ours[d].ms:.2f}{_mark(r, ours[d])}" for d, r in cells[p].items()
                   if d in ours} for p in others)  # fmt: skip
        lines.append([*(CASE[name](same[0]) for name in shown), *texts, *map(both, ratios)])
    if any(row.round > 1 for row in rows):
        ranges = [max(r.range or 0 for r in rows if r.provider == p) for p in names]
        first = ["range of rounds, at most"] * len(shown)  # of which a page shows some
        lines.append([*first, *(f"{100 * x:.1f} %" for x in ranges), *[""] * len(others)])
    return f"{about(rows)}\n\n{markdown(lines, range(len(shown)))}"


def _speedups(rows: Sequence[SpeedRow], density: float = 0.125, head_dim: int = 128) -> str:
    """One sentence: how much faster random blocks of this density are than the fastest dense."""
    rows = [r for r in rows if r.head_dim == head_dim and r.layout == LAYOUTS[0]]
    ours = {r.direction: r for r in rows if r.own and r.random and r.density == density
            and r.provider in ("hopper", "cpu")}  # fmt: skip
    best = best_dense(rows)
    dense = {d: best[shape_of(r)] for d, r in ours.items() if shape_of(r) in best}
    if len(dense) != 2:
        return ""
    row = ours["forward"]
    times = {d: f"{dense[d].ms / r.ms:.1f}{_mark(dense[d], r)}" for d, r in ours.items()}
    names = {label_of(r.provider) for r in dense.values()}
    return (
        f"On one {row.device}, at {row.n_q} tokens and head dim {head_dim} in {row.dtype}, a mask"
        f" that skips {100 * (1 - density):g} % of the blocks runs {times['forward']} times as fast"
        f" as the fastest dense attention ({' or '.join(sorted(names))}) in the forward and"
        f" {times['backward']} times in the backward (torch {row.torch}, {row.date[:10]})."
    )


def about(rows: Sequence[SpeedRow]) -> str:
    """Return what the rows share: device, versions, dates, GPUs, commits, rounds."""

    def several(name: str, noun: str = "") -> str:
        values = sorted({part for r in rows if r[name] for part in str(r[name]).split("&")})
        return f"{len(values)} {noun}{'s' * (len(values) != 1)}" if noun else ", ".join(values)

    def between(values: Iterable[Any]) -> str:
        values = sorted({*values})
        return " to ".join(map(str, dict.fromkeys((values[0], values[-1]))))

    rounds = {r.round for r in rows}
    peers = {f", {PROVIDERS[r.provider].package} {r.version}" for r in rows if r.version}
    gpus = f", {several('gpu', 'GPU')}" if any(r.gpu for r in rows) else ""
    times = f"medians of {between(rounds)} rounds" if rounds != {1} else "one round"
    two = len({(r.gpu, r.process) for r in rows}) > 1
    return (
        f"{several('device')}, {several('dtype')}, {between(r.n_q for r in rows)} tokens. {RATES}"
        f"{f' {MARK}: of two GPUs or processes.' if two else ''}\n"
        f"torch {several('torch')}, Triton {several('triton')}{''.join(sorted(peers))},"
        f" {between(r.date[:10] for r in rows)}{gpus}, {several('commit', 'commit')}, {times}."
    )


def _mark(a: SpeedRow, b: SpeedRow) -> str:
    """Return the mark of a ratio between rows of two GPUs or two processes, as far as is known."""
    differ = (a[name] and b[name] and a[name] != b[name] for name in ("gpu", "process"))
    return MARK if any(differ) else ""


def both(texts: Mapping[str, str]) -> str:
    """Return forward / backward; one of them alone is named."""
    if len(texts) == 2:
        return f"{texts['forward']} / {texts['backward']}"
    return next((f"{text} ({direction})" for direction, text in texts.items()), "")


def _mask(row: SpeedRow) -> str:
    """Return the text of a mask, long lists of numbers left out."""
    text = re.sub(r"\((\d+, ){4,}\d+\)", "(...)", row.mask)
    return "none" if row.mask == DENSE else f"`{text}`"


def _heads(row: SpeedRow) -> str:
    keys = f", {row.kv_heads} of keys" if row.kv_heads != row.heads else ""
    return f"{row.batch} x {row.heads}{keys}"


def _head_dim(row: SpeedRow) -> str:
    return str(row.head_dim) + (f", values of {row.v_dim}" if row.v_dim != row.head_dim else "")


# what tells a case: names of columns, and texts
CASE: dict[str, Callable[[SpeedRow], str]] = {
    "head dim": _head_dim,
    "mask": _mask,
    "tokens": lambda row: f"{row.n_q:,}" + (f" x {row.n_k:,}" if row.n_q != row.n_k else ""),
    "batch x heads": _heads,
    "layout": lambda row: "B, N, H, D" if row.layout == LAYOUTS[1] else "B, H, N, D",
    "density": lambda row: "no mask" if row.mask == DENSE else f"{row.density:.4g}",
    "blocks": lambda row: "" if row.mask == DENSE else f"{row.block_q} x {row.block_k}",
    "dtype": lambda row: row.dtype,
    "device": lambda row: row.device,
}
