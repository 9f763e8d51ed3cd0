"""Measures the speed of block-sparse attention and its peers: one CSV row per measurement.

    python -m experiments.speed
    python -m experiments.speed mask=local:256,butterfly,random:0.1 seq_len=16384 -m

What the CSV holds already is not measured again, so a run that was stopped goes on where it was.
See docs/measuring.md.
"""

import shlex
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import lru_cache
from typing import Any

import hydra
import torch
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, OmegaConf
from torch import Tensor

from experiments.cases import DTYPES, Case, make_grid
from experiments.gate import Gate
from experiments.providers import Attention, default_providers, find
from experiments.records import OK, Records, Row, device_name, now, versions
from experiments.table import newest, tables
from experiments.timing import Times, expected_mib, measure, peak_extra_mib
from sparseflash.testing import make_qkv

DIRECTIONS = ("forward", "backward")


@dataclass(frozen=True)
class Task:
    """One measurement to make."""

    case: Case
    provider: str
    direction: str


def plan(cases: Sequence[Case], providers: Sequence[str], directions: Sequence[str]) -> list[Task]:
    """Every measurement of the grid, ordered so that what belongs to a case comes together.

    Raises ValueError for a provider, direction, mask or block size that does not exist.
    """
    for direction in directions:
        if direction not in DIRECTIONS:
            raise ValueError(f"direction {direction!r}: choose from {', '.join(DIRECTIONS)}")
    found = {name: find(name) for name in providers}
    for case in cases:
        _ = case.blocks  # an impossible mask is refused now, not in the middle of the run
    return [
        Task(case, name, direction)
        for case in cases
        for name, provider in found.items()
        if case.blocks is None or not provider.dense_only
        for direction in directions
    ]


class Bench:
    """Measures one task after another on one device, sharing inputs and expected values."""

    def __init__(self, device: torch.device, seconds: float):
        self.device, self.seconds = device, seconds
        self.gate = lru_cache(maxsize=1)(self._gate)
        self.attention = lru_cache(maxsize=1)(self._attention)
        self.inputs = lru_cache(maxsize=1)(self._inputs)

    def run(self, task: Task, row: Row) -> Row:
        """`row` filled in: with times, or with the status that says why there are none."""
        try:
            reason = find(task.provider).unsupported(task.case, self.device, task.direction)
            if reason:
                return _replace(row, status=f"unsupported: {reason}")
            return self._measure(task, row)
        except (ValueError, NotImplementedError) as refusal:
            return _replace(row, status=f"unsupported: {_brief(refusal)}")
        except Exception as failure:  # one provider's failure is a result, not the end of the run
            return _replace(row, status=f"failed: {type(failure).__name__}: {_brief(failure)}")

    def _measure(self, task: Task, row: Row) -> Row:
        case, backward = task.case, task.direction == "backward"
        gate, attention = self.gate(case), self.attention(case, task.provider)
        q, k, v = (t.detach().requires_grad_(backward) for t in (gate.q, gate.k, gate.v))
        with torch.set_grad_enabled(backward):
            if backward:
                grads = torch.autograd.grad(attention(q, k, v), (q, k, v), gate.dout)
                error = gate.backward_error(*grads)
                del grads
            else:
                error = gate.forward_error(attention(q, k, v))
            wrong = gate.verdict(error)
            if wrong:
                return _replace(row, status=wrong, error=error)
            # Not gate.dout: its zeros would make the arithmetic cheaper than it is.
            dout = torch.randn_like(q) if backward else None
            extra = peak_extra_mib(_step(attention, (q, k, v), dout), self.device)
            times = measure(_timed(attention, (q, k, v), dout), self.device, self.seconds)
        return _filled(row, case, times, error, extra)

    def _gate(self, case: Case) -> Gate:
        shape = (case.batch, case.heads, case.n_q, case.n_k, case.head_dim)
        return Gate(case, *self.inputs(shape, case.kv_heads, case.dtype))

    def _inputs(self, shape: tuple[int, ...], kv_heads: int, dtype: str) -> tuple[Tensor, ...]:
        return make_qkv(*shape, kv_heads=kv_heads, dtype=DTYPES[dtype], device=self.device)

    def _attention(self, case: Case, provider: str) -> Attention:
        return find(provider).prepare(case, self.device)


def _step(
    attention: Attention, qkv: tuple[Tensor, ...], dout: Tensor | None
) -> Callable[[], object]:
    """Forward, and where there is a dout backward too: what a layer of a model does."""
    if dout is None:
        return lambda: attention(*qkv)
    return lambda: torch.autograd.grad(attention(*qkv), qkv, dout)


def _timed(
    attention: Attention, qkv: tuple[Tensor, ...], dout: Tensor | None
) -> Callable[[], object]:
    """Forward alone, or backward alone on a graph that is kept."""
    if dout is None:
        return lambda: attention(*qkv)
    out = attention(*qkv)
    return lambda: torch.autograd.grad(out, qkv, dout, retain_graph=True)


def _replace(row: Row, **values: object) -> Row:
    fields: dict[str, Any] = asdict(row) | values
    return Row(**fields)


def _filled(row: Row, case: Case, times: Times, error: float, extra: float | None) -> Row:
    return _replace(
        row,
        status=OK,
        error=error,
        ms_median=times.median,
        ms_p20=times.p20,
        ms_p80=times.p80,
        tflops=case.flops(row.direction) / times.median / 1e9,
        extra_mib=extra,
        extra_expected_mib=expected_mib(case, row.direction),
    )


def _brief(error: Exception, limit: int = 200) -> str:
    text = " ".join(str(error).split())
    return text if len(text) <= limit else text[: limit - 3] + "..."


def empty_row(task: Task, device: torch.device, command: str) -> Row:
    """The row of a task before it is measured."""
    measured = "error ms_median ms_p20 ms_p80 tflops extra_mib extra_expected_mib".split()
    known: dict[str, Any] = asdict(task.case) | dict.fromkeys(measured) | versions()
    return Row(
        provider=task.provider,
        direction=task.direction,
        density=task.case.density,
        elements=task.case.elements,
        status="",
        device=device_name(str(device)),
        date=now(),
        command=command,
        **known,
    )


def run_tasks(tasks: Sequence[Task], bench: Bench, records: Records, command: str) -> list[Row]:
    """The row of every task, measured now or found in `records`, to which new ones are added."""
    rows = []
    for i, task in enumerate(tasks, 1):
        row = empty_row(task, bench.device, command)
        known = records.find(row, own=find(task.provider).own)
        if known is not None and known.status == OK:
            rows.append(known)
            print(f"[{i:3}/{len(tasks)}] {describe(known)}  (measured {known.date})", flush=True)
            continue
        row = bench.run(task, row)
        if known is None or known.status != row.status:  # the same refusal need not stand twice
            records.append(row)
        rows.append(row)
        print(f"[{i:3}/{len(tasks)}] {describe(row)}", flush=True)
    return rows


def describe(row: Row) -> str:
    what = f"{row.provider:10} {row.direction:8} {row.mask:46} N {row.n_q:<6} D {row.head_dim:<3}"
    if row.status != OK:
        return f"{what}  {row.status}"
    return f"{what} {row.ms:9.3f} ms {row.tflops:8.3f} TFLOP/s  error {row.error:.1e}"


def main(config: DictConfig, command: str) -> None:
    """Measures what the configuration asks for and prints it as tables."""
    options = OmegaConf.to_container(config, resolve=True)
    assert isinstance(options, dict)
    device = torch.device(options["device"] or ("cuda" if torch.cuda.is_available() else "cpu"))
    names = "mask seq_len batch heads kv_heads head_dim dtype block_size".split()
    grid = make_grid(str(device), **{name: options[name] for name in names})
    providers = options["providers"] or default_providers(device)
    providers = [providers] if isinstance(providers, str) else providers
    tasks = plan(grid.cases(), providers, options["directions"])
    seconds = options["seconds"] or (0.15 if device.type == "cuda" else 0.5)
    records = Records(options["csv"], fresh=options["fresh"])
    rows = run_tasks(tasks, Bench(device, seconds), records, command)
    print("\n" + tables(rows, records.rows))
    table = records.path.with_suffix(".txt")
    table.write_text(tables(newest(records.rows)) + "\n")
    print(f"\nrows:  {records.path}\ntable: {table}\nplots: python -m experiments.plot")


@hydra.main(version_base="1.3", config_path="conf", config_name="speed")
def entry(config: DictConfig) -> None:
    overrides = HydraConfig.get().overrides.task
    main(config, shlex.join(["python", "-m", "experiments.speed", *overrides]))


if __name__ == "__main__":
    entry()
