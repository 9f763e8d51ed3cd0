"""Time of attention where every query picks key blocks for itself, beside the same of others.

`picks` gives `sparseflash.attention` the lists, `selection` the same pairs as blocks with bits,
planned beforehand, and `causal` no selection at all. `fla` is the selected branch of NSA in
flash-linear-attention, `cudnn` that of cuDNN Frontend, where they are installed. Choosing the
blocks is not part of the time; what a kernel does with their lists is. See docs/guide/selectors.md.
"""

import importlib
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

import masks
import sparseflash
from experiments.bench.cases import CAUSAL, DTYPES, LAYOUTS, Case
from experiments.bench.gate import Gate
from experiments.bench.peers.cudnn import INSTALL, PACKAGE
from experiments.bench.provider import Provider, not_hopper
from experiments.bench.step import Attend, Step, draw
from experiments.common.rows import Found, Row
from experiments.common.tables import markdown, pivot
from experiments.studies import runner
from experiments.studies.runner import Run, both, choices, grid, timed
from sparseflash import select
from sparseflash.select.tokens import TokenSelector

KEY = "provider direction batch heads kv_heads n head_dim dtype round".split()


@dataclass(kw_only=True)
class Options(runner.Options):
    lengths: list[int] = both([8192, 32768], [512])  # tokens
    selectors: list[str] = both(
        ["nsa(16, 64)", "moba(256, 4)"], ["nsa(4, 32)", "moba(128, 2)"]
    )  # nsa(BLOCKS, SIZE), moba(CHUNK, BLOCKS)
    providers: list[str] = both(
        ["picks", "selection", "causal", "fla", "cudnn"], ["picks", "causal"]
    )
    batch: int = 1
    heads: int | None = None  # null: with nsa 64 on a GPU and 4 on a CPU, else 16 and 2
    kv_heads: int | None = None  # null: heads; if null too, with nsa 4 on a GPU and 1 on a CPU
    head_dim: int = both(128, 32)
    dtype: str = both("bfloat16", "float32")


HEADS = {"cuda": {True: (64, 4), False: (16, 16)}, "cpu": {True: (4, 1), False: (2, 2)}}  # NSA


def rule(text: str) -> TokenSelector:
    """Return the selector of a text. Raise ValueError for one whose queries do not pick."""
    if not (found := re.fullmatch(r"(nsa|moba)\((\d+), (\d+)\)", text)):
        raise ValueError(f"selectors: {text} has no picks; give moba or nsa with two numbers")
    return getattr(select, found[1])(int(found[2]), int(found[3]))


def causal(shape: Found) -> Case:
    """Return causal attention at the sizes of a row, in memory as (B, N, H, D)."""
    sizes = shape.batch, shape.heads, shape.kv_heads, shape.n, shape.n, shape.head_dim, shape.dtype
    return Case(CAUSAL, *sizes, 128, 128, layout=LAYOUTS[1])


class Inputs:
    """q, k and v, and what the selector picks of them.

    They are standard normal, so picks are scattered as widely as they can be: the union over a
    query block is denser than in a trained model.
    """

    def __init__(self, shape: Found, device: torch.device):
        self.shape, self.device, self.causal = shape, device, causal(shape)
        self.qkv = draw(self.causal, device)
        with torch.no_grad():
            self.picks = rule(shape.mask).picks(*self.qkv[:2])

    def seen(self, batch: int, head: int, rows: np.ndarray) -> np.ndarray:
        """Return bool (rows, n): the keys that these queries picked."""
        picks, n, at = self.picks, self.shape.n, torch.from_numpy(rows).to(self.device)
        of_head = picks.blocks[batch % len(picks.blocks)][head * picks.heads // self.shape.heads]
        count = -(-n // picks.block)
        taken = np.zeros((len(rows), count + 1), bool)
        np.put_along_axis(taken, of_head[at].cpu().numpy().clip(max=count), True, axis=1)
        found = taken[:, :count].repeat(picks.block, axis=1)[:, :n]
        return found & (np.arange(n) <= rows[:, None])

    @cached_property
    def share(self) -> float:
        """Allowed (query, key) pairs over all of them."""
        first = self.picks.blocks.long() * self.picks.block
        query = torch.arange(self.shape.n, device=self.device)[:, None]
        seen = (query + 1 - first).clamp(0, self.picks.block)
        return seen.sum().item() / (first.shape[0] * first.shape[1] * self.shape.n**2)

    def other_heads(self) -> str | None:
        """Return why peers refuse lists that are not of each key head."""
        has, wanted = self.picks.heads, self.shape.kv_heads
        return None if has == wanted else f"takes a list for each key head, not {has} for {wanted}"

    def token_major(self) -> tuple[Tensor, Tensor]:
        """Return int32 (B, N, H, k) blocks, 0 where a query has none, and (B, N, H), how many."""
        blocks = self.picks.blocks.expand(self.shape.batch, -1, -1, -1).transpose(1, 2)
        real = blocks != self.picks.none
        return torch.where(real, blocks, 0).contiguous(), real.sum(-1, dtype=torch.int32)


class SparseFlash(Provider):
    """`sparseflash.attention` of picks, of a planned selection, or of all that is causal."""

    own = True

    def prepare(self, case: Inputs, device: torch.device) -> Attend:
        mask: Any = case.picks if self.label == "picks" else masks.causal()
        if self.label == "selection":
            mask = sparseflash.plan(case.picks.selection(case.shape.heads), *case.qkv)
        return lambda q, k, v: sparseflash.attention(q, k, v, mask)


class Fla(Provider):
    """The selected branch of NSA in flash-linear-attention, without its other branches."""

    package, install = "fla-core", "pip install fla-core==0.6.0"
    modules = ("fla.ops.nsa.parallel",)

    def unsupported(self, case: Inputs, device: torch.device, direction: str) -> str | None:
        if device.type != "cuda":
            return f"needs a CUDA device, not {device}"
        picks, group = case.picks, case.shape.heads // case.shape.kv_heads
        if reason := case.other_heads():
            return reason
        if group < 16 or group & (group - 1):
            return f"takes groups of 16, 32, .. query heads, not of {group}"
        if (count := picks.blocks.shape[3]) & (count - 1):
            return f"takes 1, 2, 4, .. blocks for each query, not {count}"
        return self.missing()

    def prepare(self, case: Inputs, device: torch.device) -> Attend:
        function = importlib.import_module("fla.ops.nsa.parallel").ParallelNSAFunction
        blocks, counts = case.token_major()
        lists = blocks.long(), counts.long(), case.picks.block

        def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            turned = (t.transpose(1, 2) for t in (q, k, v))
            return function.apply(*turned, *lists, q.shape[-1] ** -0.5, None).transpose(1, 2)

        return run


class Cudnn(Provider):
    """The selected branch of NSA in cuDNN Frontend, which has no backward."""

    package, install, modules = PACKAGE, INSTALL, ("cudnn.native_sparse_attention",)
    directions = ("forward",)  # pyright: ignore[reportAssignmentType]

    def unsupported(self, case: Inputs, device: torch.device, direction: str) -> str | None:
        shape, picks = case.shape, case.picks
        if reason := not_hopper(case.causal, device, ("bfloat16", "float16")):
            return reason
        if reason := case.other_heads():
            return reason
        if shape.heads > 16 * shape.kv_heads:
            return f"takes groups of up to 16 query heads, not {shape.heads // shape.kv_heads}"
        if picks.block not in (16, 32, 64, 128):
            return f"takes blocks of 16, 32, 64 and 128, not {picks.block}"
        return self.missing()

    def prepare(self, case: Inputs, device: torch.device) -> Attend:
        call = importlib.import_module("cudnn.native_sparse_attention").NSA
        n, batch = case.shape.n, case.shape.batch
        blocks, counts = (t.flatten(0, 1) for t in case.token_major())
        ends = torch.arange(0, batch * n + 1, n, dtype=torch.int32, device=device)
        sizes = {"block_size": case.picks.block, "max_s_q": n, "max_s_k": n, "is_causal": True}

        def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            flat = (t.transpose(1, 2).flatten(0, 1) for t in (q, k, v))
            found = call.selection_attention_wrapper(*flat, blocks, counts, ends, ends, **sizes)
            return found[0].unflatten(0, (batch, n)).transpose(1, 2)

        return run


PROVIDERS: dict[str, Provider] = {
    **{name: SparseFlash(name) for name in ("picks", "selection", "causal")},
    "fla": Fla("fla"),
    "cudnn": Cudnn("cudnn"),
}


def cases(run: Run) -> list[Found]:
    o = run.options
    choices(o, providers=PROVIDERS, dtype=DTYPES)
    found = grid(o, "batch head_dim dtype", n=sorted(o.lengths), mask=o.selectors)
    for shape in found:
        heads, kv_heads = HEADS[run.device.type][shape.mask.startswith("nsa")]
        if o.heads is not None:
            heads = kv_heads = o.heads
        shape |= {"heads": heads, "kv_heads": kv_heads if o.kv_heads is None else o.kv_heads}
        causal(shape).check()
        rule(shape.mask)
    return found


def ways(shape: Found, run: Run) -> list[Row]:
    return [
        {"provider": name, **PROVIDERS[name].version(), "direction": direction}
        for name in run.options.providers
        for direction in PROVIDERS[name].directions
    ]


def opened(shape: Found, run: Run) -> Callable[[Row], dict[str, Any]]:
    inputs = Inputs(shape, run.device)

    @cache
    def prepared(name: str) -> tuple[Step, float]:
        provider = PROVIDERS[name]
        if reason := provider.unsupported(inputs, run.device, ""):
            raise ValueError(reason)
        step = Step(provider.prepare(inputs, run.device), inputs.qkv)
        seen = None if name == "causal" else inputs.seen
        gate = Gate(inputs.causal, *inputs.qkv, seen=seen)
        return step, step.error(gate, provider.directions)

    def one(row: Row) -> dict[str, Any]:
        step, error = prepared(row["provider"])
        share = inputs.causal.elements if row["provider"] == "causal" else inputs.share
        times = step.time(row["direction"], run.device, run.options.seconds)
        products = 5 if row["direction"] == "backward" else 2
        pairs = share * shape.batch * shape.heads * shape.n**2
        tflops = 2e-9 * products * shape.head_dim * pairs / times["ms_median"]
        return times | {"error": error, "share": share, "tflops": tflops}

    return one


def tables(frame: Any) -> dict[str, str]:
    """Return shapes down and providers across: ms / TFLOP/s of the pairs that are allowed, medians
    of the rounds, on the device and in the dtype of the last row.
    """
    rows = timed(frame, KEY, "device dtype batch")
    rows = rows.assign(sizes=[f"{h}/{g}" for h, g in zip(rows.heads, rows.kv_heads, strict=True)])
    cell = lambda g: f"{g.ms_median.median():.3f} / {g.tflops.fillna(0).median():.0f}"  # noqa: E731
    down = {"mask": "selector", "sizes": "heads", "n": "N", "head_dim": "D"}
    down |= {"direction": "direction"}
    table = pivot(rows, [*down], "provider", cell).rename(columns=down)
    return {"picks": markdown(table, left=(0, 1, 4))}
