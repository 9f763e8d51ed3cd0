"""One measurement: its inputs, the gate, the time and the ideal time."""

from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from functools import lru_cache

import torch
from torch import Tensor

from experiments.bench.cases import DENSE, DTYPES, LAYOUTS, Case
from experiments.bench.gate import Gate
from experiments.bench.providers import Attention, find
from experiments.bench.rows import SLACK, SpeedRow
from experiments.bench.timing import expected_mib, measure, peak_extra_mib
from experiments.common.devices import device_name
from experiments.common.provenance import version
from experiments.common.records import OK
from sparseflash.cost import CEILINGS, cost, ideal, measure_ceilings

TOO_FAST = "faster than the ideal: the rates of this device are measured too low"


@dataclass(frozen=True)
class Measurement:
    """One measurement to make."""

    case: Case
    provider: str
    direction: str
    round: int = 1

    def row(self, device: torch.device, command: str) -> SpeedRow:
        """The row of this measurement before it is made."""
        case = self.case
        return SpeedRow(
            provider=self.provider,
            version=version(getattr(find(self.provider), "package", "")),
            direction=self.direction,
            round=self.round,
            **asdict(case) | {"v_dim": case.value_dim},
            density=case.density,
            elements=case.elements,
            **SpeedRow.origin(str(device), command),
        )


class Bench:
    """Measures one thing after another on one device, sharing inputs and expected values."""

    def __init__(self, device: torch.device, seconds: float):
        self.device, self.seconds = device, seconds
        self.gate = lru_cache(1)(lambda case: Gate(case, *self.inputs(_maskless(case))))
        self.attention = lru_cache(1)(lambda case, provider: find(provider).prepare(case, device))
        self.inputs = lru_cache(1)(self._inputs)
        self.ideal_ms = lru_cache(2)(self._ideal_ms)

    def run(self, what: Measurement, row: SpeedRow) -> SpeedRow:
        """`row` filled in: with times, or with the status that says why there are none."""
        try:
            reason = find(what.provider).unsupported(what.case, self.device, what.direction)
            if reason:
                return replace(row, status=f"unsupported: {reason}")
            return self._measure(what, row)
        except (ValueError, NotImplementedError) as refusal:
            return replace(row, status=f"unsupported: {_brief(refusal)}")
        except Exception as failure:  # one provider's failure is a result, not the end of the run
            return replace(row, status=f"failed: {type(failure).__name__}: {_brief(failure)}")

    def ungated(self, what: Measurement) -> Callable[[], object]:
        """The call as it is timed, without looking at its result."""
        case, backward = what.case, what.direction == "backward"
        attention, inputs = self.attention(case, what.provider), self.inputs(_maskless(case))
        with torch.set_grad_enabled(backward):
            qkv = tuple(t.detach().requires_grad_(backward) for t in inputs)
            return _timed(attention, qkv, self._dout(case) if backward else None)

    def _measure(self, what: Measurement, row: SpeedRow) -> SpeedRow:
        case, backward = what.case, what.direction == "backward"
        gate, attention = self.gate(case), self.attention(case, what.provider)
        qkv = tuple(t.detach().requires_grad_(backward) for t in (gate.q, gate.k, gate.v))
        with torch.set_grad_enabled(backward):
            found = _step(attention, qkv, gate.dout if backward else None)
            error = gate.backward_error(*found) if backward else gate.forward_error(*found)
            del found
            if wrong := gate.verdict(error):
                return replace(row, status=wrong, error=error)
            # Not gate.dout: its zeros would make the arithmetic cheaper than it is.
            dout = self._dout(case) if backward else None
            extra = peak_extra_mib(lambda: _step(attention, qkv, dout), self.device)
            times = measure(_timed(attention, qkv, dout), self.device, self.seconds)
        ideal_ms = self.ideal_ms(case, what.direction)
        return replace(
            row,
            status=OK,
            error=error,
            **times._asdict(),
            tflops=case.flops(what.direction) / times.ms_median / 1e9,
            extra_mib=extra,
            extra_expected_mib=expected_mib(case, what.direction),
            ideal_ms=ideal_ms,
            warning=TOO_FAST if times.ms_median * SLACK < ideal_ms else "",
        )

    def _inputs(self, case: Case) -> tuple[Tensor, Tensor, Tensor]:
        """q, k and v, drawn on the device: on a CPU those of a million tokens take minutes."""
        return (
            self._draw(0, case, case.heads, case.n_q, case.head_dim),
            self._draw(1, case, case.kv_heads, case.n_k, case.head_dim),
            self._draw(2, case, case.kv_heads, case.n_k, case.value_dim),
        )

    def _dout(self, case: Case) -> Tensor:
        return self._draw(3, case, case.heads, case.n_q, case.value_dim)

    def _draw(self, seed: int, case: Case, heads: int, n: int, dim: int) -> Tensor:
        """Standard normal (batch, heads, n, dim) in the case's dtype and layout of memory."""
        token_major = case.layout == LAYOUTS[1]
        extents = (case.batch, n, heads, dim) if token_major else (case.batch, heads, n, dim)
        generator = torch.Generator(self.device).manual_seed(seed)
        options = {"device": self.device, "dtype": DTYPES[case.dtype], "generator": generator}
        x = torch.randn(extents, **options)
        return x.transpose(1, 2) if token_major else x

    def _ideal_ms(self, case: Case, direction: str) -> float:
        rates = CEILINGS.get(device_name(self.device))
        if rates is None or case.dtype not in rates.matmul_tflops:
            rates = measure_ceilings(str(self.device), (case.dtype,))
        return ideal(cost(case.shape, case.blocks, direction), rates, case.dtype).ms


def _maskless(case: Case) -> Case:
    """What the inputs of a case depend on."""
    return replace(case, mask=DENSE, block_q=0, block_k=0)


def _step(attention: Attention, qkv: tuple[Tensor, ...], dout: Tensor | None) -> tuple[Tensor, ...]:
    """Forward, or where there is a dout both directions: what a layer of a model does."""
    out = attention(*qkv)
    return (out,) if dout is None else torch.autograd.grad(out, qkv, dout)


def _timed(
    attention: Attention, qkv: tuple[Tensor, ...], dout: Tensor | None
) -> Callable[[], object]:
    """Forward alone, or backward alone on a graph that is kept."""
    if dout is None:
        return lambda: attention(*qkv)
    out = attention(*qkv)
    return lambda: torch.autograd.grad(out, qkv, dout, retain_graph=True)


def _brief(error: Exception, limit: int = 200) -> str:
    text = " ".join(str(error).split())
    return text if len(text) <= limit else text[: limit - 3] + "..."
