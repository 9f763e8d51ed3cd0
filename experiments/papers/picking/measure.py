"""Measuring providers in turn on the same picks, each after the gate."""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace

import torch

from experiments.bench.gate import Gate
from experiments.common.provenance import version
from experiments.common.records import OK
from experiments.papers.attention.measure import Step, free, gate_error, time_call, why
from experiments.papers.picking.cases import Inputs, Shape
from experiments.papers.picking.providers import PROVIDERS
from experiments.papers.rows import PickRow


@dataclass(frozen=True)
class Group:
    """A shape, measured by each provider in every round."""

    shape: Shape
    providers: tuple[str, ...]
    rounds: int

    def rows(self, device: torch.device, command: str) -> list[PickRow]:
        """The rows before they are measured; each round begins with another provider."""
        sizes = asdict(self.shape)
        sizes["mask"] = sizes.pop("selector")
        found = []
        for number in range(self.rounds):
            first = number % len(self.providers)
            for name in (*self.providers[first:], *self.providers[:first]):
                found += [
                    PickRow(
                        provider=name, version=version(PROVIDERS[name].package), round=number + 1,
                        direction=direction, density=None, **sizes,
                        **PickRow.origin(str(device), command),
                    )
                    for direction in PROVIDERS[name].directions
                ]  # fmt: skip
        return found


def measured(
    shape: Shape, device: torch.device, seconds: float, rows: Sequence[PickRow]
) -> list[PickRow]:
    """The rows of a group; those that have their time or a reason already stay as they are."""
    inputs = None
    calls: dict[str, tuple[str, float | None, dict[str, Callable[[], object]]]] = {}
    found = []
    for row in rows:
        if not row.status or row.status.startswith("failed"):
            try:
                inputs = inputs or Inputs(shape, device)
            except Exception as error:
                row = replace(row, status=why(error))
            else:
                if row.provider not in calls:
                    calls[row.provider] = _prepared(row.provider, inputs)
                row = _timed(row, *calls[row.provider], inputs, seconds)
        found.append(row)
    calls.clear()
    del inputs
    free(device)
    return found


def _prepared(name: str, inputs: Inputs) -> tuple[str, float | None, dict[str, Callable]]:
    """Status, error and calls of a provider."""
    provider = PROVIDERS[name]
    try:
        if reason := provider.unsupported(inputs):
            return f"unsupported: {reason}", None, {}
        step, gate = (
            Step(provider.prepare(inputs), inputs.qkv),
            Gate(provider.gated_by(inputs), *inputs.qkv),
        )
        if "backward" in provider.directions:
            error = gate_error(gate, step)
        else:
            error = gate.forward_error(step.forward())
        if wrong := gate.verdict(error):
            return wrong, error, {}
        return OK, error, step.calls(provider.directions)
    except Exception as error:
        return why(error), None, {}


def _timed(
    row: PickRow, status: str, error: float | None, calls: dict[str, Callable[[], object]],
    inputs: Inputs, seconds: float,
) -> PickRow:  # fmt: skip
    shape = inputs.shape
    share = shape.causal.elements if row.provider == "causal" else inputs.share
    row = replace(row, status=status, error=error, share=share)
    if status != OK:
        return row
    try:
        times = time_call(calls[row.direction], inputs.device, seconds)
    except Exception as failure:
        return replace(row, status=why(failure))
    products = 5 if row.direction == "backward" else 2
    pairs = share * shape.batch * shape.heads * shape.n**2
    tflops = 2e-9 * products * shape.head_dim * pairs / times.ms_median
    return replace(row, tflops=tflops, **times._asdict())
