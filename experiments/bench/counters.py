"""Hardware counters of calls, by Nsight Compute, which runs a module as its child."""

import csv
import json
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch

from experiments.common.provenance import ROOT

TIME, READ, WRITTEN = "gpu__time_duration.sum", "dram__bytes_read.sum", "dram__bytes_write.sum"
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
