"""Hardware counters of calls, by Nsight Compute, which runs a module as its child.

    python -m experiments.bench.counters provider=hopper mask=random:0.125
    python -m experiments.bench.counters direction=backward head_dim=64 heads=32

prints those of one call beside what it must cost. The options are those of experiments.speed for
one case. Nsight Compute replays every kernel with cold caches and free clocks, so the times are
near those of experiments.speed but not the same. It needs a GPU.
"""

import csv
import json
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any

import torch
import yaml

from experiments.bench.cases import Case
from experiments.bench.cost import CEILINGS, cost, ideal
from experiments.bench.grids import make_grid
from experiments.bench.run import Bench, Measurement
from experiments.common.config import as_list
from experiments.common.devices import device_name
from experiments.common.provenance import ROOT
from experiments.common.tables import aligned

TIME, READ, WRITTEN = "gpu__time_duration.sum", "dram__bytes_read.sum", "dram__bytes_write.sum"
L2, TENSOR = "lts__t_bytes.sum", "sm__inst_executed_pipe_tensor"
LISTS = ("mask", "seq_len", "block_size")
INSTRUCTIONS = "smsp__inst_executed.sum"
NAMES = {TIME: "us", READ: "read MB", WRITTEN: "written MB", L2: "L2 MB", INSTRUCTIONS: "1e6 inst"}
UNITS = {TIME: 1e3, READ: 1e6, WRITTEN: 1e6, L2: 1e6}  # of what ncu gives in ns and bytes
Kernels = list[tuple[str, dict[str, float]]]  # name, and value by metric, in the order of launch


def ncu() -> str:
    """Return the path of Nsight Compute. Raises ValueError, with the remedy, if there is none."""
    found = shutil.which("ncu") or shutil.which("ncu", path="/usr/local/cuda/bin")
    if not found:
        raise ValueError("no ncu on the PATH: install Nsight Compute, a part of the CUDA toolkit")
    return found


def under_ncu(module: str, argument: Any, names: Sequence[str]) -> Kernels:
    """Return what ncu prints of `python -m module ARGUMENT`. Raises ValueError if it does not
    run.
    """
    if not torch.cuda.is_available():
        raise ValueError("counters need a CUDA device")
    options = "--clock-control none --profile-from-start off --csv --print-units base".split()
    command = [ncu(), *options, "--metrics", ",".join(names)]
    command += [sys.executable, "-m", module, json.dumps(argument)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    kernels = parse(done.stdout)
    if done.returncode or not kernels:
        said = (done.stdout + done.stderr).strip().splitlines()[-8:]
        raise ValueError(f"ncu gave no counters ({done.returncode}): " + " | ".join(said))
    return kernels


def parse(text: str) -> Kernels:
    """Return what `ncu --csv` printed: a line for each kernel and metric, after lines of other
    kinds.
    """
    lines = text.splitlines()
    start = next((i for i, line in enumerate(lines) if line.startswith('"ID"')), len(lines))
    kernels: dict[str, tuple[str, dict[str, float]]] = {}
    for line in csv.DictReader(lines[start:]):
        _, values = kernels.setdefault(line["ID"], (line["Kernel Name"], {}))
        value = line["Metric Value"].replace(",", "")
        if value.replace(".", "", 1).isdigit():
            values[line["Metric Name"]] = float(value)
    return list(kernels.values())


def counted(call: Callable[[], object]) -> None:
    """Run a call once to compile it, and once between start and stop of the profiler."""
    call()
    torch.cuda.synchronize()
    torch.cuda.profiler.start()
    call()
    torch.cuda.synchronize()
    torch.cuda.profiler.stop()


# ---- the program


def main(words: list[str]) -> None:
    """Profile one call and print its counters; as the child of ncu, make it."""
    if len(words) == 1 and words[0].startswith("{"):
        return child(json.loads(words[0]))
    options: dict[str, Any] = {"provider": "hopper", "direction": "forward", "mask": "dense"}
    options |= {name: yaml.safe_load(value) for name, value in (w.split("=", 1) for w in words)}
    provider, direction = options.pop("provider"), options.pop("direction")
    options |= {name: as_list(options[name]) for name in LISTS if name in options}
    case = make_grid("cuda", **options)[0]
    task = {"case": asdict(case), "provider": provider, "direction": direction}
    kernels = under_ncu("experiments.bench.counters", task, metrics(ncu()))
    print(f"{provider} {direction} {case}")
    print(report(kernels, case, direction, device_name("cuda")))


def metrics(program: str) -> list[str]:
    """Return what is read: the metrics above, and those of the tensor cores that this chip has."""
    asked = subprocess.run([program, "--query-metrics"], capture_output=True, text=True)
    known = {line.split()[0] for line in asked.stdout.splitlines() if line.strip()}
    tensor = sorted(name for name in known if name.startswith(TENSOR))
    return [*NAMES, *(f"{name}.sum" for name in tensor)]


def report(kernels: Kernels, case: Case, direction: str, device: str) -> str:
    """Return a line for each kernel, their sum, and the least that the call must cost."""
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
    """Run the call that ncu looks at, after one that compiles."""
    case = Case(**task["case"])
    what = Measurement(case, task["provider"], task["direction"])
    counted(Bench(torch.device("cuda"), 0.0).step(what).call(what.direction))


if __name__ == "__main__":
    main(sys.argv[1:])
