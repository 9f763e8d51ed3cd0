"""The measurements of experiments.papers.io: forward and backward of one attention.

Nsight Compute runs this file as its child, to count the bytes of steps.
"""

import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

import torch

from experiments.bench.cases import DENSE, Case
from experiments.bench.counters import READ, WRITTEN, Kernels, counted_each, each_under_ncu
from experiments.bench.gate import Gate
from experiments.bench.providers import SparseFlash
from experiments.common.records import OK
from experiments.papers.attention.measure import Step, draw, free, gate_error, time_call, why
from experiments.papers.attention.methods import METHODS, Setting, compiled
from experiments.papers.attention.rows import IoRow
from sparseflash.cost import cost, flops, standard_accesses

PARTS = ("shape", "block", "sparsity")
OURS = "flash"  # ours, under any mask


@dataclass(frozen=True)
class Measured:
    """One thing to measure: a method on a case. Only ours takes a mask."""

    part: str
    method: str
    case: Case

    def row(self, device: torch.device, command: str) -> IoRow:
        """Its row before it is measured, with the counts of the model."""
        case = self.case
        return IoRow(
            part=self.part,
            method=self.method,
            batch=case.batch,
            heads=case.heads,
            n=case.n_q,
            head_dim=case.head_dim,
            dtype=case.dtype,
            block=case.block_q,
            gflop=work(self.method, case) / 1e9,
            model_gb=traffic(self.method, case, "both") / 1e9,
            forward_model_gb=traffic(self.method, case, "forward") / 1e9,
            mask=case.mask,
            density=case.density,
            **IoRow.origin(str(device), command),
        )

    def setting(self) -> Setting:
        """The method without a mask."""
        case = self.case
        return Setting(self.method, case.batch, case.heads, case.n_q, case.head_dim, case.dtype)

    def step(self, device: torch.device) -> Step:
        """Forward and backward, ready to run."""
        if self.method == OURS:
            return Step(SparseFlash("auto").prepare(self.case, device), draw(self.case, device))
        made = self.setting().make(device)
        attend = compiled(made, device) if METHODS[self.method].compiled else made
        return Step(attend, draw(self.case, device))


def work(method: str, case: Case) -> float:
    """Operations of the products: 12 N^2 d of standard attention, 14 N^2 d with S recomputed, of
    the computed blocks.
    """
    heads = case.batch * case.heads
    recompute = not METHODS[method].stores
    return heads * case.density * flops(case.n_q, case.head_dim, "both", recompute=recompute)


def traffic(method: str, case: Case, direction: str) -> float:
    """Bytes of HBM traffic of `direction` (forward | both) by the model.

    Standard attention reads and writes N x N matrices, eleven times in both. The others read each
    input and write each output once a pass.
    """
    if METHODS[method].stores:
        elements = standard_accesses(case.n_q, case.head_dim, direction)
        return case.batch * case.heads * elements * case.shape.itemsize
    passes = ("forward", "backward") if direction == "both" else (direction,)
    return sum(cost(case.shape, case.blocks, d).hbm_bytes for d in passes)


def plan(
    parts: Sequence[str], methods: Sequence[str], shape: dict[str, Any], options: dict[str, Any]
) -> list[Measured]:
    """What the parts are made of.

    shape: every method at the shape of the table. block: ours at one density, with blocks of every
    size. sparsity: ours at several densities, and longer sequences.
    """
    found = []
    if "shape" in parts:
        found += [Measured("shape", name, _case(shape, DENSE, 0)) for name in methods]
    if "block" in parts:
        for block in options["blocks"]:
            mask = f"random_blocks({options['density']}, block={block})"
            found.append(Measured("block", OURS, _case(shape, mask, block)))
    if "sparsity" in parts:
        longer = shape | {"n": options["sparse_n"]}
        longer["batch"] = max(1, shape["batch"] * shape["n"] // options["sparse_n"])
        found.append(Measured("sparsity", OURS, _case(longer, DENSE, 0)))
        block = options["sparse_block"]
        for density in options["densities"]:
            mask = f"random_blocks({density}, block={block})"
            found.append(Measured("sparsity", OURS, _case(longer, mask, block)))
    return found


def _case(shape: dict[str, Any], mask: str, block: int) -> Case:
    batch, heads, n, head_dim, dtype = (
        shape[name] for name in ("batch", "heads", "n", "head_dim", "dtype")
    )
    return Case(mask, batch, heads, heads, n, n, head_dim, dtype, block, block)


def measured(
    what: Measured, row: IoRow, device: torch.device, seconds: float, counts: "Counts | None" = None
) -> IoRow:
    """The row with times, memory and, with `counts`, the bytes of Nsight Compute."""
    if reason := what.setting().unsupported(device):
        return replace(row, status=reason)
    try:
        step = what.step(device)
        gate = Gate(what.case, *step.qkv)
        error = gate_error(gate, step)
        if wrong := gate.verdict(error):
            return replace(row, status=wrong, error=error)
        del gate
        saved, peak = step.saved_mib(), step.peak_mib(device)
        step.both()
        times = time_call(step.both, device, seconds)
        moved = {d: counts.gb(what, d) if counts else None for d in ("both", "forward")}
        return replace(
            row,
            status=OK,
            error=error,
            saved_mib=saved,
            peak_mib=peak,
            counted_gb=moved["both"],
            forward_counted_gb=moved["forward"],
            **times._asdict(),
        )
    except Exception as failure:
        return replace(row, status=why(failure))
    finally:
        free(device)


class Counts:
    """HBM bytes by hardware counters of all that a run lacks, from one process of ncu.

    The process starts when the first count is asked for. If that fails, each thing that is asked
    for is counted by a process of its own, until one of them fails as well.
    """

    def __init__(self, wanted: Sequence[Measured]):
        self.tasks = [(what, d) for what in wanted for d in directions(what)]
        self.found: dict[tuple[Measured, str], float | None] | None = None
        self.refused = False

    def gb(self, what: Measured, direction: str) -> float | None:
        """HBM bytes of `direction` (forward | both), in 1e9; None where there are none."""
        if direction not in directions(what):
            return None
        if self.found is None:
            self.found = self._count(self.tasks)
        task = what, direction
        if task not in self.found and not self.refused:
            alone = self._count([task])
            self.found |= alone
            self.refused = not alone
        return self.found.get(task)

    def _count(self, tasks: list[tuple[Measured, str]]) -> dict[tuple[Measured, str], float | None]:
        texts = [{"direction": direction, **asdict(what)} for what, direction in tasks]
        try:
            found = each_under_ncu("experiments.papers.attention.io_run", texts, (READ, WRITTEN))
        except ValueError as refusal:
            print(f"no counters: {' '.join(str(refusal).split())[:160]}", flush=True)
            return {}
        return {task: _gb(kernels) for task, kernels in zip(tasks, found, strict=True)}


def directions(what: Measured) -> tuple[str, ...]:
    """What is counted: forward and backward together, and at the paper's shape the forward."""
    return ("both", "forward") if what.part == "shape" else ("both",)


def _gb(kernels: Kernels) -> float | None:
    moved = sum(values.get(READ, 0.0) + values.get(WRITTEN, 0.0) for _, values in kernels)
    return moved / 1e9 if kernels else None


def prepared(task: dict[str, Any]) -> Callable[[], object]:
    """The call of a task of `Counts`."""
    what = Measured(task["part"], task["method"], Case(**task["case"]))
    step = what.step(torch.device("cuda"))
    _ = step.dout
    return step.calls([task["direction"]])[task["direction"]]


if __name__ == "__main__":
    counted_each(partial(prepared, task) for task in json.loads(sys.argv[1]))
