"""Time of linear layers and MLPs with block-sparse weights, beside dense ones and other libraries'.

`ours` are `sparseflash.BlockSparseLinear` and `BlockSparseMLP`, `dense` those of torch, `bsr` is
torch's BSR tensor, whose products have no gradients, and `stk` that of MegaBlocks where it is
installed. The blocks are random, as many in every row. `share` is the rate of a computed block over
that of the dense layer. Results and gradients of x pass a gate first. See docs/guide/linear.md.
"""

import importlib
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache, partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import masks
from experiments.bench.cases import DTYPES
from experiments.bench.gate import LIMIT, checked
from experiments.bench.step import DIRECTIONS, Step
from experiments.common.rows import Found, Row
from experiments.common.tables import MISSING, markdown, short
from experiments.studies import runner
from experiments.studies.runner import Run, both, choices, grid, pair, timed
from sparseflash import BlockSparseLinear, BlockSparseMLP
from sparseflash.testing import relative_error

KEY = "provider what direction dim hidden tokens block density dtype round".split()
SOURCES = ("masks", "sparseflash", "experiments/studies")


@dataclass(kw_only=True)
class Options(runner.Options):
    sizes: list[str] = both(["768:3072", "1024:4096", "4096:11008"], ["128:512"])  # dim:hidden
    tokens: list[int] = both([1024, 8192, 32768], [256])
    densities: list[float] = both([0.5, 0.25, 0.125, 0.03125], [0.25])
    blocks: list[int] = both([128, 64, 32], [32])
    what: list[str] = field(default_factory=lambda: [*WHAT])  # up, down, mlp
    providers: list[str] = field(default_factory=lambda: [*PROVIDERS])
    dtype: str = both("bfloat16", "float32")


WHAT: dict[str, Callable[[BlockSparseMLP], nn.Module]] = {
    "up": lambda ours: ours.up,
    "down": lambda ours: ours.down,
    "mlp": lambda ours: ours,
}


def as_dense(module: nn.Module) -> nn.Module:
    """Return torch's layers of the same weights."""
    if isinstance(module, BlockSparseLinear):
        return module.to_dense()
    assert isinstance(module, BlockSparseMLP)
    return nn.Sequential(module.up.to_dense(), nn.GELU("tanh"), module.down.to_dense())


class Bsr(nn.Module):
    """Torch's BSR tensors for the weights of dense layers; no gradients."""

    def __init__(self, dense: nn.Module, block: int):
        super().__init__()
        layers = [m for m in dense.modules() if isinstance(m, nn.Linear)]
        size = (block, block)
        self.layers = [(m.weight.detach().to_sparse_bsr(size), m.bias.detach()) for m in layers]

    def forward(self, x: Tensor) -> Tensor:
        for i, (weight, bias) in enumerate(self.layers):
            x = F.linear(F.gelu(x, approximate="tanh") if i else x, weight, bias)
        return x


class Stk(nn.Module):
    """Products of MegaBlocks' stk with the transposed weights of dense layers."""

    def __init__(self, dense: nn.Module, block: int):
        super().__init__()
        if block != 128:  # others give wrong results, or end the process
            raise ValueError(f"stk has kernels for blocks of 128, not {block}")
        try:
            self.ops = importlib.import_module("stk.ops")
        except ImportError as error:
            raise ValueError(f"pip install stanford-stk ({error})") from None
        layers = [m for m in dense.modules() if isinstance(m, nn.Linear)]
        turned = [self.ops.to_sparse(m.weight.detach().T.contiguous(), block) for m in layers]
        self.weights = nn.ModuleList(
            type(w)(w.size(), nn.Parameter(w.data), w.row_indices, w.column_indices, w.offsets)
            for w in turned
        )
        self.biases = nn.ParameterList([m.bias for m in layers])

    def forward(self, x: Tensor) -> Tensor:
        for i, (weight, bias) in enumerate(zip(self.weights, self.biases, strict=True)):
            x = self.ops.dds(F.gelu(x, approximate="tanh") if i else x, weight) + bias
        return x


PROVIDERS: dict[str, Callable[[nn.Module, int], nn.Module]] = {
    "ours": lambda ours, block: ours,
    "dense": lambda ours, block: as_dense(ours),
    "bsr": lambda ours, block: Bsr(as_dense(ours), block),
    "stk": lambda ours, block: Stk(as_dense(ours), block),
}


def cases(run: Run) -> list[Found]:
    o = run.options
    choices(o, what=WHAT, providers=PROVIDERS, dtype=DTYPES)
    axes = {"size": o.sizes, "tokens": o.tokens, "block": o.blocks, "density": o.densities}
    found = grid(o, "what dtype", **axes)
    for case in found:
        case["dim"], case["hidden"] = pair("sizes", case.pop("size"))
    return found


def ways(case: Found, run: Run) -> list[Row]:
    """Return the directions of each provider; torch's BSR products have no gradients."""
    return [
        {"provider": name, "direction": direction}
        for name in run.options.providers
        for direction in (DIRECTIONS[:1] if name == "bsr" else DIRECTIONS)
    ]


def opened(case: Found, run: Run) -> Callable[[Row], dict[str, Any]]:
    torch.manual_seed(0)
    made: dict[str, Any] = {"device": run.device, "dtype": DTYPES[case.dtype]}
    rule = partial(masks.random_blocks, case.density, block=case.block)
    pair = (
        rule(seed=1).build(case.hidden, case.dim, block_size=case.block),
        rule(seed=2).build(case.dim, case.hidden, block_size=case.block),
    )
    model = BlockSparseMLP(case.dim, case.hidden, mask=pair, activation="gelu_tanh", **made)
    ours = WHAT[case.what](model)
    blocks = sum(m.mask.density for m in ours.modules() if isinstance(m, BlockSparseLinear))
    density = blocks / (2 if case.what == "mlp" else 1)
    x = torch.randn(case.tokens, case.hidden if case.what == "down" else case.dim, **made)
    x, dout = x.requires_grad_(), torch.randn_like(ours(x))
    exact = Step(as_dense(ours).double(), (x.detach().double().requires_grad_(),))
    wanted: Any = cache(lambda: (exact.forward(), *exact.both(dout.double())))

    @cache
    def prepared(name: str) -> tuple[Step, float]:
        module = PROVIDERS[name](ours, case.block)
        step = Step(module, (x,), (*module.parameters(),))
        found: Any = (step.forward(), *([] if name == "bsr" else step.both(dout)[:1]))
        error = max(relative_error(a, b) for a, b in zip(found, wanted(), strict=False))
        return step, checked(error, LIMIT[x.dtype])

    def one(row: Row) -> dict[str, Any]:
        step, error = prepared(row["provider"])
        times = step.time(row["direction"], run.device, run.options.seconds)
        return times | {"error": error, "computed": density}

    return one


def tables(frame: Any) -> dict[str, str]:
    """Return a table for each of up, down and mlp: cases down; milliseconds of each provider for
    each direction, how many times as fast as dense ours is, and the share.
    """
    rows, made = timed(frame, KEY, "device dtype"), {}
    for what, own in rows.groupby("what", sort=False):
        names = list(dict.fromkeys(own.provider))
        head = ["dim:hidden", "tokens", "block", "density", "direction", *names, "gain", "share"]
        lines = [head]
        cell = "dim hidden tokens block density direction".split()
        for key, same in own.groupby(cell, sort=False):
            dim, hidden, tokens, block, density, direction = key
            ms = same.groupby("provider").ms_median.median()
            line = [f"{dim}:{hidden}", f"{tokens:,}", str(block), f"{density:g}", direction]
            line += [short(ms[name]) if name in ms else MISSING for name in names]
            if "ours" in ms and "dense" in ms:
                gain = ms["dense"] / ms["ours"]
                line += [f"{gain:.2f}x", f"{gain * same.computed.iloc[-1]:.2f}"]
            lines.append(line + [MISSING] * (len(head) - len(line)))
        made[str(what)] = markdown(lines, left=(0, 4))
    return made
