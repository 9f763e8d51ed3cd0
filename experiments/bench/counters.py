"""Hardware counters of one call, by Nsight Compute, which runs this file as its child.

`each_under_ncu` and `counted_each` do the same for several calls of another program's process.
"""

import csv
import gc
import json
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict
from typing import Any

import torch

from experiments.bench.cases import Case
from experiments.bench.measure import Bench, Measurement
from experiments.common.provenance import ROOT
from experiments.common.text_table import aligned
from sparseflash.cost import CEILINGS, cost, ideal

TIME, READ, WRITTEN = "gpu__time_duration.sum", "dram__bytes_read.sum", "dram__bytes_write.sum"
L2, TENSOR = "lts__t_bytes.sum", "sm__inst_executed_pipe_tensor"
MARK = "spin_kernel"  # that torch.cuda._sleep launches
INSTRUCTIONS = "smsp__inst_executed.sum"
NAMES = {TIME: "us", READ: "read MB", WRITTEN: "written MB", L2: "L2 MB", INSTRUCTIONS: "1e6 inst"}
UNITS = {TIME: 1e3, READ: 1e6, WRITTEN: 1e6, L2: 1e6}  # of what ncu gives in ns and bytes

Kernels = list[tuple[str, dict[str, float]]]  # name, and value by metric, in the order of launch


def ncu() -> str:
    """The path of Nsight Compute. Raises ValueError, with the remedy, if there is none."""
    found = shutil.which("ncu") or shutil.which("ncu", path="/usr/local/cuda/bin")
    if not found:
        raise ValueError("no ncu on the PATH: install Nsight Compute, a part of the CUDA toolkit")
    return found


def metrics(program: str) -> list[str]:
    """What is read: the metrics above, and those of the tensor cores that this chip has."""
    asked = subprocess.run([program, "--query-metrics"], capture_output=True, text=True)
    known = {line.split()[0] for line in asked.stdout.splitlines() if line.strip()}
    tensor = sorted(name for name in known if name.startswith(TENSOR))
    return [*NAMES, *(f"{name}.sum" for name in tensor)]


def profile(case: Case, provider: str, direction: str) -> Kernels:
    """The counters of every kernel of one call. Raises ValueError if ncu does not run."""
    task = {"case": asdict(case), "provider": provider, "direction": direction}
    return _run("experiments.bench.counters", task, metrics(_program()))


def each_under_ncu(
    module: str, tasks: Sequence[dict[str, Any]], names: Sequence[str]
) -> list[Kernels]:
    """The counters `names` of each task, in one process: `python -m module TASKS`.

    Start-up, imports and compiled kernels are shared. The child separates the tasks with
    `counted_each`; a task that failed has no kernels.

    Raises ValueError if ncu does not run, or what it printed does not fall into as many parts.
    """
    found = apart(_run(module, list(tasks), names))
    if len(found) != len(tasks):
        raise ValueError(f"ncu gave counters of {len(found)} calls instead of {len(tasks)}")
    return found


def _program() -> str:
    """The path of Nsight Compute. Raises ValueError if it, or a GPU, is missing."""
    if not torch.cuda.is_available():
        raise ValueError("counters need a CUDA device")
    return ncu()


def _run(module: str, argument: Any, names: Sequence[str]) -> Kernels:
    """What ncu prints of `python -m module ARGUMENT`. Raises ValueError if it does not run."""
    program = _program()
    options = "--clock-control none --profile-from-start off --csv --print-units base".split()
    command = [program, *options, "--metrics", ",".join(names)]
    command += [sys.executable, "-m", module, json.dumps(argument)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    kernels = parse(done.stdout)
    if done.returncode or not kernels:
        said = (done.stdout + done.stderr).strip().splitlines()[-8:]
        raise ValueError(f"ncu gave no counters ({done.returncode}): " + " | ".join(said))
    return kernels


def apart(kernels: Kernels) -> list[Kernels]:
    """The kernels after each one that marks the begin of a task."""
    found: list[Kernels] = []
    for name, values in kernels:
        if MARK in name:
            found.append([])
        elif found:
            found[-1].append((name, values))
    return found


def parse(text: str) -> Kernels:
    """What `ncu --csv` printed: a line for each kernel and metric, after lines of other kinds."""
    lines = text.splitlines()
    start = next((i for i, line in enumerate(lines) if line.startswith('"ID"')), len(lines))
    kernels: dict[str, tuple[str, dict[str, float]]] = {}
    for line in csv.DictReader(lines[start:]):
        _, values = kernels.setdefault(line["ID"], (line["Kernel Name"], {}))
        value = line["Metric Value"].replace(",", "")
        if value.replace(".", "", 1).isdigit():
            values[line["Metric Name"]] = float(value)
    return list(kernels.values())


def report(kernels: Kernels, case: Case, direction: str, device: str) -> str:
    """A line for each kernel, their sum, and the least that the call must cost."""
    tensor = sorted({n for _, v in kernels for n in v if n.startswith(TENSOR)})
    total = {n: sum(v.get(n, 0.0) for _, v in kernels) for n in (*NAMES, *tensor)}
    tensor = [n for n in tensor if total[n]]
    names = [n.removeprefix("sm__inst_executed_pipe_").removesuffix(".sum") for n in tensor]
    lines = [["kernel", *NAMES.values(), *names]]
    for name, values in [*kernels, ("sum", total)]:
        found = (values.get(n, 0.0) / UNITS.get(n, 1e6) for n in (*NAMES, *tensor))
        lines.append([name[:48], *(f"{value:.3f}" for value in found)])
    least = cost(case.shape, case.blocks, direction)
    moved, needed = total[READ] + total[WRITTEN], least.hbm_bytes
    notes = [f"HBM: {moved / 1e6:.1f} MB moved, {needed / 1e6:.1f} needed: {moved / needed:.2f}x"]
    l2, loads = total[L2], least.l2_bytes
    notes.append(f"L2: {l2 / 1e6:.1f} MB, {loads / 1e6:.1f} by tiles of 128: {l2 / loads:.2f}x")
    if device in CEILINGS and case.dtype in CEILINGS[device].matmul_tflops:
        best, took = ideal(least, CEILINGS[device], case.dtype), total[TIME] / 1e6
        share = f"{100 * best.ms / took:.0f} % of the ideal" if took else ""
        notes.append(f"time: {took:.3f} ms, ideal {best.ms:.3f} ms ({best.bound}): {share}")
    return "\n".join([aligned(lines), *notes])


def child(task: dict) -> None:
    """The call that ncu looks at, after one that compiles."""
    case = Case(**task["case"])
    bench = Bench(torch.device("cuda"), 0.0)
    call = bench.ungated(Measurement(case, task["provider"], task["direction"]))
    counted(call)


def counted_each(prepared: Iterable[Callable[[], Callable[[], object]]]) -> None:
    """Prepares calls and runs them as `counted`, one by one, each after a kernel that marks it.

    One that fails says why, and has a mark alone.
    """
    for prepare in prepared:
        torch.cuda.profiler.start()
        torch.cuda._sleep(1)  # MARK
        torch.cuda.synchronize()
        torch.cuda.profiler.stop()
        try:
            counted(prepare())
        except Exception as error:
            print(f"not counted: {error}", file=sys.stderr)
        gc.collect()


def counted(call: Callable[[], object]) -> None:
    """Runs a call once to compile it, and once between start and stop of the profiler."""
    call()
    torch.cuda.synchronize()
    torch.cuda.profiler.start()
    call()
    torch.cuda.synchronize()
    torch.cuda.profiler.stop()


if __name__ == "__main__":
    child(json.loads(sys.argv[1]))
