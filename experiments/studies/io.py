"""FLOPs, bytes and time of forward and backward, in the form of FlashAttention's Figure 2.

Every attention at the shape of GPT-2 medium, and ours against sparsity. On a GPU, Nsight Compute
counts the bytes where it may, in a process that runs this file. See docs/results/memory.md.
"""

import json
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from io import StringIO
from typing import Any

import pandas as pd
import torch

from experiments.bench.cases import DTYPES, Case
from experiments.bench.cost import DIRECTIONS, cost, flops, standard_accesses
from experiments.bench.peers import methods
from experiments.bench.peers.methods import METHODS, Setting, block_of
from experiments.common.provenance import ROOT
from experiments.common.rows import OK, Found, Row
from experiments.common.tables import MISSING, markdown, short
from experiments.studies import runner
from experiments.studies.runner import Run, both, choices, latest

KEY = "part method batch heads n head_dim dtype block".split()
SOURCES = methods.SOURCES
PARTS = ("shape", "sparsity")
BYTES = ("dram__bytes_read.sum", "dram__bytes_write.sum")  # of Nsight Compute
# Figure 2 (left) of FlashAttention: GPT-2 medium, forward and backward, A100: GFLOP, GB and ms
FIGURE_2 = {"standard": (66.6, 40.3, 41.7), "FlashAttention": (75.2, 4.4, 7.3)}


@dataclass(kw_only=True)
class Options(runner.Options):
    parts: list[str] = field(default_factory=lambda: [*PARTS])
    methods: list[str] = both(
        ["standard", "compiled", "sdpa_flash", "sdpa_cudnn", "flash"],
        ["standard", "compiled", "sdpa", "flash"],
    )  # of the part shape
    batch: int = both(64, 1)
    heads: int = both(16, 4)
    n: int = 1024  # tokens
    head_dim: int = 64
    dtype: str = both("bfloat16", "float32")
    densities: list[float] = field(default_factory=lambda: [1.0, 0.75, 0.5, 0.25, 0.125, 0.0625])
    sparse_n: int = both(4096, 2048)  # tokens of the part sparsity, with as many in a batch
    seconds: float = both(0.15, 0.3)


@dataclass(frozen=True)
class Measured(Setting):
    """A method at one shape, with the counts of the model."""

    part: str = "shape"

    def row(self) -> Row:
        case = self.case(self.make(torch.device("cpu")))
        counts = {"gflop": work(self.method, case), "model_gb": traffic(self.method, case)}
        about = {"mask": case.mask, "density": case.density, "block": case.block_q}
        return asdict(self) | about | {name: count / 1e9 for name, count in counts.items()}


def work(method: str, case: Case) -> float:
    """Return operations of the products: 12 N^2 d of standard attention, 14 N^2 d with S
    recomputed, of the computed blocks.
    """
    recompute = not METHODS[method].stores
    products = flops(case.n_q, case.head_dim, "both", recompute=recompute)
    return case.batch * case.heads * case.density * products


def traffic(method: str, case: Case) -> float:
    """Return bytes of HBM traffic of forward and backward by the model.

    Standard attention reads and writes N x N matrices, eleven times. The others read each input
    and write each output once a pass.
    """
    if METHODS[method].stores:
        elements = standard_accesses(case.n_q, case.head_dim, "both")
        return case.batch * case.heads * elements * case.shape.itemsize
    return sum(cost(case.shape, case.blocks, d).hbm_bytes for d in DIRECTIONS)


def cases(run: Run) -> list[Measured]:
    """Return what the parts are made of.

    shape: every method at the shape of the table. sparsity: ours at several densities, and longer
    sequences.
    """
    o, made = run.options, []
    exact = [name for name, m in METHODS.items() if m.exact and not m.mask and name != "sparse"]
    choices(o, parts=PARTS, methods=exact, dtype=DTYPES)
    if "shape" in o.parts:
        made += [Measured(m, o.batch, o.heads, o.n, o.head_dim, o.dtype) for m in o.methods]
    if "sparsity" in o.parts:
        n, batch = o.sparse_n, max(1, o.batch * o.n // o.sparse_n)
        sizes, block = (batch, o.heads, n, o.head_dim, o.dtype), block_of(n)
        texts = [f"random_blocks({density}, block={block})" for density in o.densities]
        made.append(Measured("flash", *sizes, part="sparsity"))
        made += [Measured("sparse", *sizes, mask=text, part="sparsity") for text in texts]
    return made


def opened(what: Measured, run: Run) -> Callable[[Row], dict[str, Any]]:
    def one(row: Row) -> dict[str, Any]:
        step, error = what.prepared(run.device)
        memory = {"saved_mib": step.saved_mib(), "peak_mib": step.peak_mib(run.device)}
        times = step.time("both", run.device, run.options.seconds)
        moved = counted_gb(what) if run.device.type == "cuda" else None
        return {"error": error, **memory, "counted_gb": moved, **times}

    return one


# ---- counters of the hardware


def counted_gb(what: Measured) -> float | None:
    """Return HBM bytes of forward and backward by hardware counters, in 1e9, from this file in a
    process of ncu; None where there are no counters.
    """
    ncu = shutil.which("ncu") or shutil.which("ncu", path="/usr/local/cuda/bin")
    if not ncu:
        print("no counters: no ncu on the PATH, install Nsight Compute", flush=True)
        return None
    options = "--clock-control none --profile-from-start off --csv --print-units base".split()
    command = [ncu, *options, "--metrics", ",".join(BYTES), sys.executable, "-m"]
    command += ["experiments.studies.io", json.dumps(asdict(what))]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    _, head, table = done.stdout.partition('"ID"')
    if done.returncode or not head:
        print(f"no counters: {(done.stdout + done.stderr).strip()[-300:]}", flush=True)
        return None
    values: Any = pd.read_csv(StringIO(head + table), thousands=",", na_values="n/a")
    return values["Metric Value"].sum() / 1e9


def counted(what: Measured) -> None:
    """Make a call once to compile it, and once for the profiler."""
    step, _ = what.prepared(torch.device("cuda"))
    step.both()
    torch.cuda.synchronize()
    torch.cuda.profiler.start()
    step.both()
    torch.cuda.synchronize()
    torch.cuda.profiler.stop()


def tables(frame: Any) -> dict[str, str]:
    """Return the tables shape, with what is published, and sparsity: the last of each measurement,
    with the device and dtype of the last row.
    """
    rows, made = latest(frame, "device dtype", (*KEY, "mask")), {}
    for part, lines in {"shape": _shape, "sparsity": _sparsity}.items():
        if own := [row for row in rows if row.part == part]:
            made[part] = markdown(lines(own))
    return made


def _shape(rows: Sequence[Found]) -> list[list[str]]:
    """Return work, bytes and time of each method, and how many times as fast as the first."""
    lines = [["attention", "GFLOP", "model GB", "counted GB", "ms", "faster than standard"]]
    base = next((r.ms_median for r in rows if r.method == "standard" and r.status == OK), None)
    for row in rows:
        texts = [short(row.get(x)) for x in ("gflop", "model_gb", "counted_gb", "ms_median")]
        if row.status != OK:
            texts[3] = row.status.split(":")[0]
        lines.append([METHODS[row.method].label, *texts, _times(base, row)])
    for label, (gflop, gb, ms) in FIGURE_2.items():
        texts = [f"{gflop:g}", MISSING, f"{gb:g}", f"{ms:g}"]
        gain = f"{FIGURE_2['standard'][2] / ms:.2f}x"
        lines.append([f"{label}, published (A100)", *texts, gain])
    return lines


def _times(base: float | None, row: Found) -> str:
    return f"{base / row.ms_median:.2f}x" if base and row.status == OK else MISSING


def _sparsity(rows: Sequence[Found]) -> list[list[str]]:
    """Return time against density, beside the time that falls with the density."""
    dense = next((r.ms_median for r in rows if r.block == 0 and r.status == OK), None)
    lines = [["density", "model GB", "counted GB", "ms", "faster than dense", "ideal"]]
    for row in sorted(rows, key=lambda r: (r.block > 0, -(r.density or 0))):
        ideal = f"{1 / row.density:.2f}x" if row.density else MISSING
        name = "no mask" if row.block == 0 else short(row.density)
        cells = [short(row.get(x)) for x in ("model_gb", "counted_gb", "ms_median")]
        lines.append([name, *cells, _times(dense, row), ideal])
    return lines


if __name__ == "__main__":
    counted(Measured(**json.loads(sys.argv[1])))
