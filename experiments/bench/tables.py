"""Tables of speed: for a terminal, and in Markdown for the pages.

`tables(frame)` makes, by name:

    density     TFLOP/s of random masks by density, each head dim with its providers
    masks       TFLOP/s of all other cases
    rates       TFLOP/s of every provider, and the times of peers over ours; a line a case
    ratios      the times of peers over ours, by density
    speedups    one sentence on what sparsity brings

A cell whose rounds differ by more than 15 % is left out, a ratio between rows of two GPUs or two
processes is marked, and a table in which two rows would share a cell is not made.
"""

import re
import statistics
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any, TypeVar

from experiments.bench.cases import CAUSAL, DENSE, LAYOUTS
from experiments.bench.providers import PROVIDERS
from experiments.common.rows import OK, Found, found
from experiments.common.tables import aligned, markdown
from experiments.studies.runner import UNSTABLE, spread

SLACK = 1.05  # what a time may gain on the ideal one by noise
SHAPE = "device direction batch heads kv_heads n_q n_k head_dim v_dim dtype layout".split()
BLOCK = ("block_q", "block_k")
MAIN = ("hopper", "cpu", "fa4", "cudnn_blocks", "cudnn_flex", "sdpa_cudnn", "sdpa")
RATIOS = ("fa4", "cudnn_blocks", "cudnn_flex", "sdpa_cudnn")
RATES = "TFLOP/s of the computed blocks, forward / backward."
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
    return f"{title}{shape_text(first)}\n{aligned(lines)}"


def shape_text(row: SpeedRow) -> str:
    """Return the shape and the device of a row in words, without what is usual."""
    heads = f"{row.heads}" + ("" if row.heads == row.kv_heads else f"/{row.kv_heads}")
    v_dim = "" if row.v_dim == row.head_dim else f", v_dim {row.v_dim}"
    layout = "" if row.layout == LAYOUTS[0] else f", {row.layout}"
    return (
        f"batch {row.batch}, heads {heads}, {row.n_q} x {row.n_k} tokens, "
        f"head_dim {row.head_dim}{v_dim}, {row.dtype}{layout}, {row.device}"
    )


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
    regular = [r for r in timed if _regular(r, timed[0])]
    others = [r for r in timed if not _regular(r, timed[0])]
    density = {"head dim": _head_dim} if len({r.head_dim for r in regular}) > 1 else {}
    makers: dict[str, Callable[[], str]] = {
        "density": lambda: _rates(regular, density | {"density": _density_text}),
        "masks": lambda: _rates(others, MASKS),
        "rates": lambda: _rates(timed, CASE, peers=True),
        "ratios": lambda: _ratios(timed),
        "speedups": lambda: _speedups(timed),
    }
    made = {}
    for name, make in makers.items():
        with suppress(ValueError):  # two rows would share a cell
            made[name] = make()
    return {name: text for name, text in made.items() if text}


def _rates(
    rows: Sequence[SpeedRow], case: Mapping[str, Callable[[SpeedRow], str]], peers: bool = False
) -> str:
    """Return TFLOP/s of every provider, a line a case, below what their rows share.

    peers: add the times of peers over ours, and leave out the columns in which all lines agree.
    """
    names = in_order(rows)
    others = [p for p in names if not _own(rows, p)] if peers else []
    if not rows or (peers and len(others) == len(names)):
        return ""
    shown = [*case]
    if peers:
        texts = {name: {describe(r) for r in rows} for name, describe in case.items()}
        shown = [name for name in case if len(texts[name]) > 1] or ["mask"]
    lines = [[*shown, *map(label_of, names), *(f"{label_of(p)}, time / ours" for p in others)]]
    for same in grouped(rows, lambda r: tuple(describe(r) for describe in case.values())):
        about_case = [case[name](same[0]) for name in shown]
        rates = (_rate(_of(p, same)) for p in names)
        lines.append([*about_case, *rates, *_over_ours(same, others)])
    if any(row.round > 1 for row in rows):
        ranges = [f"{100 * max(r.range or 0 for r in _of(p, rows)):.1f} %" for p in names]
        first = ["range of rounds, at most", *[""] * (len(shown) - 1)]
        lines.append([*first, *ranges, *[""] * len(others)])
    return f"{about(rows)}\n\n{markdown(lines, range(len(shown)))}"


def _ratios(rows: Sequence[SpeedRow]) -> str:
    """Return times of peers over ours at the length and layout of the first row: no mask,
    causal, and random blocks by density.
    """
    first = rows[0]
    rows = [
        r for r in rows
        if (r.n_q, r.layout) == (first.n_q, first.layout)
        and (r.mask in (DENSE, CAUSAL) or r.random)
    ]  # fmt: skip
    names = [p for p in RATIOS if _of(p, rows)]
    lines = [["head dim", "mask", *map(label_of, names)]]
    order = lambda r: (-r.head_dim, r.mask != DENSE, r.mask != CAUSAL, -r.density)  # noqa: E731
    for same in grouped(sorted(rows, key=order), lambda r: (r.head_dim, r.mask)):
        lines.append([_head_dim(same[0]), mask_text(same[0]), *_over_ours(same, names)])
    return markdown(lines, left=(0, 1)) if names and any(r.own for r in rows) else ""


def _speedups(rows: Sequence[SpeedRow], density: float = 0.125, head_dim: int = 128) -> str:
    """One sentence: how much faster random blocks of this density are than the fastest dense."""
    rows = [r for r in rows if r.head_dim == head_dim and r.layout == LAYOUTS[0]]
    ours = {r.direction: r for r in rows if r.own and r.random and r.density == density
            and r.provider in MAIN}  # fmt: skip
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

    tokens = sorted({r.n_q for r in rows})
    dates, rounds = sorted({r.date[:10] for r in rows}), sorted({r.round for r in rows})
    peers = {f", {PROVIDERS[r.provider].package} {r.version}" for r in rows if r.version}
    between = lambda values: " to ".join(map(str, dict.fromkeys((values[0], values[-1]))))  # noqa: E731
    gpus = f", {several('gpu', 'GPU')}" if any(r.gpu for r in rows) else ""
    times = f"medians of {between(rounds)} rounds" if rounds != [1] else "one round"
    mark = (
        f" {MARK}: of two GPUs or processes." if len({(r.gpu, r.process) for r in rows}) > 1 else ""
    )
    return (
        f"{several('device')}, {several('dtype')}, {between(tokens)} tokens. {RATES}{mark}\n"
        f"torch {several('torch')}, Triton {several('triton')}{''.join(sorted(peers))},"
        f" {between(dates)}{gpus}, {several('commit', 'commit')}, {times}."
    )  # fmt: skip


def in_order(rows: Iterable[SpeedRow]) -> list[str]:
    """Return the providers of rows in the order of `PROVIDERS`, unknown ones last."""
    names = dict.fromkeys(r.provider for r in rows)
    return [p for p in PROVIDERS if p in names] + [p for p in names if p not in PROVIDERS]


def _own(rows: Sequence[SpeedRow], provider: str) -> bool:
    return any(r.own for r in rows if r.provider == provider)


def _of(provider: str, rows: Sequence[SpeedRow]) -> list[SpeedRow]:
    return [row for row in rows if row.provider == provider]


def _ours(rows: Sequence[SpeedRow]) -> list[SpeedRow]:
    """Return the rows of our first provider in order: before its other forms."""
    own = [r for r in rows if r.own]
    return _of(in_order(own)[0], own) if own else []


def _over_ours(same: Sequence[SpeedRow], peers: Sequence[str]) -> list[str]:
    """Return the time of every peer over ours at one case, forward / backward."""
    ours = by_direction(_ours(same))
    return [
        both({d: _ratio(r, ours[d]) for d, r in by_direction(_of(peer, same)).items() if d in ours})
        for peer in peers
    ]


def _ratio(row: SpeedRow, ours: SpeedRow) -> str:
    return f"{row.ms / ours.ms:.2f}{_mark(row, ours)}"


def _mark(a: SpeedRow, b: SpeedRow) -> str:
    """Return the mark of a ratio between rows of two GPUs or two processes, as far as is known."""
    differ = (a[name] and b[name] and a[name] != b[name] for name in ("gpu", "process"))
    return MARK if any(differ) else ""


def _rate(rows: Sequence[SpeedRow]) -> str:
    texts = {d: row.tflops for d, row in by_direction(rows).items() if row.tflops}
    return both({d: f"{x:.0f}" if x >= 10 else f"{x:.2g}" for d, x in texts.items()})


def by_direction(rows: Sequence[SpeedRow]) -> dict[str, SpeedRow]:
    """Return the rows of a provider in one line of a table. Raises ValueError for two of a
    direction, with what they differ in.
    """
    cells: dict[str, SpeedRow] = {}
    for row in rows:
        other = cells.setdefault(row.direction, row)
        pairs = {n: (other[n], row[n]) for n in (*SHAPE, "mask", *BLOCK)}
        if differ := [f"{n} ({a}, {b})" for n, (a, b) in pairs.items() if a != b]:
            raise ValueError(
                f"rows of {row.provider}, {row.mask}, {row.direction}, differ in "
                f"{', '.join(differ)} and would share a cell: keep those of one in the file"
            )
    return cells


def both(texts: Mapping[str, str]) -> str:
    """Return forward / backward; one of them alone is named."""
    if len(texts) == 2:
        return f"{texts['forward']} / {texts['backward']}"
    return next((f"{text} ({direction})" for direction, text in texts.items()), "")


def _regular(row: SpeedRow, first: SpeedRow) -> bool:
    """Return whether a row belongs to the table by density, of which the first row is one."""
    plain = row.random or row.mask == DENSE
    return plain and (row.n_q, row.layout) == (first.n_q, first.layout)


def layout_text(row: SpeedRow) -> str:
    return "B, N, H, D" if row.layout == LAYOUTS[1] else "B, H, N, D"


def mask_text(row: SpeedRow) -> str:
    """Return the text of a mask, long lists of numbers left out."""
    text = re.sub(r"\((\d+, ){4,}\d+\)", "(...)", row.mask)
    return "none" if row.mask == DENSE else f"`{text}`"


def _density_text(row: SpeedRow) -> str:
    return "no mask" if row.mask == DENSE else f"{row.density:.5g}"


def _heads(row: SpeedRow) -> str:
    keys = f", {row.kv_heads} of keys" if row.kv_heads != row.heads else ""
    return f"{row.batch} x {row.heads}{keys}"


def _head_dim(row: SpeedRow) -> str:
    return str(row.head_dim) + (f", values of {row.v_dim}" if row.v_dim != row.head_dim else "")


# what tells a case: names of columns, and texts
CASE: dict[str, Callable[[SpeedRow], str]] = {
    "head dim": _head_dim,
    "mask": mask_text,
    "tokens": lambda row: f"{row.n_q:,}",
    "batch x heads": _heads,
    "layout": layout_text,
}
MASKS: dict[str, Callable[[SpeedRow], str]] = {
    "mask": mask_text,
    "tokens": lambda row: str(row.n_q),
    "head dim": lambda row: str(row.head_dim),
    "layout": layout_text,
    "density": lambda row: f"{row.density:.3g}",
}
