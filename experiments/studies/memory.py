"""Activation memory and time of Llama layers, with and without activation checkpointing.

Standard attention and ours, each without checkpointing, with every layer checkpointed, and ours
with attention's out and LSE kept. Peaks of two depths give what a layer adds, beside the formula.
A context too long for the memory gets a row that says so. See docs/results/memory.md.
"""

from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from matplotlib import pyplot as plt
from matplotlib.figure import Figure
from torch import Tensor

from experiments.bench.cases import DTYPES
from experiments.bench.gate import WrongResult
from experiments.bench.step import free, time_call
from experiments.bench.timing import MIB
from experiments.common import figures as f
from experiments.common.devices import free_memory
from experiments.common.rows import OK, Found, Row
from experiments.common.tables import markdown, short
from experiments.studies import methods, runner
from experiments.studies.llama import ATTENTIONS, CHECKPOINTS, Sizes, Stack, peak_bytes
from experiments.studies.runner import Run, choices, latest, needs
from sparseflash.testing import relative_error

KEY = "attention checkpoint batch n dim hidden heads layers dtype".split()
SOURCES = methods.SOURCES
GATE_TOKENS = 256
NAMES = {
    ("standard", "none"): ("standard", f.Style("#000000", "o", "-")),
    ("standard", "layers"): ("standard, checkpointed", f.Style("#7F7F7F", "o", "--")),
    ("ours", "none"): ("ours", f.Style("#D55E00", "D", "-")),
    ("ours", "layers"): ("ours, checkpointed", f.Style("#0072B2", "D", "--")),
    ("ours", "selective"): ("ours, out and LSE kept", f.Style("#009E73", "^", "-.")),
}
LAYERS = 32  # of a 7B model


@dataclass(kw_only=True)
class Options(runner.Options):
    name: str = "memory"
    lengths: list[int]
    batch: int = 1
    layers: int = 4  # of the stack that is timed; half of them give the difference
    dim: int
    hidden: int  # of SwiGLU
    heads: int
    dtype: str


DEFAULTS = {
    "cuda": Options(
        lengths=[2**i for i in range(10, 17)], dim=4096, hidden=11008, heads=32, dtype="bfloat16",
        seconds=0.3,
    ),
    "cpu": Options(
        lengths=[256, 512, 1024, 2048], dim=128, hidden=344, heads=4, dtype="float32", seconds=0.2
    ),
}  # fmt: skip


@dataclass(frozen=True)
class Case:
    """A stack of one kind at one length."""

    sizes: Sizes
    attention: str
    checkpoint: str
    layers: int

    def row(self) -> Row:
        """Return its fields of a row, with the formula."""
        kind = {"attention": self.attention, "checkpoint": self.checkpoint, "layers": self.layers}
        formula = self.sizes.layer_bytes(self.attention, self.checkpoint) / MIB
        return {**kind, **asdict(self.sizes), "mask": "causal()", "formula_mib": formula}

    def stack(self, device: torch.device, layers: int) -> Stack:
        """Return a stack whose weights are drawn on the device: on a CPU four layers take long."""
        with device:
            made = Stack(self.sizes, self.attention, layers, self.checkpoint)
            return made.to(DTYPES[self.sizes.dtype])


def cases(run: Run) -> list[Case]:
    """Return what is measured, the short lengths first."""
    o = run.options
    choices(o, dtype=DTYPES)
    if o.dim % (2 * o.heads):
        raise ValueError(f"dim={o.dim}: give a multiple of 2 * heads, for rotary pairs")
    if o.layers < 4:  # half of the layers: one alone is all edge
        raise ValueError(f"layers={o.layers}: give at least 4")
    return [
        Case(Sizes(o.batch, n, o.dim, o.hidden, o.heads, o.dtype), attention, checkpoint, o.layers)
        for n in sorted(o.lengths)
        for attention in ATTENTIONS
        for checkpoint in CHECKPOINTS
        if (attention, checkpoint) in NAMES
    ]


def ways(case: Case, run: Run) -> list[Row]:
    """Return the one thing that is measured, and by what its memory is counted."""
    return [{"counted": "allocator" if run.device.type == "cuda" else "storages"}]


def opened(case: Case, run: Run) -> Callable[[Row], dict[str, Any]]:
    """Return what measures peaks of two depths, what follows for 32 layers, and the time."""
    device = run.device

    def one(row: Row) -> dict[str, Any]:
        check_memory(case, device)
        check_result(case, device)
        half = case.layers // 2
        low = _peak(case.stack(device, half), case.sizes, device)[0]
        free(device)
        peak, step = _peak(case.stack(device, case.layers), case.sizes, device)
        layer = (peak - low) / (case.layers - half)
        scaled = (peak + (LAYERS - case.layers) * layer) / 1e9
        found = {"peak_mib": peak / MIB, "layer_mib": layer / MIB, "scaled_gb": scaled}
        return found | time_call(step, device, run.options.seconds)._asdict()

    return one


def check_memory(case: Case, device: torch.device) -> None:
    """Raise MemoryError for a context too long: the stack keeps, and one layer is at work."""
    sizes = case.sizes
    need = case.layers * sizes.layer_bytes(case.attention, case.checkpoint)
    if case.checkpoint != "none":
        need += sizes.layer_bytes(case.attention)
    if case.attention == "standard":
        need += 2 * sizes.score_bytes  # dP and dS
    needs(need, free_memory(device))


def check_result(case: Case, device: torch.device) -> None:
    """Raise WrongResult if a layer differs from float64 with standard attention.

    Its products and residuals round as well: the limit is twice what standard attention without
    checkpointing has in the same dtype.
    """
    small = replace(case, sizes=replace(case.sizes, n=min(case.sizes.n, GATE_TOKENS)))
    plain, sizes = replace(small, attention="standard", checkpoint="none"), small.sizes
    torch.manual_seed(0)
    exact = plain.stack(device, 1)
    weights = exact.state_dict()
    x = torch.randn(sizes.batch, sizes.n, sizes.dim, dtype=DTYPES[sizes.dtype], device=device)
    expected = _results(exact.double(), x.double())

    def error(case: Case) -> float:
        stack = case.stack(device, 1)
        stack.load_state_dict(weights)
        pairs = zip(_results(stack, x.clone()), expected, strict=True)
        return max(relative_error(a, b) for a, b in pairs)

    limit, worst = 2 * error(plain), error(small)
    if not worst <= limit:
        raise WrongResult(f"wrong result: error {worst:.3g}, limit {limit:.3g}", worst)


def _results(stack: Stack, x: Tensor) -> tuple[Tensor, Tensor]:
    """Return what a stack adds to x, and the gradient of x without the residual's part."""
    x = x.requires_grad_()
    out = stack(x)
    dout = torch.ones_like(out)
    return (out - x).detach(), torch.autograd.grad(out, x, dout)[0] - dout


def _peak(stack: Stack, sizes: Sizes, device: torch.device) -> tuple[int, Callable[[], None]]:
    """Return peak bytes of a step of the stack beyond weights and gradients, and the step."""
    for weight in stack.parameters():
        weight.grad = torch.zeros_like(weight)
    shape = (sizes.batch, sizes.n, sizes.dim)
    x = torch.randn(shape, device=device, dtype=DTYPES[sizes.dtype], requires_grad=True)
    dout = torch.randn_like(x)
    x.grad = torch.zeros_like(x)

    def step() -> None:
        stack(x).backward(dout)

    step()  # compiles kernels and builds masks
    return peak_bytes(step, device), step


def newest(frame: Any) -> list[Found]:
    """Return one row a configuration and length: the last, with the sizes of the last row."""
    return latest(frame, "device batch dim hidden heads dtype", ("attention", "checkpoint", "n"))


def _kinds(rows: list[Found]) -> dict[tuple[str, str], list[Found]]:
    """Return the rows of each kind of stack by length."""
    rows = sorted(rows, key=lambda r: r.n)
    own = {kind: [r for r in rows if (r.attention, r.checkpoint) == kind] for kind in NAMES}
    return {kind: some for kind, some in own.items() if some}


def tables(frame: Any) -> dict[str, str]:
    """Return the table of the stacks."""
    sizes = ["peak MiB", "a layer", "by the formula", f"{LAYERS} layers, GB", "ms"]
    lines = [["stack", "tokens", *sizes]]
    for kind, rows in _kinds(newest(frame)).items():
        for row in rows:
            names = ("peak_mib", "layer_mib", "formula_mib", "scaled_gb", "ms_median")
            texts = [short(row.get(each)) for each in names]
            if row.status != OK:
                texts[0] = row.status.split(":")[0]
            lines.append([f"{NAMES[kind][0]} ({row.layers} layers)", f"{row.n:,}", *texts])
    return {"stacks": markdown(lines)}


def figures(frame: Any) -> dict[str, Figure]:
    """Return peak memory and time of a step against length."""
    rows = [row for row in newest(frame) if row.status == OK]
    if not rows:
        return {}
    lengths = sorted({row.n for row in rows})
    figure, panels = plt.subplots(1, 2, figsize=(f.PAGE, 2.6))
    for kind, own in _kinds(rows).items():
        (name, look), n = NAMES[kind], [row.n for row in own]
        f.curve(panels[0], n, [row.peak_mib or 0 for row in own], look, name)
        f.curve(panels[1], n, [row.ms_median for row in own], look, name)
    first = min((row for row in rows if row.peak_mib), key=lambda r: (r.n, r.peak_mib))
    f.reference(panels[0], lengths, [first.peak_mib * n / first.n for n in lengths], "linear")
    for axes, label in zip(panels, ("peak MiB of a step", "ms of a step"), strict=True):
        f.length_axis(axes, lengths)
        f.plain_log_axis(axes)
        axes.set_ylabel(label)
    f.legend(figure, list(panels), columns=3)
    return {f.file_name("activations", rows[0].device): figure}
