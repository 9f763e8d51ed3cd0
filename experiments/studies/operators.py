"""FLOPs and time of a training step by class of operator, with standard attention and with ours.

GPT-2 and BERT-large, forward, backward and AdamW, by torch's profiler. The model is not compiled,
as torch.compile joins operators of different classes. See docs/results/papers.md.
"""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile
from torch.utils import flop_counter
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import masks
from experiments.bench.cases import DTYPES
from experiments.bench.gate import LIMIT, checked
from experiments.bench.step import measure
from experiments.common.rows import OK, Found, Row
from experiments.common.tables import MISSING, markdown, short
from experiments.lm.model import LanguageModel, Sizes
from experiments.lm.settings import MODELS
from experiments.studies import runner
from experiments.studies.runner import Run, both, choices, grid, latest
from experiments.training.device import autocast
from masks import Mask
from sparseflash.testing import relative_error

KEY = "model attention batch n layers dtype dropout".split()
ATTENTIONS = {"standard": "standard", "sparse": "ours"}
PRODUCTS, FUSED, SUMS = "matrix products", "attention in one kernel", "softmax, norms, sums"
ELEMENTWISE, ADAMW, COPIES = "elementwise", "AdamW", "copies, lookups, the rest"
CLASSES = PRODUCTS, FUSED, SUMS, ELEMENTWISE, ADAMW, COPIES
# operations of an element: maximum, difference, exponential, sum and quotient of a softmax
EACH = {SUMS: 5, ELEMENTWISE: 1, ADAMW: 14, COPIES: 0}
# Ivanov et al., arXiv 2007.00072, Table 1: % of the FLOPs and of the time of a BERT-large encoder
# layer, forward and backward, in PyTorch on a V100
PUBLISHED = {PRODUCTS: (99.80, 61.0), SUMS: (0.17, 25.5), ELEMENTWISE: (0.03, 13.5)}
NAMES = {
    PRODUCTS: "mm addmm bmm baddbmm addbmm",
    SUMS: "sum mean _softmax _softmax_backward_data _log_softmax _log_softmax_backward_data"
    " native_layer_norm native_layer_norm_backward nll_loss_forward nll_loss_backward",
    ELEMENTWISE: "native_dropout native_dropout_backward bernoulli_",
    ADAMW: "_fused_adamw_",
}
KNOWN = {name: kind for kind, names in NAMES.items() for name in names.split()}


@dataclass(frozen=True)
class Model:
    """Sizes of a model, its tokens and mask, and at how many places it predicts a token."""

    sizes: Sizes
    n: int
    mask: Mask | None
    places: int | None  # None: all


CASES = {
    "gpt2": Model(MODELS["gpt2"], 1024, masks.causal(), None),
    # predicts up to 76 hidden tokens of 512, as in MLPerf; norms come first, as in GPT-2
    "bert-large": Model(Sizes(24, 1024, 16, 30_522), 512, None, 76),
    "tiny": Model(Sizes(1, 32, 2, 100), 64, masks.causal(), None),
}


@dataclass(kw_only=True)
class Options(runner.Options):
    models: list[str] = field(default_factory=lambda: ["gpt2", "bert-large"])
    batch: int = both(16, 1)
    n: int | None = both(None, 128)  # tokens; null: 1,024 of GPT-2, 512 of BERT
    layers: int | None = both(None, 2)  # null: those of the model
    dtype: str = both("bfloat16", "float32")  # of autocast
    dropout: float = 0.1
    steps: int = both(3, 2)  # that are profiled, of which the fastest counts
    seconds: float = both(1.0, 0.2)


def cases(run: Run) -> list[Found]:
    o = run.options
    choices(o, models=CASES, dtype=DTYPES)
    same = "layers batch dtype dropout"
    return [
        Found({**case, "n": o.n or own.n, "mask": "" if own.mask is None else str(own.mask)})
        for case in grid(o, same, model=o.models, attention=[*ATTENTIONS])
        for own in [CASES[case.model]]
    ]


def opened(case: Found, run: Run) -> Callable[[Row], dict[str, Any]]:
    def one(row: Row) -> dict[str, Any]:
        error = check(case, run.device)
        step = training_step(case, run.device)
        step()  # compiles kernels, builds masks, makes the state of AdamW
        with Operations() as counted:
            step()
        gflop = {kind: counted.flops[kind] / 1e9 for kind in CLASSES}
        seen = [profiled_ms(step, run.device) for _ in range(run.options.steps)]
        ms = min(seen, key=lambda each: sum(each.values()))
        times = measure(step, run.device, run.options.seconds)._asdict()
        return {"error": error, "gflop": gflop, "class_ms": ms, **times}

    return one


def make_model(case: Found, device: torch.device) -> LanguageModel:
    """Return a model with the same weights for both attentions."""
    known = CASES[case.model]
    sizes = replace(known.sizes, layers=case.layers or known.sizes.layers)
    torch.manual_seed(0)
    options: Any = {"mask": known.mask, "dropout": case.dropout}
    with device:
        return LanguageModel(sizes, sizes.vocab, case.n, case.attention, **options)


def loss_of(model: nn.Module, case: Found, device: torch.device) -> Callable[[], Tensor]:
    """Return a function that gives the mean cross-entropy of random tokens."""
    known, shape = CASES[case.model], (case.batch, case.n)
    draw = torch.Generator(device).manual_seed(0)
    options = {"device": device, "generator": draw}
    tokens = torch.randint(known.sizes.vocab, shape, **options)
    places, targets = None, tokens.roll(-1, 1)
    if known.places is not None:
        places = torch.rand(shape, **options).argsort(1)[:, : known.places]
        targets = tokens.gather(1, places)

    def loss() -> Tensor:
        with autocast(device, DTYPES[case.dtype]):
            return model(tokens, targets, places).mean()

    return loss


def training_step(case: Found, device: torch.device) -> Callable[[], None]:
    model = make_model(case, device)
    loss, adamw = loss_of(model, case, device), torch.optim.AdamW(model.parameters(), fused=True)

    def step() -> None:
        loss().backward()
        adamw.step()
        adamw.zero_grad()

    return step


def check(case: Found, device: torch.device) -> float:
    """Return the relative error of a position gradient of one layer against standard attention in
    float32. Raises WrongResult where it is more than twice as large as autocast's own, or LIMIT.
    """
    small = Found({**case, "batch": 1, "layers": 1, "dropout": 0.0})
    exact = {"attention": "standard", "dtype": "float32"}

    def gradient(**changed: Any) -> Tensor:
        own = Found({**small, **changed})
        model = make_model(own, device)
        loss_of(model, own, device)().backward()
        grad = model.positions.weight.grad if model.positions is not None else None
        assert grad is not None
        return grad

    expected = gradient(**exact).double()
    limit = max(LIMIT[torch.float32], 2 * relative_error(gradient(attention="standard"), expected))
    return checked(relative_error(gradient(), expected), limit)


# ---- classes of operators


def class_of(name: str) -> str:
    """Return the class of an operator by its name, such as aten::mul."""
    if "_Attention" in name or "sparseflash" in name:
        return FUSED
    name = name.rpartition("::")[2]
    packet = getattr(torch.ops.aten, name, None)
    if name in KNOWN or packet is None:
        return KNOWN.get(name, COPIES)
    pointwise = any(torch.Tag.pointwise in getattr(packet, o).tags for o in packet.overloads())
    return ELEMENTWISE if pointwise and name != "clone" else COPIES


class Operations(TorchDispatchMode):
    """Counts operations by class: those of products, and else `EACH` for an element."""

    def __init__(self) -> None:
        super().__init__()
        self.flops: Counter[str] = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[override]
        out = func(*args, **(kwargs or {}))
        packet = func._overloadpacket
        kind = class_of(str(packet).replace(".", "::"))
        if kind in EACH:
            given = args[0] if kind == ADAMW else [args, out]
            sizes = [t.numel() for t in tree_leaves(given) if isinstance(t, Tensor)]
            count = sum(sizes) if kind == ADAMW else max(sizes, default=0)
            self.flops[kind] += EACH[kind] * count
        else:
            formula: Any = flop_counter.flop_registry[packet]
            self.flops[kind] += formula(*args, **(kwargs or {}), out_val=out)
        return out


def profiled_ms(step: Callable[[], None], device: torch.device) -> dict[str, float]:
    """Return ms of a step by class: of the kernels on a GPU, else of the operators themselves.

    What runs inside of our attention belongs to it.
    """
    gpu = device.type == "cuda"
    kinds = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if gpu else [])]
    with profile(activities=kinds) as seen:
        step()
        if gpu:
            torch.cuda.synchronize(device)
    us: Counter[str] = Counter()
    events: Any = seen.events()
    for event in events:
        if event.device_type.name == "CPU":
            kind, above = class_of(event.name), event
            while above is not None and kind != FUSED:
                kind = FUSED if class_of(above.name) == FUSED else kind
                above = above.cpu_parent
            us[kind] += event.self_device_time_total if gpu else event.self_cpu_time_total
    return {kind: us[kind] / 1000 for kind in CLASSES}


def tables(frame: Any) -> dict[str, str]:
    """Return a table of each model: the last rows of both attentions, in shares and ms."""
    rows = latest(frame, "device batch layers dtype dropout", ("model", "attention"))
    made = {}
    for model in dict.fromkeys(row.model for row in rows):
        own = {ATTENTIONS[r.attention]: r for r in rows if r.model == model and r.status == OK}
        heads = [f"{name}, {what}" for name in own for what in ("FLOPs %", "time %", "ms")]
        lines = [["class", "published FLOPs %", "published time %", *heads]]
        for kind in CLASSES:
            cells = [f"{x:g}" for x in PUBLISHED.get(kind, ())] or [MISSING] * 2
            for row in own.values():
                flops, ms = (100 * x[kind] / sum(x.values()) for x in (row.gflop, row.class_ms))
                cells += [f"{flops:.2f}", f"{ms:.1f}", short(row.class_ms[kind])]
            lines.append([kind, *cells])
        totals = [x for r in own.values() for x in (MISSING, MISSING, short(r.ms_median))]
        made[model] = markdown([*lines, ["step, not profiled", MISSING, MISSING, *totals]])
    return made
