"""Activation memory and time of Llama layers, with and without activation checkpointing.

Standard attention and ours, each without checkpointing, with every layer checkpointed, and ours
with attention's out and LSE kept. Peaks of two depths give what a layer adds, beside the formula.
See docs/results/memory.md.
"""

from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import accumulate
from typing import Any

import torch
import torch.nn.functional as F
from matplotlib.figure import Figure
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile
from torch.utils import checkpoint as recompute

import masks
import sparseflash
from experiments.bench.cases import DTYPES
from experiments.bench.gate import checked
from experiments.bench.peers import methods
from experiments.bench.step import MIB, free, measure, peak_extra_mib
from experiments.common import figures as f
from experiments.common.rows import OK, Found, Row
from experiments.common.tables import markdown, short
from experiments.studies import runner
from experiments.studies.runner import Run, both, choices, latest
from sparseflash.layers import Rotary
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
    lengths: list[int] = both([2**i for i in range(10, 17)], [256, 512, 1024, 2048])
    batch: int = 1
    layers: int = 4  # of the stack that is timed; half of them give the difference
    dim: int = both(4096, 128)
    hidden: int = both(11008, 344)  # of SwiGLU
    heads: int = both(32, 4)
    dtype: str = both("bfloat16", "float32")
    seconds: float = both(0.3, 0.2)


@dataclass(frozen=True)
class Case:
    """A stack of one kind at one length: batch sequences of n tokens through equal layers."""

    attention: str
    checkpoint: str
    batch: int
    n: int
    dim: int
    hidden: int
    heads: int
    layers: int
    dtype: str

    def row(self) -> Row:
        return asdict(self) | {"mask": "causal()", "formula_mib": self.layer_bytes() / MIB}

    def layer_bytes(self) -> int:
        """Return what a further layer keeps until its backward.

        none: the two inputs of norms, their results, q, k, v, out, and four hidden tensors: gate,
            up, silu(gate) and their product. Standard attention keeps P as well, ours the LSE.
        layers: the input alone. selective: the input, and attention's out and LSE.
        """
        tokens, lse = self.batch * self.n, 4 * self.batch * self.heads * self.n
        itemsize = DTYPES[self.dtype].itemsize
        unit = tokens * self.dim * itemsize  # a tensor (batch, n, dim)
        if self.checkpoint != "none":
            return unit if self.checkpoint == "layers" else 2 * unit + lse
        kept = tokens * self.heads * self.n * itemsize if self.attention == "standard" else lse
        return 8 * unit + 4 * unit * self.hidden // self.dim + 2 * 4 * tokens + kept

    def stack(self, device: torch.device, layers: int | None = None) -> "Stack":
        """Return a stack whose weights are drawn on the device: on a CPU four layers take long."""
        with device:
            return Stack(self, layers or self.layers).to(DTYPES[self.dtype])


class Stack(nn.Module):
    """Layers one after another, with or without checkpoints."""

    def __init__(self, case: Case, layers: int):
        super().__init__()
        self.layers = nn.ModuleList(Layer(case) for _ in range(layers))
        self.checkpoint = case.checkpoint

    def forward(self, x: Tensor) -> Tensor:
        call: Any = lambda layer, x: layer(x)  # noqa: E731
        if self.checkpoint != "none":
            call = partial(recompute.checkpoint, use_reentrant=False, preserve_rng_state=False)
        if self.checkpoint == "selective":
            made = partial(recompute.create_selective_checkpoint_contexts, _policy)
            call = partial(call, context_fn=made)
        for layer in self.layers:
            x = call(layer, x)
        return x


def _policy(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> Any:
    """Keep what our attention returns, compute the rest again."""
    policy, kept = recompute.CheckpointPolicy, op is torch.ops.sparseflash.forward.default
    return policy.MUST_SAVE if kept else policy.PREFER_RECOMPUTE


class Layer(nn.Module):
    """x + attention(norm(x)), then x + swiglu(norm(x)); causal."""

    def __init__(self, case: Case):
        super().__init__()
        dim, hidden, self.heads = case.dim, case.hidden, case.heads
        ours = partial(sparseflash.attention, mask=masks.causal())
        self.attend: Any = standard_attention if case.attention == "standard" else ours
        self.norms = nn.ParameterList([torch.ones(dim), torch.ones(dim)])
        self.qkv, self.out = nn.Linear(dim, 3 * dim, False), nn.Linear(dim, dim, False)
        self.gate, self.up = nn.Linear(dim, hidden, False), nn.Linear(dim, hidden, False)
        self.down = nn.Linear(hidden, dim, False)
        self.rotary = Rotary()

    def forward(self, x: Tensor) -> Tensor:
        normed = F.rms_norm(x, x.shape[-1:], self.norms[0], 1e-5)
        q, k, v = self.qkv(normed).unflatten(2, (3, self.heads, -1)).unbind(2)
        # v by itself, so that it does not keep the storage of all three
        q, k, v = (t.transpose(1, 2) for t in (self.rotary(q), self.rotary(k), v.clone()))
        x = x + self.out(self.attend(q, k, v).transpose(1, 2).flatten(2))
        normed = F.rms_norm(x, x.shape[-1:], self.norms[1], 1e-5)
        return x + self.down(F.silu(self.gate(normed)) * self.up(normed))


def standard_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Return causal softmax(q k^T / sqrt(D)) v; of the N x N matrices autograd keeps P."""
    n = q.shape[2]
    later = torch.ones(n, n, dtype=torch.bool, device=q.device).triu(1)
    scores = (q @ k.mT).mul_(q.shape[-1] ** -0.5)
    with torch.no_grad():  # where P is 0 the softmax gives no gradient
        scores.masked_fill_(later, -torch.inf)
    return scores.softmax(-1) @ v


def peak_mib(step: Callable[[], object], device: torch.device) -> float:
    """Return the most that a step holds beyond what is held before it."""
    if (peak := peak_extra_mib(step, device)) is not None:
        return peak
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
        step()
    events: Any = seen.profiler.kineto_results.events()  # type: ignore[union-attr]
    return max(accumulate(e.nbytes() for e in events if e.name() == "[memory]")) / MIB


def cases(run: Run) -> list[Case]:
    o = run.options
    choices(o, dtype=DTYPES)
    if o.dim % (2 * o.heads):
        raise ValueError(f"dim={o.dim}: give a multiple of 2 * heads, for rotary pairs")
    if o.layers < 4:  # half of the layers: one alone is all edge
        raise ValueError(f"layers={o.layers}: give at least 4")
    sizes = o.dim, o.hidden, o.heads, o.layers, o.dtype
    return [Case(*kind, o.batch, n, *sizes) for n in sorted(o.lengths) for kind in NAMES]


def opened(case: Case, run: Run) -> Callable[[Row], dict[str, Any]]:
    device = run.device

    def one(row: Row) -> dict[str, Any]:
        check_result(case, device)
        half = case.layers // 2
        low = peak_mib(_step(case, half, device), device)
        free(device)
        step = _step(case, case.layers, device)
        peak = peak_mib(step, device)
        layer = (peak - low) / (case.layers - half)
        scaled = (peak + (LAYERS - case.layers) * layer) * MIB / 1e9
        found = {"peak_mib": peak, "layer_mib": layer, "scaled_gb": scaled}
        return found | measure(step, device, run.options.seconds)._asdict()

    return one


def check_result(case: Case, device: torch.device) -> None:
    """Raise WrongResult if a layer differs from float64 with standard attention.

    Its products and residuals round as well: the limit is twice what standard attention without
    checkpointing has in the same dtype.
    """
    small = replace(case, n=min(case.n, GATE_TOKENS))
    plain = replace(small, attention="standard", checkpoint="none")
    torch.manual_seed(0)
    exact = plain.stack(device, 1)
    weights = exact.state_dict()
    x = torch.randn(small.batch, small.n, small.dim, dtype=DTYPES[small.dtype], device=device)
    expected = _results(exact.double(), x.double())

    def error(case: Case) -> float:
        stack = case.stack(device, 1)
        stack.load_state_dict(weights)
        pairs = zip(_results(stack, x.clone()), expected, strict=True)
        return max(relative_error(a, b) for a, b in pairs)

    checked(error(small), 2 * error(plain))


def _results(stack: Stack, x: Tensor) -> tuple[Tensor, Tensor]:
    """Return what a stack adds to x, and the gradient of x without the residual's part."""
    out = stack(x.requires_grad_())
    dout = torch.ones_like(out)
    return (out - x).detach(), torch.autograd.grad(out, x, dout)[0] - dout


def _step(case: Case, layers: int, device: torch.device) -> Callable[[], None]:
    """Return a step of a stack whose gradients exist, after the first one."""
    stack = case.stack(device, layers)
    x = torch.randn(case.batch, case.n, case.dim, device=device, dtype=DTYPES[case.dtype])
    dout = torch.randn_like(x)
    for leaf in (x.requires_grad_(), *stack.parameters()):
        leaf.grad = torch.zeros_like(leaf)
    step = lambda: stack(x).backward(dout)  # noqa: E731
    step()  # compiles kernels and builds masks
    return step


def _kinds(frame: Any) -> dict[tuple[str, str], list[Found]]:
    """Return the last rows of each kind of stack by length, with the sizes of the last row."""
    rows = latest(frame, "device batch dim hidden heads dtype", ("attention", "checkpoint", "n"))
    rows = sorted(rows, key=lambda r: r.n)
    own = {kind: [r for r in rows if (r.attention, r.checkpoint) == kind] for kind in NAMES}
    return {kind: some for kind, some in own.items() if some}


def tables(frame: Any) -> dict[str, str]:
    sizes = ["peak MiB", "a layer", "by the formula", f"{LAYERS} layers, GB", "ms"]
    lines = [["stack", "tokens", *sizes]]
    for kind, rows in _kinds(frame).items():
        for row in rows:
            names = ("peak_mib", "layer_mib", "formula_mib", "scaled_gb", "ms_median")
            texts = [short(row.get(each)) for each in names]
            if row.status != OK:
                texts[0] = row.status.split(":")[0]
            lines.append([f"{NAMES[kind][0]} ({row.layers} layers)", f"{row.n:,}", *texts])
    return {"stacks": markdown(lines)}


def figures(frame: Any) -> dict[str, Figure]:
    """Return peak memory and time of a step against length."""
    kinds = _kinds(frame[frame.status == OK])
    values = {
        label: {
            "": [f.Curve(*NAMES[kind], {r.n: r[name] for r in own}) for kind, own in kinds.items()]
        }
        for name, label in (("peak_mib", "peak of a step (MiB)"), ("ms_median", "a step (ms)"))
    }
    return {f.file_name("activations", frame.device.iloc[-1]): f.length_figure(values)}
