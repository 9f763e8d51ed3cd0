"""Runtime and memory of attentions against length, in the form of FlashAttention's appendix E.

Exact attentions pass the gate first. What runs out of memory gets a row with the reason.
See docs/results/memory.md.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from matplotlib.figure import Figure

from experiments.bench.cases import DTYPES
from experiments.bench.peers import methods
from experiments.bench.peers.methods import METHODS, Setting
from experiments.bench.step import DIRECTIONS
from experiments.common.figures import Curve, file_name, length_figure
from experiments.common.rows import OK, Found, Row
from experiments.common.tables import MISSING, markdown
from experiments.studies import runner
from experiments.studies.runner import Run, both, choices, latest

KEY = "method direction dropout padding batch heads n head_dim dtype".split()
SOURCES = methods.SOURCES
OURS = ("flash", "sparse")
VARIANTS = {  # of a table: dropout, padding
    "plain": (False, False),
    "dropout": (True, False),
    "padding": (False, True),
    "both": (True, True),
}
Value = Callable[[Found], float | None]


@dataclass(kw_only=True)
class Options(runner.Options):
    methods: list[str] = field(default_factory=list)  # of METHODS; none: all that the device has
    lengths: list[int] = both([2**i for i in range(7, 21)], [2**i for i in range(7, 12)])
    peers_to: int = 65536  # tokens up to which others than flash and sparse are measured
    variants: list[str] = both([*VARIANTS], ["plain"])  # plain, dropout, padding, both
    dropout: float = 0.1  # of the probabilities, in the variants with dropout
    batch: int = both(16, 1)  # above 65,536 tokens less
    heads: int = both(8, 2)
    head_dim: int = 64
    dtype: str = both("bfloat16", "float32")
    seconds: float = both(0.05, 0.03)


def cases(run: Run) -> list[Setting]:
    """Return the settings: the plain table first, and in it the short lengths.

    From 131,072 tokens on, batches shrink so that the tokens of a batch stay those of 65,536.
    """
    o = run.options
    other = ("sdpa_flash", "sdpa_cudnn") if run.device.type == "cpu" else ("sdpa",)
    choices(o, methods=METHODS, variants=VARIANTS, dtype=DTYPES)
    return [
        Setting(
            name, max(1, min(o.batch, o.batch * 65536 // n)), o.heads, n, o.head_dim, o.dtype,
            o.dropout if dropout else 0.0, padding,
        )
        for dropout, padding in (VARIANTS[variant] for variant in o.variants)
        for n in sorted(o.lengths)
        for name in o.methods or METHODS
        if o.methods or name not in other
        if n <= o.peers_to or name in OURS
    ]  # fmt: skip


def ways(case: Setting, run: Run) -> list[Row]:
    return [{"direction": direction} for direction in DIRECTIONS]


def opened(case: Setting, run: Run) -> Callable[[Row], dict[str, Any]]:
    made = cache(lambda: case.prepared(run.device))

    def one(row: Row) -> dict[str, Any]:
        step, error = made()
        memory = {}
        if row["direction"] == "both":
            memory = {"saved_mib": step.saved_mib(), "peak_mib": step.peak_mib(run.device)}
        times = step.time(row["direction"], run.device, run.options.seconds)
        return {"error": error, **memory, **times}

    return one


def newest(frame: Any) -> list[Found]:
    """Return one row a cell of the tables: the last that was measured, with the device, the heads
    and the dtype of the last row. Rows with a causal mask, of an older form, are left out.
    """
    frame = frame[[not str(mask).endswith("causal()") for mask in frame["mask"]]]
    cell = "method direction dropout padding n head_dim".split()
    return latest(frame, "device heads dtype", cell)


def tables(frame: Any) -> dict[str, str]:
    """Return tables WHAT_VARIANT, with _d128 where that is so.

    WHAT: ms | forward | backward (milliseconds) | memory. VARIANT: plain | dropout | padding |
    both.
    """
    names, made = {flags: name for name, flags in VARIANTS.items()}, {}
    groups: dict[tuple[str, str], list[Found]] = {}
    for row in newest(frame):
        end = f"_{names[bool(row.dropout), bool(row.padding)]}"
        end += f"_d{row.head_dim}" if row.head_dim != 64 else ""
        groups.setdefault((row.direction, end), []).append(row)
    for (direction, end), own in groups.items():
        made[("ms" if direction == "both" else direction) + end] = table(own)
        if direction == "both":
            made[f"memory{end}"] = table(own, memory_of(own))
    return made


def time_of(row: Found) -> float | None:
    """Return milliseconds, where there are any."""
    return row.ms_median if row.status == OK else None


def memory_of(rows: Sequence[Found]) -> Value:
    """Return MiB at the peak, where any of the rows has one, else MiB kept for the backward."""
    peak = any(row.peak_mib for row in rows)
    return lambda row: row.peak_mib if peak else row.saved_mib


def table(rows: Sequence[Found], value: Value = time_of) -> str:
    """Return methods down, lengths across; the least of a length is bold."""
    cells = {(row.method, row.n): value(row) for row in rows}
    lengths = sorted({row.n for row in rows})
    best = {n: min((x for (_, m), x in cells.items() if m == n and x is not None), default=None)
            for n in lengths}  # fmt: skip

    def text(method: str, n: int) -> str:
        x = cells.get((method, n))
        if x is None:
            return MISSING
        shown = f"{x:.3g}" if x < 1000 else f"{x:,.0f}"
        return f"**{shown}**" if x == best[n] else shown

    shown = [name for name in METHODS if any(row.method == name for row in rows)]
    lines = [[METHODS[name].label, *(text(name, n) for n in lengths)] for name in shown]
    return markdown([["attention", *(f"{n:,}" for n in lengths)], *lines])


def figures(frame: Any) -> dict[str, Figure]:
    """Return time and memory of forward and backward against length, of plain rows."""
    plain = [r for r in newest(frame) if r.direction == "both" and not (r.dropout or r.padding)]
    made = {}
    for head_dim in sorted({row.head_dim for row in plain}):
        rows = [row for row in plain if row.head_dim == head_dim]
        words = [f"d{head_dim}"] * (head_dim != 64) + [rows[0].device]
        peak = "MiB at the peak" if any(r.peak_mib for r in rows) else "MiB kept for the backward"
        made[file_name("runtime", *words)] = _draw(rows, "ms, forward and backward", time_of)
        made[file_name("memory", *words)] = _draw(rows, peak, memory_of(rows))
    return made


def _draw(rows: Sequence[Found], label: str, value: Value) -> Figure:
    """Return a panel a group of methods; ours is in every one."""
    curves = {}
    for name, method in METHODS.items():
        own = sorted((r for r in rows if r.method == name and value(r)), key=lambda r: r.n)
        if own:
            curves[name] = Curve(method.label, method.style, {r.n: value(r) or 0.0 for r in own})
    groups: dict[str, list[Curve]] = {METHODS[name].group: [] for name in curves}
    for name, one in curves.items():
        for group in groups if name == "sparse" else [METHODS[name].group]:
            groups[group].append(one)
    return length_figure({label: groups})
