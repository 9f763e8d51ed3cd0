"""The study of speed: masks and shapes by provider and direction, beside the ideal time.

`experiments.speed` runs it as the other studies are run, with options of its own.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch

from experiments.bench.cases import DTYPES, LAYOUTS, Case
from experiments.bench.cost import CEILINGS, cost, ideal, measure_ceilings
from experiments.bench.gate import Gate
from experiments.bench.grids import GRIDS, make_grid, read_grid
from experiments.bench.provider import DIRECTIONS
from experiments.bench.providers import PROVIDERS, default_providers, find
from experiments.bench.step import Step, draw, measure, peak_extra_mib
from experiments.bench.tables import SLACK
from experiments.common.config import Checked, option
from experiments.common.devices import device_name
from experiments.common.rows import Row
from experiments.studies.runner import Run

KEY = (
    "provider direction batch heads kv_heads n_q n_k head_dim v_dim dtype layout "
    "block_q block_k round"
).split()
SHAPE = "mask seq_len n_q batch heads kv_heads head_dim v_dim dtype layout block_size".split()
TOO_FAST = "faster than the ideal: the rates of this device are measured too low"


@dataclass
class Options(Checked):
    """The options of experiments.speed. null: what suits the machine."""

    mask: Any = option(
        None, "texts of masks; dense is no mask: mask=[dense,random:0.1]", several=str
    )
    seq_len: Any = option(None, "tokens", several=int, least=1)
    n_q: int | None = option(None, "queries; null: seq_len")
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
    allow_changes: bool = option(
        False, "true: add rows under docs though the code differs from the last commit"
    )


@dataclass(frozen=True)
class Asked:
    """A case and the providers that are measured at it."""

    case: Case
    providers: tuple[str, ...]

    def row(self) -> Row:
        return self.case.row()


def cases(run: Run) -> list[Asked]:
    """Return the cases of the named grid, or of the given masks and shapes.

    Raises ValueError for a provider, mask or shape that does not exist.
    """
    o, device = run.options, run.device
    given = {name: getattr(o, name) for name in SHAPE}
    if o.grid is None:
        names = tuple(o.providers or default_providers(device))
        pairs = [(case, names) for case in make_grid(str(device), **given)]
    elif any(value is not None for value in given.values()):
        raise ValueError(f"grid={o.grid} has its own masks and shapes: leave these out")
    else:
        pairs = read_grid(o.grid, device)
    longest = max((case.n_q for case, _ in pairs), default=0)
    found: dict[Case, dict[str, None]] = {}
    for case, providers in pairs:
        names = [name for name in providers if not o.providers or name in o.providers]
        _ = case.blocks  # refuses an impossible mask now, not in the middle of the run
        # FlexAttention compiles for up to ten seconds on a CPU
        short = case.n_q < longest and device.type == "cpu" and not o.providers
        concerned = (n for n in names if find(n).concerns(case) and not (short and n == "flex"))
        found.setdefault(case, {}).update(dict.fromkeys(concerned))
    return [Asked(case, tuple(names)) for case, names in found.items() if names]


def ways(asked: Asked, run: Run) -> list[Row]:
    return [
        {"provider": name, **find(name).version(), "direction": direction}
        for name in asked.providers
        for direction in run.options.directions
        if direction in find(name).directions
    ]


def opened(asked: Asked, run: Run) -> Callable[[Row], Row]:
    case, device = asked.case, run.device
    seconds = run.options.seconds or (0.15 if device.type == "cuda" else 0.25)
    qkv = draw(case, device)
    gate = lru_cache(1)(lambda: Gate(case, *qkv))
    attention = lru_cache(1)(lambda name: find(name).prepare(case, device))

    def one(row: Row) -> Row:
        name, direction = row["provider"], row["direction"]
        if reason := find(name).unsupported(case, device, direction):
            raise ValueError(reason)
        step = Step(attention(name), qkv)
        known = case, name, direction
        if known not in run.kept:  # once, not in every round
            error = step.error(gate(), (direction,))
            extra = peak_extra_mib(step.forward if direction == "forward" else step.both, device)
            run.kept[known] = error, extra
        error, extra = run.kept[known]
        times = measure(step.call(direction), device, seconds)
        least = ideal_ms(case, direction, device)
        rate = case.flops(direction) / times.ms_median / 1e9
        found = {"elements": case.elements, "error": error, "extra_mib": extra, "tflops": rate}
        too_fast = {"warning": TOO_FAST} if times.ms_median * SLACK < least else {}
        return {**found, **times._asdict(), "ideal_ms": least, **too_fast}

    return one


def ideal_ms(case: Case, direction: str, device: torch.device) -> float:
    """Return the ideal time of a case."""
    rates = CEILINGS.get(device_name(device))
    if rates is None or case.dtype not in rates.matmul_tflops:
        rates = measure_ceilings(str(device), (case.dtype,))
    return ideal(cost(case.shape, case.blocks, direction), rates, case.dtype).ms
