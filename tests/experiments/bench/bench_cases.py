"""A small case, made-up rows, and providers that are exact or wrong in one way."""

from dataclasses import dataclass, replace

import torch

from experiments.bench.cases import Case
from experiments.bench.measure import Bench, Measurement
from experiments.bench.peers import fa4
from experiments.bench.providers import DIRECTIONS
from experiments.bench.rows import SpeedRow
from experiments.bench.speed_run import chosen
from experiments.common.records import OK
from sparseflash.testing import oracle

CASE = Case("local(40) | global_tokens(10)", 2, 4, 2, 200, 200, 16, "float32", 32, 32)
CPU = torch.device("cpu")
ORIGIN = dict.fromkeys("device torch triton source commit date command".split(), "x")
ROW = SpeedRow(
    mask="local(64) | butterfly(32)", provider="cpu", direction="forward", batch=1, heads=2,
    kv_heads=2, n_q=256, n_k=256, head_dim=16, v_dim=16, dtype="float32", layout="head_major",
    block_q=32, block_k=32, density=0.25, elements=0.125, status=OK, error=1e-6, ms_median=2.0,
    ms_p20=1.5, ms_p80=2.5, tflops=0.5, extra_expected_mib=1.0, ideal_ms=1.0,
    **ORIGIN | {"device": "some CPU (2 threads)", "command": "experiments.speed 'mask=\"a, b\"'"},
)  # fmt: skip
OPTIONS = {
    **dict.fromkeys("mask seq_len batch heads kv_heads head_dim v_dim dtype layout".split()),
    "block_size": None,
    "grid": "limits",
    "providers": None,
    "directions": ["forward"],
}


def measured(case, provider, direction, device=CPU):
    """The row of one short measurement."""
    what = Measurement(case, provider, direction)
    return Bench(device, seconds=0.01).run(what, what.row(device, ""))


def limits(monkeypatch, device):
    """The measurements of the grid `limits` in both directions, as if every peer were here."""
    monkeypatch.setattr(fa4, "missing", lambda: None)
    return chosen(OPTIONS | {"directions": list(DIRECTIONS)}, device)


def made_up_rows(monkeypatch):
    """Rows of the grid whose times follow from their work, peers twice as slow."""
    rows = []
    for what in limits(monkeypatch, CPU):
        ms = what.case.flops(what.direction) / 1e8 * (1 if what.provider == "cpu" else 2)
        if what.case.block_q == 16:
            ms *= 4
        name = "sdpa_cudnn" if what.provider == "sdpa" else what.provider
        times = {"ms_median": ms, "ideal_ms": ms / 2, "tflops": 1}
        rows.append(replace(what.row(CPU, ""), provider=name, status=OK, **times))
    return rows


def exact(case):
    mask = None if case.blocks is None else torch.from_numpy(case.blocks.to_dense())
    return lambda q, k, v: oracle(q, k, v, mask)[0].to(q.dtype)


def forgets_a_block(case):
    mask = torch.from_numpy(case.blocks.to_dense())
    mask[..., :32, :16] = False
    return lambda q, k, v: oracle(q, k, v, mask)[0].to(q.dtype)


class HalfGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        return grad / 2


def halves_dk(case):
    run = exact(case)
    return lambda q, k, v: run(q, HalfGradient.apply(k), v)


@dataclass(frozen=True)
class Injected:
    make: object
    dense_only = False

    def unsupported(self, case, device, direction):
        return None

    def prepare(self, case, device):
        return self.make(case)
