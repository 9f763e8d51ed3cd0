"""Numerical error of attention with outliers, in the form of FlashAttention-3's Table 3.

    python -m experiments.papers.accuracy
    python -m experiments.papers.accuracy 'lengths=[4096]' 'head_dims=[128]' outliers=0
    python -m experiments.papers.accuracy measure=false csv=docs/results/h200/accuracy.csv

q, k and v are N(0, 1), and a thousandth of their entries has N(0, 100) added. They are rounded to
the dtype; then each attention is compared with float64 on the same numbers. See
docs/results/accuracy.md.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

import sparseflash
from experiments.bench.cases import DTYPES
from experiments.common.checks import check_options, is_number
from experiments.common.devices import set_defaults
from experiments.common.program import program
from experiments.common.records import OK, Records, read
from experiments.common.text_table import MISSING, markdown
from experiments.lra.models.attention.standard import softmax_attention
from experiments.papers.attention.measure import free, why
from experiments.papers.attention.resume import Pages
from experiments.papers.attention.rows import AccuracyRow
from sparseflash.testing import oracle

SPREAD = 10.0  # standard deviation of what is added to an outlier: a variance of 100
NOT_YET = "Not measured yet."
DEFAULTS: dict[str, dict[str, Any]] = {
    "cuda": {"lengths": [512, 2048, 8192], "batch": 2, "heads": 8},
    "cpu": {"lengths": [256, 1024], "batch": 1, "heads": 2},
}


class Method(NamedTuple):
    """An attention: its name in a table, its call, and what is published beside it by dtype."""

    label: str
    call: Callable[[Tensor, Tensor, Tensor], Tensor]
    published: dict[str, str]
    cuda: bool = False  # only there


def standard(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Scores and probabilities in the dtype of q, the softmax inside in float32."""
    return softmax_attention(q, k, v, None, 0.0)


def sdpa(backend: SDPBackend, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """torch's scaled_dot_product_attention by one of its kernels."""
    with sdpa_kernel(backend):
        return F.scaled_dot_product_attention(q, k, v)


FP16 = "float16"
METHODS: dict[str, Method] = {
    "standard": Method("standard", standard, {FP16: "3.2e-4"}),
    "math": Method("SDPA, math", partial(sdpa, SDPBackend.MATH), {}),
    "efficient": Method(
        "SDPA, memory-efficient", partial(sdpa, SDPBackend.EFFICIENT_ATTENTION), {}, cuda=True
    ),
    "flash": Method(
        "SDPA, flash", partial(sdpa, SDPBackend.FLASH_ATTENTION), {FP16: "1.9e-4, FlashAttention-2"}
    ),
    "cudnn": Method("SDPA, cuDNN", partial(sdpa, SDPBackend.CUDNN_ATTENTION), {}, cuda=True),
    "ours": Method("ours", sparseflash.attention, {FP16: "1.9e-4, FlashAttention-3"}),
}


@program("accuracy", "experiments.papers.accuracy")
def main(options: dict[str, Any], command: str) -> None:
    """Measures what the options ask for, and prints and fills tables."""
    path = Path(options["csv"])
    pages = Pages(options["pages"], path)
    if options["measure"]:
        device = set_defaults(options, DEFAULTS)
        check(options)
        records = Records(path, AccuracyRow, allow_changes=options["allow_changes"])
        for n, head_dim, dtype in product(
            options["lengths"], options["head_dims"], options["dtypes"]
        ):
            shape = options["batch"], options["heads"], n, head_dim
            for row in wanted(shape, dtype, device, options, command):
                known = records.find(row)
                if known is None or known.status.startswith("failed"):
                    records.append(measured(row, device))
    rows = read(path, AccuracyRow)
    if not rows:
        raise ValueError(f"{path} holds no rows; measure first: {AccuracyRow.COMMAND}")
    print("\n\n".join(table() for table in tables(rows).values()))
    for page in pages.fill(tables(rows)):
        print(f"written: {page}")


def check(options: dict[str, Any]) -> None:
    """Raises ValueError for options out of range."""
    check_options(
        options,
        lists="lengths head_dims dtypes",
        whole="batch heads",
        least={"lengths": 8, "head_dims": 8},
        choices={"dtypes": DTYPES},
    )
    share = options["outliers"]
    if not is_number(share) or not 0 <= share <= 1:
        raise ValueError(f"outliers={share!r}: give a share between 0 and 1")


def wanted(
    shape: tuple[int, int, int, int],
    dtype: str,
    device: torch.device,
    options: dict[str, Any],
    command: str,
) -> list[AccuracyRow]:
    """The rows of a shape and dtype before they are measured."""
    batch, heads, n, head_dim = shape
    return [
        AccuracyRow(
            method=name, batch=batch, heads=heads, n=n, head_dim=head_dim, dtype=dtype,
            outliers=float(options["outliers"]), mask="", density=None,
            **AccuracyRow.origin(str(device), command),
        )
        for name, method in METHODS.items()
        if device.type == "cuda" or not method.cuda
    ]  # fmt: skip


def draw(row: AccuracyRow, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """q, k and v: N(0, 1) + N(0, 100) * Bernoulli(outliers), rounded to the dtype of the row."""
    generator = torch.Generator().manual_seed(0)
    shape = row.batch, row.heads, row.n, row.head_dim

    def one() -> Tensor:
        x, more = (torch.randn(shape, generator=generator) for _ in range(2))
        there = torch.rand(shape, generator=generator) < row.outliers
        return (x + SPREAD * more * there).to(device, DTYPES[row.dtype])

    return one(), one(), one()


def measured(row: AccuracyRow, device: torch.device) -> AccuracyRow:
    """The row with the root mean square of the error, or the reason why there is none."""
    q, k, v = draw(row, device)
    try:
        with torch.no_grad():
            out = METHODS[row.method].call(q, k, v)
            error, size = (0.0, 0.0)
            for b, h in product(range(row.batch), range(row.heads)):
                one = (slice(b, b + 1), slice(h, h + 1))
                right, _ = oracle(q[one], k[one], v[one])
                error += (out[one].double() - right).square().sum().item()
                size += right.square().sum().item()
    except Exception as failure:
        return replace(row, status=why(failure))
    finally:
        free(device)
    rmse = math.sqrt(error / out.numel())
    return replace(row, status=OK, rmse=rmse, relative=math.sqrt(error / size))


def tables(rows: Sequence[AccuracyRow]) -> dict[str, Callable[[], str]]:
    """The tables that a page may hold: rmse_d64 and rmse_d128, or of other head dims.

    They have the rows with the device, the sizes and the outliers of the last one.
    """
    shared = lambda r: (r.device, r.batch, r.heads, r.outliers)  # noqa: E731
    here = [row for row in rows if shared(row) == shared(rows[-1])]
    dims = dict.fromkeys([64, 128, *(row.head_dim for row in here)])
    return {f"rmse_d{d}": partial(table, [r for r in here if r.head_dim == d]) for d in dims}


def table(rows: Sequence[AccuracyRow]) -> str:
    """RMSE by length: methods and dtypes down, what is published, and standard's over each."""
    rows = list({(r.method, r.dtype, r.n): r for r in rows}.values())
    if not rows:
        return NOT_YET
    lengths = sorted({row.n for row in rows})
    cells = {(row.method, row.dtype, row.n): row.rmse for row in rows if row.status == OK}
    head = ["attention", "dtype", *(f"{n:,} tokens" for n in lengths)]
    lines = [[*head, f"standard's / this, {lengths[-1]:,}", "published"]]
    for dtype, name in product(DTYPES, METHODS):
        found = [cells.get((name, dtype, n)) for n in lengths]
        if not any(found):
            continue
        base = cells.get(("standard", dtype, lengths[-1]))
        gain = f"{base / found[-1]:.2f}x" if base and found[-1] else MISSING
        texts = [MISSING if x is None else f"{x:.1e}" for x in found]
        method = METHODS[name]
        lines.append([method.label, dtype, *texts, gain, method.published.get(dtype, MISSING)])
    return markdown(lines, left=(0, 1))


if __name__ == "__main__":
    main()
