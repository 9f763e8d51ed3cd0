"""The study of speed: masks and shapes by provider and direction, beside the ideal time.

`experiments.speed` runs it as the other studies are run, with options of its own.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import torch

import masks
from experiments.bench.cases import DENSE, DTYPES, LAYOUTS, Case
from experiments.bench.cost import CEILINGS, cost, ideal, measure_ceilings
from experiments.bench.gate import Gate
from experiments.bench.provider import DIRECTIONS
from experiments.bench.providers import PROVIDERS, default_providers, find, installed
from experiments.bench.step import Step, draw, measure, peak_extra_mib
from experiments.bench.tables import SLACK
from experiments.common.config import CONF, Checked, option
from experiments.common.devices import device_name
from experiments.common.files import read_yaml
from experiments.common.rows import Row
from experiments.studies.runner import Run

KEY = (
    "provider direction batch heads kv_heads n_q n_k head_dim v_dim dtype layout "
    "block_q block_k round"
).split()
SHAPE = "mask seq_len n_q batch heads kv_heads head_dim v_dim dtype layout block_size".split()
GRIDS = sorted(path.stem for path in (CONF / "grids").glob("*.yaml"))
DENSITIES = (0.5, 0.25, 0.125, 0.0625, 0.03125)
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


def make_grid(
    device: str,
    mask: Sequence[str] | None = None,
    seq_len: Sequence[int] | None = None,
    block_size: Sequence[int] | None = None,
    **shape: int | str | None,
) -> list[Case]:
    """Return cases of speed against density, and of time against length, which suit the device.

    Given values take the place of the defaults. A mask or a length takes the sweep over lengths.
    shape: batch, heads, kv_heads, n_q, head_dim, v_dim, dtype, layout; None leaves the default,
    and as many queries as keys.
    Raises ValueError for values that no case can have.
    """
    if torch.device(device).type == "cuda":
        first = Case(DENSE, 2, 16, 16, 16384, 16384, 128, "bfloat16", 128, 128)
        shapes = [first, replace(first, heads=32, kv_heads=32, head_dim=64)]
        structured, densities = "local:256+butterfly:128+global:128", (1, *DENSITIES)
        sweep = (1024, 2048, 4096, 8192, 16384, 32768, 65536)
    else:
        shapes = [Case(DENSE, 1, 4, 4, 4096, 4096, 64, "float32", 64, 64)]
        structured, densities = "local:256+butterfly:64+global:64", (1, *DENSITIES[:4])
        sweep = (512, 1024, 2048, 4096)
    usual = [DENSE, *(f"random:{d}:block={shapes[0].block_k}" for d in densities), structured]
    given: dict[str, Any] = {name: value for name, value in shape.items() if value is not None}
    if "heads" in given:
        given.setdefault("kv_heads", given["heads"])
    if block_size is not None:
        if len(block_size) > 2:
            raise ValueError(f"block_size={block_size}: give one size, or [block_q,block_k]")
        given |= {"block_q": block_size[0], "block_k": block_size[-1]}
    shapes = [replace(s, **given) for s in shapes]
    lengths = seq_len or [shapes[0].n_k]
    lengthened = [replace(s, n_q=given.get("n_q", n), n_k=n) for s in shapes for n in lengths]
    for case in lengthened:
        case.check()
    found = [case for s in lengthened for case in _cases(s, usual if mask is None else mask)]
    if mask is None and seq_len is None:
        longer = [replace(shapes[0], n_q=given.get("n_q", n), n_k=n) for n in sweep]
        found += [case for s in longer for case in _cases(s, (DENSE, structured))]
    return list(dict.fromkeys(found))


def read_grid(name: str, device: torch.device) -> list[tuple[Case, tuple[str, ...]]]:
    """Return the cases of conf/grids/NAME.yaml with their providers, as far as installed.

    What a part there does not say: batch 1, head dim 128, bfloat16, blocks of 128, (B, H, N, D).
    """
    if device.type != "cuda":
        raise ValueError(f"grid={name} needs a GPU, and the device is {device}: leave it out")
    found = []
    for part in read_yaml(CONF / "grids" / f"{name}.yaml", "a grid has parts")["parts"]:
        n, heads, block = part["n"], part["heads"], part.get("block", 128)
        sizes = part.get("batch", 1), heads, part.get("kv_heads", heads), n, n
        shape = Case(DENSE, *sizes, part.get("head_dim", 128), "bfloat16", block, block)
        shape = replace(shape, layout=part.get("layout", LAYOUTS[0]))
        providers = installed(*part["providers"])
        found += [(case, providers) for case in _cases(shape, part["masks"])]
    return found


def _cases(shape: Case, texts: Iterable[str]) -> list[Case]:
    """Return a case for each mask, with its own text: one mask has one name in every row."""
    dense = replace(shape, mask=DENSE, block_q=0, block_k=0)  # which has no blocks
    return [
        dense if text == DENSE else replace(shape, mask=str(masks.parse(text))) for text in texts
    ]


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
