"""Gate and time of one algorithm on one shape, as a row."""

import os
from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from experiments.bench.timing import measure
from experiments.common.records import OK, Records
from experiments.papers.softmax import blocks, kernels
from experiments.papers.softmax.algorithms import ALGORITHMS
from experiments.papers.softmax.rows import SoftmaxRow
from sparseflash.testing import relative_error

IMPLEMENTATIONS = {"triton": kernels.run, "blocks": blocks.run}
LIMIT = 1e-5  # relative error against float64

Result = Tensor | tuple[Tensor, Tensor]


class Case(NamedTuple):
    """Shape of x, and how many of its largest probabilities are wanted."""

    batch: int
    vocabulary: int
    k: int

    @property
    def nbytes(self) -> int:
        """Bytes of x and its softmax in float32."""
        return 2 * 4 * self.batch * self.vocabulary


def check_implementation(name: str, device: torch.device) -> None:
    """Raises ValueError if an implementation does not run on the device."""
    if name == "triton" and device.type == "cpu" and os.environ.get("TRITON_INTERPRET") != "1":
        raise ValueError(
            "implementation='triton': it needs a GPU, or TRITON_INTERPRET=1 in the environment "
            "(slow, for small shapes)"
        )
    if name == "blocks" and device.type != "cpu":
        raise ValueError("implementation='blocks': it is made for a CPU; give device=cpu")


def make_call(algorithm: str, implementation: str, x: Tensor, k: int) -> Callable[[], Result]:
    """What is timed; it writes a softmax into memory that is there already."""
    y = torch.empty_like(x)
    if algorithm == "copy":
        return lambda: y.copy_(x)
    if algorithm == "torch":
        return lambda: torch.softmax(x, 1, out=y)
    if algorithm == "torch_topk":
        return lambda: torch.softmax(x, 1, out=y).topk(k, 1)
    return lambda: IMPLEMENTATIONS[implementation](algorithm, x, y, k)


def error(algorithm: str, result: Result, x: Tensor, k: int) -> float:
    """The relative error of the first and the last row against float64.

    Of a top-k, also that of the probabilities at the indices.
    """
    rows = [0, len(x) - 1]
    right = x[rows].double()
    if algorithm != "copy":
        right = right.softmax(1)
    if isinstance(result, Tensor):
        return relative_error(result[rows], right)
    values, indices = (part[rows] for part in result)
    best = right.topk(k, 1).values
    return max(relative_error(found, best) for found in (values, right.gather(1, indices)))


def run(
    case: Case, algorithms: list[str], implementation: str, device: torch.device, seconds: float,
    records: Records[SoftmaxRow], command: str,
) -> list[SoftmaxRow]:  # fmt: skip
    """The rows of one shape; what the records hold already is not measured again."""
    generator = torch.Generator(device).manual_seed(0)
    x = torch.randn(case.batch, case.vocabulary, generator=generator, device=device)
    rows = []
    for name in algorithms:
        algorithm = ALGORITHMS[name]
        own = name not in ("copy", "torch", "torch_topk")
        row = SoftmaxRow(
            algorithm=name,
            implementation=implementation if own else "torch",
            batch=case.batch,
            vocabulary=case.vocabulary,
            k=case.k if algorithm.topk else 0,
            mask="",
            density=None,
            **SoftmaxRow.origin(str(device), command),
        )
        found = records.find(row)
        if found is None or found.status != OK:
            found = _measured(row, make_call(name, implementation, x, case.k), x, seconds)
            records.append(found)
        rows.append(found)
    return rows


def _measured(row: SoftmaxRow, call: Callable[[], Result], x: Tensor, seconds: float) -> SoftmaxRow:
    found = error(row.algorithm, call(), x, row.k)
    if found > LIMIT:
        return replace(row, error=found, status=f"wrong result: error {found:.2g}")
    times, accesses = measure(call, x.device, seconds), _accesses(row, x)
    gb_s = None if accesses is None else accesses * x.nbytes / times.ms_median / 1e6
    return replace(row, status=OK, error=found, accesses=accesses, gb_s=gb_s, **times._asdict())


def _accesses(row: SoftmaxRow, x: Tensor) -> float | None:
    """Accesses for each element of x: counted by tiles, else what the code does."""
    if row.implementation != "blocks":
        return ALGORITHMS[row.algorithm].accesses
    memory = blocks.Memory()
    blocks.run(row.algorithm, x, torch.empty_like(x), row.k or 1, memory)
    return memory.accesses / x.numel()
