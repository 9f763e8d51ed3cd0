"""Runtime and memory of attentions against length, in the form of FlashAttention's appendix E.

Exact attentions pass the gate first. What runs out of memory, or would take too long, gets a row
with the reason. See docs/results/memory.md.
"""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure

import masks
from experiments.bench.cases import DTYPES
from experiments.common.figures import PAGE, curve, file_name, length_axis, plain_log_axis
from experiments.common.rows import OK, Found, Row, found
from experiments.common.tables import MISSING, markdown
from experiments.studies import methods, runner
from experiments.studies.methods import CAUSAL, METHODS, PUBLISHED, Setting, compiled
from experiments.studies.runner import LEFT_OUT, Run, choices
from experiments.studies.step import DIRECTIONS, PaddedCase, PaddedGate, Step, draw, time_call

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
    name: str = "attention_table"
    methods: list[str] = field(default_factory=list)  # of METHODS; none: all that the device has
    lengths: list[int]
    peers_to: int = 65536  # tokens up to which others than flash and sparse are measured
    variants: list[str]  # plain, dropout, padding, both
    dropout: float = 0.1  # of the probabilities, in the variants with dropout
    batch: int  # above 65,536 tokens less
    heads: int
    head_dim: int = 64
    causal: bool = False  # a query sees keys up to its own; standard, SDPA and ours
    dtype: str
    limit_s: float  # longest call that is measured


DEFAULTS = {
    "cuda": Options(
        lengths=[2**i for i in range(7, 21)], variants=[*VARIANTS], batch=16, heads=8,
        dtype="bfloat16", seconds=0.05, limit_s=5.0,
    ),
    "cpu": Options(
        lengths=[2**i for i in range(7, 12)], variants=["plain", "both"], batch=1, heads=2,
        dtype="float32", seconds=0.03, limit_s=1.0,
    ),
}  # fmt: skip


@dataclass(frozen=True)
class Case(Setting):
    """A setting as a case: what follows from its mask is a field of the row."""

    def row(self) -> Row:
        mask, density = self.mask()
        return {k: v for k, v in asdict(self).items() if k != "causal"} | {
            "mask": mask,
            "density": density,
        }

    def mask(self) -> tuple[str, float | None]:
        """Return the mask of a block-sparse or causal method and its density."""
        if self.causal and self.about.kind not in CAUSAL:
            return str(masks.causal()), None
        if self.about.kind not in ("sparse", *PUBLISHED) and not self.causal:
            return "", None
        case = self.case(self.make(torch.device("cpu")))
        return case.mask, case.density


def cases(run: Run) -> list[Case]:
    """Return the settings: the plain table first, and in it the short lengths.

    From 131,072 tokens on, batches shrink so that the tokens of a batch stay those of 65,536.
    """
    o = run.options
    other = ("sdpa_flash", "sdpa_cudnn") if run.device.type == "cpu" else ("sdpa",)
    own = [n for n in METHODS if n not in other and (not o.causal or METHODS[n].kind in CAUSAL)]
    choices(o, methods=METHODS, variants=VARIANTS, dtype=DTYPES)
    if not 0 <= o.dropout < 1:
        raise ValueError(f"dropout={o.dropout}: give a number from 0 to below 1")
    return [
        Case(
            name, max(1, min(o.batch, o.batch * 65536 // n)), o.heads, n, o.head_dim, o.dtype,
            o.dropout if dropout else 0.0, padding, o.causal,
        )
        for dropout, padding in (VARIANTS[variant] for variant in o.variants)
        for n in sorted(o.lengths)
        for name in o.methods or own
        if n <= o.peers_to or name in OURS
    ]  # fmt: skip


def ways(case: Case, run: Run) -> list[Row]:
    return [{"direction": direction} for direction in DIRECTIONS]


def opened(case: Case, run: Run) -> Callable[[Row], dict[str, Any]]:
    """Return what measures a direction: a setting that cannot run is not made at all."""
    refused, made = case.unsupported(run.device), None

    def one(row: Row) -> dict[str, Any]:
        nonlocal made
        if reason := refused or too_slow(case, row, run):
            return {"status": reason}
        made = made or prepared(case, run)
        step, error, wrong = made
        if wrong:
            return {"status": wrong, "error": error}
        memory = {}
        if row["direction"] == "both":
            memory = {"saved_mib": step.saved_mib(), "peak_mib": step.peak_mib(run.device)}
        call = step.call(row["direction"])
        call()
        times = time_call(call, run.device, run.options.seconds)
        return {"error": error, **memory, **times._asdict()}

    return one


def prepared(case: Case, run: Run) -> tuple[Step, float | None, str | None]:
    """Return forward and backward of a setting, its error and why it is not timed."""
    device = run.device
    made, lengths = case.make(device), case.lengths(device)
    ends = () if lengths is None else tuple(lengths.tolist())
    padded = PaddedCase(**asdict(case.case(made)), lengths=ends)
    q, k, v = draw(padded, device)
    plan = None if lengths is None else made.plan(lengths, q.dtype)
    call = compiled(made, device) if case.about.compiled else made
    qkv = (q, q if made.shared_qk else k, v)
    step = Step(lambda q, k, v: call(q, k, v, plan), qkv, tuple(made.parameters()))
    if not case.about.exact:
        return step, None, None
    gate = PaddedGate(padded, *qkv)
    made.eval()  # without dropout
    error = step.error(gate)
    made.train()
    return step, error, gate.verdict(error)


def too_slow(case: Case, row: Row, run: Run) -> str | None:
    """Return why a call is left out, by the growth of its work since the last length, or None."""
    series = "method direction dropout padding head_dim device".split()
    known = [
        r
        for r in run.rows.rows
        if r["status"] == OK and r["n"] <= case.n and causal(r) == case.causal
        and all(r[name] == row[name] for name in series)
    ]  # fmt: skip
    if not known:
        return None
    last = known[-1]
    growth = (case.n / last["n"]) ** (2 if case.about.quadratic else 1)
    predicted = last["ms_median"] / 1000 * growth * case.batch / last["batch"]
    limit = run.options.limit_s
    if predicted <= limit:
        return None
    return f"{LEFT_OUT}: a call would take about {predicted:.2g} s, limit_s={limit:g}"


def causal(row: Row) -> bool:
    """Return whether a query sees keys up to its own only, as the end of the mask says."""
    return row["mask"].endswith(str(masks.causal()))


def newest(frame: Any) -> list[Found]:
    """Return one row a cell of the tables: the last that was measured, with the device, the heads
    and the dtype of the last row.
    """
    rows = [Found(row | {"mask": row.mask or ""}) for row in found(frame)]
    shared = lambda r: (r.device, r.heads, r.dtype)  # noqa: E731
    here = [row for row in rows if shared(row) == shared(rows[-1])]
    cell = lambda r: (r.method, r.direction, r.dropout, r.padding, r.n, *_kind(r))  # noqa: E731
    return list({cell(row): row for row in here}.values())


def _kind(row: Found) -> tuple[int, bool]:
    """Return what the rows of a table have in common besides dropout and padding."""
    return row.head_dim, causal(row)


def tables(frame: Any) -> dict[str, str]:
    """Return tables WHAT_VARIANT, with _d128 and _causal where that is so.

    WHAT: ms | forward | backward (milliseconds) | gain (times as fast as standard attention) |
    memory. VARIANT: plain | dropout | padding | both. `missing` has the reasons.
    """
    rows, made = newest(frame), {}
    names = {flags: name for name, flags in VARIANTS.items()}
    groups: dict[str, list[Found]] = {}
    for row in rows:
        end = f"_{names[bool(row.dropout), bool(row.padding)]}"
        end += (f"_d{row.head_dim}" if row.head_dim != 64 else "") + "_causal" * causal(row)
        groups.setdefault(end, []).append(row)
    for end, own in groups.items():
        both = [row for row in own if row.direction == "both"]
        for name in ("forward", "backward"):
            if way := [row for row in own if row.direction == name]:
                made[name + end] = table(way, time_of)
        if both:
            made |= {f"ms{end}": table(both, time_of), f"gain{end}": table(both, gains(both))}
            made[f"memory{end}"] = table(both, memory_of(both))
    if reasons := missing(rows):
        made["missing"] = markdown(reasons, left=(0, 1, 2))
    return made


def gains(rows: Sequence[Found]) -> Value:
    """Return how many times as fast a row is as standard attention of its length."""
    base = {row.n: row.ms_median for row in rows if row.method == "standard" and row.status == OK}
    return lambda row: base[row.n] / row.ms_median if row.status == OK and row.n in base else None


def time_of(row: Found) -> float | None:
    """Return milliseconds, where there are any."""
    return row.ms_median if row.status == OK else None


def memory_of(rows: Sequence[Found]) -> Value:
    """Return MiB at the peak, where any of the rows has one, else MiB kept for the backward."""
    peak = any(row.peak_mib for row in rows)
    return lambda row: row.peak_mib if peak else row.saved_mib


def table(rows: Sequence[Found], value: Value) -> str:
    """Return methods down, lengths across; the best of a length is bold: the least, of gains the
    most.
    """
    lengths = sorted({row.n for row in rows})
    cells = {(row.method, row.n): value(row) for row in rows}
    known = {n: [x for (_, m), x in cells.items() if m == n and x is not None] for n in lengths}
    pick = max if value.__qualname__.startswith("gains") else min
    best = {n: pick(known[n], default=None) for n in lengths}

    def text(method: str, n: int) -> str:
        x = cells.get((method, n))
        if x is None:
            return MISSING
        shown = f"{x:.3g}" if x < 1000 else f"{x:,.0f}"
        return f"**{shown}**" if x == best[n] else shown

    lines = [["attention", *(f"{n:,}" for n in lengths)]]
    for name in METHODS:
        if any(method == name for method, _ in cells):
            lines.append([METHODS[name].label, *(text(name, n) for n in lengths)])
    return markdown(lines)


def missing(rows: Sequence[Found]) -> list[list[str]]:
    """Return a line for each method and reason, with the lengths; the head first."""
    reasons: dict[tuple[str, str], set[int]] = {}
    for row in rows:
        if row.status != OK:
            reason = row.status.split(": a call")[0].split(": needs about")[0]
            reasons.setdefault((METHODS[row.method].label, reason), set()).add(row.n)
    lines = [
        [*what, ", ".join(f"{n:,}" for n in sorted(lengths))] for what, lengths in reasons.items()
    ]
    return [["attention", "reason", "lengths"], *lines] if lines else []


def figures(frame: Any) -> dict[str, Figure]:
    """Return time and memory of forward and backward against length, of plain rows."""
    plain = [r for r in newest(frame) if r.direction == "both" and not (r.dropout or r.padding)]
    made = {}
    for head_dim, masked in sorted(set(map(_kind, plain))):
        rows = [row for row in plain if _kind(row) == (head_dim, masked)]
        words = [f"d{head_dim}"] * (head_dim != 64) + ["causal"] * masked + [rows[0].device]
        peak = "MiB at the peak" if any(r.peak_mib for r in rows) else "MiB kept for the backward"
        values = {
            "runtime": ("ms, forward and backward", time_of),
            "memory": (peak, memory_of(rows)),
        }
        for name, (label, value) in values.items():
            if any(value(row) for row in rows):
                made[file_name(name, *words)] = _draw(rows, label, value)
    return made


def _draw(rows: Sequence[Found], label: str, value: Value) -> Figure:
    """Return a panel a group of methods, each with a legend of its own; ours is in every one."""
    shown = [name for name in METHODS if any(r.method == name and value(r) for r in rows)]
    groups = dict.fromkeys(METHODS[name].group for name in shown)
    figure, panels = plt.subplots(1, len(groups), figsize=(PAGE, 3.6), squeeze=False, sharey=True)
    for axes, group in zip(panels[0], groups, strict=True):
        axes.set_title(group, loc="left")
        _panel(axes, rows, [n for n in shown if METHODS[n].group == group or n == "sparse"], value)
        axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.22))
    panels[0][0].set_ylabel(label)
    return figure


def _panel(axes: Axes, rows: Sequence[Found], names: Sequence[str], value: Value) -> None:
    lengths = sorted({row.n for row in rows})
    for name in names:
        points = [(r.n, y) for r in rows if r.method == name and (y := value(r)) is not None]
        if points:
            n, y = zip(*sorted(points), strict=True)
            curve(axes, n, y, METHODS[name].style, METHODS[name].label)
    length_axis(axes, lengths[:: 2 if len(lengths) > 8 else 1])
    plain_log_axis(axes)
