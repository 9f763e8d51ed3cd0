"""FLOPs, bytes and time of forward and backward, in the form of FlashAttention's Figure 2.

Every attention at the shape of GPT-2 medium, and ours against sparsity. On a GPU, Nsight Compute
counts the bytes where it may, in a process that runs this file. See docs/results/memory.md.
"""

import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch

from experiments.bench.cases import DENSE, DTYPES, Case
from experiments.bench.cost import cost, flops, standard_accesses
from experiments.bench.counters import READ, WRITTEN, counted, under_ncu
from experiments.bench.gate import Gate
from experiments.bench.providers import SparseFlash
from experiments.bench.step import Step, draw
from experiments.common.rows import OK, Found, Row
from experiments.common.tables import MISSING, markdown, short
from experiments.studies import methods, runner
from experiments.studies.methods import METHODS, Setting, compiled
from experiments.studies.runner import Run, choices, latest

KEY = "part method batch heads n head_dim dtype block".split()
SOURCES = methods.SOURCES
PARTS = ("shape", "sparsity")
OURS = "flash"  # ours, under any mask
BOTH = ("both", "forward")  # what is counted
# Figure 2 (left) of FlashAttention: GPT-2 medium, forward and backward, A100: GFLOP, GB and ms
FIGURE_2 = {"standard": (66.6, 40.3, 41.7), "FlashAttention": (75.2, 4.4, 7.3)}
FIGURE_2_SHAPE = {"batch": 64, "heads": 16, "n": 1024, "head_dim": 64}


@dataclass(kw_only=True)
class Options(runner.Options):
    name: str = "io"
    parts: list[str] = field(default_factory=lambda: [*PARTS])
    methods: list[str]  # of the part shape
    batch: int
    heads: int
    n: int = 1024  # tokens
    head_dim: int = 64
    dtype: str
    densities: list[float] = field(default_factory=lambda: [1.0, 0.75, 0.5, 0.25, 0.125, 0.0625])
    sparse_n: int  # tokens of the part sparsity, with as many in a batch
    sparse_block: int  # tokens of its blocks


DEFAULTS = {
    "cuda": Options(
        methods=["standard", "compiled", "sdpa_flash", "sdpa_cudnn", OURS], batch=64, heads=16,
        dtype="bfloat16", seconds=0.15, sparse_n=4096, sparse_block=128,
    ),
    "cpu": Options(
        methods=["standard", "compiled", "sdpa", OURS], batch=1, heads=4, dtype="float32",
        seconds=0.3, sparse_n=2048, sparse_block=64,
    ),
}  # fmt: skip


@dataclass(frozen=True)
class Measured:
    """One thing to measure: a method on a case. Only ours takes a mask."""

    part: str
    method: str
    case: Case

    def row(self) -> Row:
        """Return its fields of a row, with the counts of the model."""
        case = self.case
        sizes = {n: getattr(case, n) for n in "batch heads head_dim dtype mask density".split()}
        what = {"part": self.part, "method": self.method, "n": case.n_q, "block": case.block_q}
        both, forward = (traffic(self.method, case, direction) / 1e9 for direction in BOTH)
        counts = {"gflop": work(self.method, case) / 1e9, "model_gb": both}
        return sizes | what | counts | {"forward_model_gb": forward}

    def step(self, device: torch.device) -> Step:
        """Return forward and backward, ready to run."""
        case = self.case
        if self.method == OURS:
            return Step(SparseFlash("auto").prepare(case, device), draw(case, device))
        made = self.setting.make(device)
        attend = compiled(made, device) if METHODS[self.method].compiled else made
        return Step(attend, draw(case, device))

    @property
    def setting(self) -> Setting:
        """The method without a mask."""
        case = self.case
        return Setting(self.method, case.batch, case.heads, case.n_q, case.head_dim, case.dtype)

    @property
    def directions(self) -> tuple[str, ...]:
        """What is counted: both together, and at the paper's shape the forward alone."""
        return BOTH if self.part == "shape" else BOTH[:1]


def work(method: str, case: Case) -> float:
    """Return operations of the products: 12 N^2 d of standard attention, 14 N^2 d with S
    recomputed, of the computed blocks.
    """
    recompute = not METHODS[method].stores
    products = flops(case.n_q, case.head_dim, "both", recompute=recompute)
    return case.batch * case.heads * case.density * products


def traffic(method: str, case: Case, direction: str) -> float:
    """Return bytes of HBM traffic of `direction` (forward | both) by the model.

    Standard attention reads and writes N x N matrices, eleven times in both. The others read each
    input and write each output once a pass.
    """
    if METHODS[method].stores:
        elements = standard_accesses(case.n_q, case.head_dim, direction)
        return case.batch * case.heads * elements * case.shape.itemsize
    passes = ("forward", "backward") if direction == "both" else (direction,)
    return sum(cost(case.shape, case.blocks, d).hbm_bytes for d in passes)


def cases(run: Run) -> list[Measured]:
    """Return what the parts are made of.

    shape: every method at the shape of the table. sparsity: ours at several densities, and longer
    sequences.
    """
    o, made = run.options, []
    exact = [name for name, m in METHODS.items() if m.exact and not m.mask and name != "sparse"]
    choices(o, parts=PARTS, methods=exact, dtype=DTYPES)
    sizes = o.batch, o.heads, o.heads, o.n, o.n, o.head_dim, o.dtype
    shape = Case(DENSE, *sizes, 0, 0)

    if "shape" in o.parts:
        made += [Measured("shape", name, shape) for name in o.methods]
    if "sparsity" in o.parts:
        n, batch = o.sparse_n, max(1, o.batch * o.n // o.sparse_n)
        longer = replace(shape, batch=batch, n_q=n, n_k=n)
        made.append(Measured("sparsity", OURS, longer))
        sizes = {"block_q": (block := o.sparse_block), "block_k": block}
        texts = [f"random_blocks({density}, block={block})" for density in o.densities]
        made += [Measured("sparsity", OURS, replace(longer, mask=t, **sizes)) for t in texts]
    for what in made:
        if what.case.block_q:
            what.case.check()
    return made


def opened(what: Measured, run: Run) -> Callable[[Row], dict[str, Any]]:
    """Return what measures time, memory and, on a GPU, the bytes by Nsight Compute."""

    def one(row: Row) -> dict[str, Any]:
        what.setting.check(run.device)
        step = what.step(run.device)
        error = step.error(Gate(what.case, *step.qkv))
        memory = {"saved_mib": step.saved_mib(), "peak_mib": step.peak_mib(run.device)}
        times = step.time("both", run.device, run.options.seconds)
        on_gpu = run.device.type == "cuda"
        counts = {d: counted_gb(what, d) for d in what.directions} if on_gpu else {}
        moved = {"counted_gb": counts.get("both"), "forward_counted_gb": counts.get("forward")}
        return {"error": error, **memory, **moved, **times}

    return one


def counted_gb(what: Measured, direction: str) -> float | None:
    """Return HBM bytes of `direction` (forward | both) by hardware counters, in 1e9, from a process
    of ncu; None where it has no counters.
    """
    task = {"direction": direction, **asdict(what)}
    try:
        kernels = under_ncu("experiments.studies.io", task, (READ, WRITTEN))
    except ValueError as refusal:
        print(f"no counters: {' '.join(str(refusal).split())[:160]}", flush=True)
        return None
    return sum(v.get(READ, 0.0) + v.get(WRITTEN, 0.0) for _, v in kernels) / 1e9


def prepared(task: dict[str, Any]) -> Callable[[], object]:
    """Return the call of a task of `counted_gb`."""
    what = Measured(task["part"], task["method"], Case(**task["case"]))
    step = what.step(torch.device("cuda"))
    _ = step.dout
    return step.call(task["direction"])


def newest(frame: Any) -> dict[str, list[Found]]:
    """Return the rows of each part, one a measurement: the last, with the device and dtype of the
    last row.
    """
    rows = latest(frame, "device dtype", (*KEY, "mask"))
    return {part: [row for row in rows if row.part == part] for part in PARTS}


def tables(frame: Any) -> dict[str, str]:
    """Return the tables shape, with what is published, and sparsity."""
    makers = {"shape": _shape, "sparsity": _sparsity}
    return {part: markdown(makers[part](rows)) for part, rows in newest(frame).items() if rows}


def _shape(rows: Sequence[Found]) -> list[list[str]]:
    """Return work, bytes and time of each method, and how many times as fast as the first."""
    bytes_of = ["forward, model GB", "forward, counted GB", "model GB", "counted GB"]
    lines = [["attention", "GFLOP", *bytes_of, "ms", "kept MiB", "faster than standard"]]
    base = next((r.ms_median for r in rows if r.method == "standard" and r.status == OK), None)
    names = "gflop forward_model_gb forward_counted_gb model_gb counted_gb ms_median saved_mib"
    for row in rows:
        texts = [short(row.get(name)) for name in names.split()]
        if row.status != OK:
            texts[5] = row.status.split(":")[0]
        lines.append([METHODS[row.method].label, *texts, _times(base, row)])
    for label, (gflop, gb, ms) in FIGURE_2.items():
        texts = [f"{gflop:g}", *[MISSING] * 3, f"{gb:g}", f"{ms:g}", MISSING]
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
    counted(prepared(json.loads(sys.argv[1])))
