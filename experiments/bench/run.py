"""Measure speed: what to measure and in which order, the gate, the time and the ideal time."""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import groupby
from typing import Any

import torch

from experiments.bench.cases import DENSE, DTYPES, LAYOUTS, Case
from experiments.bench.cost import CEILINGS, cost, ideal, measure_ceilings
from experiments.bench.gate import Gate, WrongResult
from experiments.bench.grids import GRIDS, make_grid
from experiments.bench.provider import DIRECTIONS
from experiments.bench.providers import PROVIDERS, default_providers, find
from experiments.bench.step import (
    Step,
    breaks_context,
    draw,
    expected_mib,
    measure,
    peak_extra_mib,
    why,
)
from experiments.bench.tables import SLACK, UNSTABLE, spread
from experiments.common.config import check, option
from experiments.common.devices import device_name
from experiments.common.provenance import now
from experiments.common.rows import OK, Row, Rows, clocks

KEY = (
    "provider direction batch heads kv_heads n_q n_k head_dim v_dim dtype layout "
    "block_q block_k round"
).split()
SHAPE = "mask seq_len batch heads kv_heads head_dim v_dim dtype layout block_size".split()
TOO_FAST = "faster than the ideal: the rates of this device are measured too low"


@dataclass(frozen=True)
class Measurement:
    """One measurement to make."""

    case: Case
    provider: str
    direction: str
    round: int = 1

    def row(self) -> Row:
        """Return what the row of this measurement says before it is made."""
        about = {"provider": self.provider, **find(self.provider).version()}
        about |= {"direction": self.direction, "round": self.round, **self.case.row()}
        return about | {"elements": self.case.elements}

    @property
    def cell(self) -> "Measurement":
        """The measurement in the first round."""
        return replace(self, round=1)


class Bench:
    """Measures one thing after another on one device, sharing inputs and expected values."""

    def __init__(self, device: torch.device, seconds: float):
        self.device, self.seconds = device, seconds
        self.gate = lru_cache(1)(lambda case: Gate(case, *self.inputs(_maskless(case))))
        self.attention = lru_cache(1)(lambda case, provider: find(provider).prepare(case, device))
        self.inputs = lru_cache(1)(lambda case: draw(case, device))
        self.ideal_ms = lru_cache(2)(self._ideal_ms)

    def run(self, what: Measurement) -> Row:
        """Return times, or the status that says why there are none."""
        try:
            if reason := find(what.provider).unsupported(what.case, self.device, what.direction):
                raise ValueError(reason)
            return self._measure(what)
        except Exception as failure:  # one provider's failure is a result, not the end of the run
            wrong = {"error": failure.error} if isinstance(failure, WrongResult) else {}
            return {"status": why(failure), **wrong}

    def step(self, what: Measurement) -> Step:
        """Return forward and backward as they are timed."""
        attend = self.attention(what.case, what.provider)
        return Step(attend, self.inputs(_maskless(what.case)))

    def _measure(self, what: Measurement) -> Row:
        case, direction = what.case, what.direction
        step = self.step(what)
        error = step.error(self.gate(case), (direction,))
        one = step.forward if direction == "forward" else step.both
        extra = peak_extra_mib(one, self.device)
        before = clocks(self.device)
        times = measure(step.call(direction), self.device, self.seconds)
        after = {f"{name}_after": mhz for name, mhz in clocks(self.device).items()}
        ideal_ms = self.ideal_ms(case, direction)
        too_fast = {"warning": TOO_FAST} if times.ms_median * SLACK < ideal_ms else {}
        return {
            "status": OK,
            "error": error,
            **times._asdict(),
            "tflops": case.flops(direction) / times.ms_median / 1e9,
            "extra_mib": extra,
            "extra_expected_mib": expected_mib(case, direction),
            "ideal_ms": ideal_ms,
            **too_fast,
            **before,
            **after,
        }

    def _ideal_ms(self, case: Case, direction: str) -> float:
        rates = CEILINGS.get(device_name(self.device))
        if rates is None or case.dtype not in rates.matmul_tflops:
            rates = measure_ceilings(str(self.device), (case.dtype,))
        return ideal(cost(case.shape, case.blocks, direction), rates, case.dtype).ms


def _maskless(case: Case) -> Case:
    """Return what the inputs of a case depend on."""
    return replace(case, mask=DENSE, block_q=0, block_k=0)


# ---- what to measure


@dataclass
class Options:
    """The options of experiments.speed. null: what suits the machine."""

    mask: Any = option(
        None, "texts of masks; dense is no mask: mask=[dense,random:0.1]", several=str
    )
    seq_len: Any = option(None, "tokens", several=int, least=1)
    batch: int | None = option(None, "sequences")
    heads: int | None = option(None, "query heads")
    kv_heads: int | None = option(None, "null: heads")
    head_dim: int | None = option(None, "features of a head")
    v_dim: int | None = option(None, "null: head_dim")
    dtype: str | None = option(None, choices=DTYPES)
    layout: str | None = option(None, "of memory: (B, H, N, D) or (B, N, H, D)", choices=LAYOUTS)
    block_size: Any = option(None, "tokens, or [block_q,block_k]", several=int, least=1)
    grid: str | None = option(
        None, "in place of all above: the first page, or shapes that others publish", choices=GRIDS
    )
    providers: Any = option(None, f"of {', '.join(PROVIDERS)}, or MODULE:NAME", several=str)
    directions: Any = option([*DIRECTIONS], "what is timed", several=str, choices=DIRECTIONS)
    device: str | None = option(None, "cuda | cpu; null: cuda if there is a GPU")
    rounds: int = option(
        2, "how often all is measured, in another order each time; tables show medians", least=1
    )
    seconds: float | None = option(
        None, "of repeats a measurement; null: 0.15 on a GPU, 0.25 on a CPU", above=0
    )
    rows: str = option("runs/speed/speed.jsonl", "added to; tables: the same name, .txt")
    fresh: bool = option(False, "true: start the next free name of rows instead")
    allow_changes: bool = option(
        False, "true: add rows under docs though the code differs from the last commit"
    )

    def __post_init__(self) -> None:
        check(self)


def chosen(options: Options, device: torch.device) -> list[Measurement]:
    """Return the measurements of the named grid, or of the given masks and shapes.

    Raises ValueError for a provider, mask or shape that does not exist.
    """
    given = {name: getattr(options, name) for name in SHAPE}
    if options.grid is None:
        cases = make_grid(str(device), **given)
        return measurements(
            cases, options.providers or default_providers(device), options.directions
        )
    if any(value is not None for value in given.values()):
        raise ValueError(f"grid={options.grid} has its own masks and shapes: leave these out")
    found: dict[Measurement, None] = {}
    for part in GRIDS[options.grid](device):
        names = [n for n in part.providers if not options.providers or n in options.providers]
        found |= dict.fromkeys(measurements(part.cases, names, options.directions))
    return list(found)


def measurements(
    cases: Iterable[Case], providers: Sequence[str], directions: Sequence[str]
) -> list[Measurement]:
    """Return what the cases, providers and directions give, everything of a case together.

    Raises ValueError for a provider, mask or block size that does not exist.
    """
    known = {name: find(name) for name in providers}
    cases = list(cases)
    for case in cases:
        _ = case.blocks  # refuses an impossible mask now, not in the middle of the run
    return [
        Measurement(case, name, direction)
        for case in cases
        for name, provider in known.items()
        for direction in directions
        if direction in provider.directions and provider.concerns(case)
    ]


def in_rounds(wanted: Sequence[Measurement], rounds: int) -> list[Measurement]:
    """Return all of `wanted` in every round, beginning each time with another provider of a case.
    Every other round takes the cases backwards: dense attention, which comes first, is measured at
    the end again.

    What a provider gains or loses by its place, by the clock or the temperature, then shows as the
    range of the rounds.
    """
    found = []
    cases = [list(group) for _, group in groupby(wanted, lambda what: what.case)]
    for number in range(rounds):
        for group in cases[:: -1 if number % 2 else 1]:
            names = list(dict.fromkeys(what.provider for what in group))
            first = number % len(names)
            for name in (*names[first:], *names[:first]):
                found += [replace(w, round=number + 1) for w in group if w.provider == name]
    return found


def unstable(wanted: Sequence[Measurement], rows: Sequence[Row]) -> list[Measurement]:
    """Return the measurements whose rounds differ by more than `UNSTABLE`."""
    times: dict[Measurement, list[float]] = defaultdict(list)
    for what, row in zip(wanted, rows, strict=False):
        if row["status"] == OK:
            times[what.cell].append(row["ms_median"])
    return [what for what in wanted if spread(times[what.cell]) > UNSTABLE]


def run(
    wanted: Sequence[Measurement], bench: Bench, rows: Rows, command: str, *, again: bool = False
) -> list[Row]:
    """Return the row of each, measured now or found in `rows`, to which new ones are added.

    again: measure also what `rows` holds.
    """
    found, origin = [], rows.origin(bench.device, command)
    for i, what in enumerate(wanted, 1):
        row, note = what.row() | origin, ""
        known = rows.find(row)
        if known is not None and known["status"] == OK and not again:
            row, note = known, f"  (measured {known['date']})"
        else:
            row |= bench.run(what) | {"date": now()}
            if again or known is None or known["status"] != row["status"]:  # a failure once
                row = rows.append(row)
        found.append(row)
        print(f"[{i:3}/{len(wanted)}] {describe(row)}{note}", flush=True)
        if breaks_context(row["status"]):
            print("the device is lost to this process: run again for the rest", flush=True)
            break
    return found


def describe(row: Row) -> str:
    """Return a row as one line of text."""
    what = "{provider:20} {direction:8} {mask:46} N {n_q:<6} D {head_dim:<3}".format(**row)
    what += f" round {row['round']}" if row["round"] > 1 else ""
    if row["status"] != OK:
        return f"{what}  {row['status']}"
    share = f"{100 * row['ideal_ms'] / row['ms_median']:3.0f} % of ideal  "
    text = f"{what}  {row['ms_median']:9.3f} ms {row['tflops']:8.3f} TFLOP/s  {share}"
    warning = f"  warning: {row['warning']}" if row.get("warning") else ""
    return f"{text}error {row['error']:.1e}{warning}"
