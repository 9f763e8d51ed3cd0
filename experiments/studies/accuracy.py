"""Numerical error of attention with outliers, in the form of FlashAttention-3's Table 3.

q, k and v are N(0, 1), and a thousandth of their entries has N(0, 100) added. They are rounded to
the dtype; then each attention is compared with float64 on the same numbers. See
docs/results/papers.md.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import product
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

import sparseflash
from experiments.bench.cases import DTYPES
from experiments.common.rows import OK, Found, Row
from experiments.common.tables import MISSING, markdown
from experiments.lra.models.attention.standard import softmax_attention
from experiments.studies import runner
from experiments.studies.runner import Run, both, choices, grid, latest
from sparseflash.testing import oracle

SPREAD = 10.0  # standard deviation of what is added to an outlier: a variance of 100
KEY = "method batch heads n head_dim dtype outliers".split()
SOURCES = ("masks", "sparseflash", "experiments/studies", "experiments/lra/models")


@dataclass(kw_only=True)
class Options(runner.Options):
    lengths: list[int] = both([512, 2048, 8192], [256, 1024])  # tokens
    head_dims: list[int] = field(default_factory=lambda: [64, 128])
    dtypes: list[str] = field(default_factory=lambda: ["float16", "bfloat16"])
    outliers: float = 0.001  # share of the entries that have N(0, 100) added
    batch: int = both(2, 1)
    heads: int = both(8, 2)


class Method(NamedTuple):
    """An attention: its name in a table, its call, and what is published beside it in float16."""

    label: str
    call: Callable[[Tensor, Tensor, Tensor], Tensor]
    published: str = MISSING
    cuda: bool = False  # only there


def sdpa(kernel: SDPBackend) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    """Return torch's scaled_dot_product_attention by one of its kernels."""
    return sdpa_kernel(kernel)(F.scaled_dot_product_attention)


def standard(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Return attention with scores and probabilities in the dtype of q."""
    return softmax_attention(q, k, v, None, 0.0)


METHODS = {
    "standard": Method("standard", standard, "3.2e-4"),
    "math": Method("SDPA, math", sdpa(SDPBackend.MATH)),
    "efficient": Method("SDPA, memory-efficient", sdpa(SDPBackend.EFFICIENT_ATTENTION), cuda=True),
    "flash": Method("SDPA, flash", sdpa(SDPBackend.FLASH_ATTENTION), "1.9e-4, FlashAttention-2"),
    "cudnn": Method("SDPA, cuDNN", sdpa(SDPBackend.CUDNN_ATTENTION), cuda=True),
    "ours": Method("ours", sparseflash.attention, "1.9e-4, FlashAttention-3"),
}


def cases(run: Run) -> list[Found]:
    o = run.options
    choices(o, dtypes=DTYPES)
    return grid(o, "batch heads outliers", n=o.lengths, head_dim=o.head_dims, dtype=o.dtypes)


def ways(case: Found, run: Run) -> list[Row]:
    cuda = run.device.type == "cuda"
    return [{"method": name} for name, method in METHODS.items() if cuda or not method.cuda]


def opened(case: Found, run: Run) -> Callable[[Row], dict[str, Any]]:
    qkv = draw(case, run.device)

    @torch.no_grad()
    def error(row: Row) -> dict[str, Any]:
        out, error, size = METHODS[row["method"]].call(*qkv), 0.0, 0.0
        for b, h in product(range(case.batch), range(case.heads)):
            one = (slice(b, b + 1), slice(h, h + 1))
            q, k, v = (t[one] for t in qkv)
            right, _ = oracle(q, k, v)
            error += (out[one].double() - right).square().sum().item()
            size += right.square().sum().item()
        return {"rmse": math.sqrt(error / out.numel()), "relative": math.sqrt(error / size)}

    return error


def draw(case: Found, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """Return q, k and v: N(0, 1) + N(0, 100) * Bernoulli(outliers), rounded to the dtype."""
    generator = torch.Generator().manual_seed(0)
    shape = case.batch, case.heads, case.n, case.head_dim

    def one() -> Tensor:
        x, more = (torch.randn(shape, generator=generator) for _ in range(2))
        there = torch.rand(shape, generator=generator) < case.outliers
        return (x + SPREAD * more * there).to(device, DTYPES[case.dtype])

    return one(), one(), one()


def tables(frame: Any) -> dict[str, str]:
    """Return RMSE by length for each head dim: methods and dtypes down, standard's over each.

    The rows are those with the device, the sizes and the outliers of the last one.
    """
    made = {}
    here = latest(frame[frame.status == OK], "device batch heads outliers", KEY)
    for dim in dict.fromkeys(row.head_dim for row in here):
        rows = {(r.dtype, r.method, r.n): r.rmse for r in here if r.head_dim == dim}
        lengths = sorted({n for _, _, n in rows})
        head = ["attention", "dtype", *(f"{n:,} tokens" for n in lengths)]
        lines = [[*head, f"standard's / this, {lengths[-1]:,}", "published"]]
        for dtype, (name, method) in product(DTYPES, METHODS.items()):
            errors = [rows.get((dtype, name, n)) for n in lengths]
            base = rows.get((dtype, "standard", lengths[-1]))
            if any(errors):
                gain = f"{base / errors[-1]:.2f}x" if base and errors[-1] else MISSING
                texts = [MISSING if x is None else f"{x:.1e}" for x in errors]
                published = method.published if dtype == "float16" else MISSING
                lines.append([method.label, dtype, *texts, gain, published])
        made[f"rmse_d{dim}"] = markdown(lines, left=(0, 1))
    return made
