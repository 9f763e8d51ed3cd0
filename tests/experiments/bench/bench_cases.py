"""A small case, made-up rows, and providers that are exact or wrong in one way."""

from dataclasses import dataclass
from tempfile import TemporaryDirectory

import torch

from experiments.bench import run as speed
from experiments.bench.cases import Case
from experiments.bench.provider import Provider
from experiments.common.rows import OK
from experiments.studies.runner import Run
from sparseflash.testing import oracle

CASE = Case("local(40) | global_tokens(10)", 2, 4, 2, 200, 200, 16, "float32", 32, 32)
CPU = torch.device("cpu")
ROW = {
    "mask": "local(64) | butterfly(32)", "provider": "cpu", "direction": "forward", "batch": 1,
    "heads": 2, "kv_heads": 2, "n_q": 256, "n_k": 256, "head_dim": 16, "v_dim": 16,
    "dtype": "float32", "layout": "head_major", "block_q": 32, "block_k": 32, "density": 0.25,
    "elements": 0.125, "round": 1, "status": OK, "error": 1e-6, "ms_median": 2.0, "ms_p20": 1.5,
    "ms_p80": 2.5, "tflops": 0.5, "ideal_ms": 1.0, "device": "a GPU", "torch": "2.9",
    "triton": "3.9", "source": "x", "commit": "y", "date": "2026-01-02T03:04:05", "command": "z",
}  # fmt: skip


def measured(case, provider, direction):
    """Return the row of one short measurement."""
    with TemporaryDirectory() as folder:
        options = speed.Options(device="cpu", seconds=0.01, rows=f"{folder}/speed.jsonl")
        run = Run(speed, options, "")
        wanted = run.wanted(speed.Asked(case, (provider,)))
        (row,) = run.measured(
            speed.Asked(case, (provider,)), [r for r in wanted if r["direction"] == direction]
        )
        return row


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
class Injected(Provider):
    make: object = None

    def prepare(self, case, device):
        return self.make(case)
