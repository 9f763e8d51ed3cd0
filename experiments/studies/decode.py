"""Time and bandwidth of decoding: a few new queries against a long cache.

Ours, torch's SDPA by each of its kernels, and FlashInfer where it is installed. On a GPU the calls
are one CUDA graph over several caches, as layers of a model are, so that no cache is in the L2.
Rows hold the bytes that must be read, their bandwidth, and its share of that of a copy on the same
device in the same run. See docs/guide/decoding.md.
"""

import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache, cached_property, partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

import masks
import sparseflash
from experiments.bench import providers as bench
from experiments.bench.cases import DENSE, DTYPES, Case
from experiments.bench.gate import Gate
from experiments.bench.provider import Provider
from experiments.bench.step import Times, in_graph, measure
from experiments.common.devices import free_memory
from experiments.common.rows import Found, Row
from experiments.common.tables import markdown, pivot
from experiments.studies import runner
from experiments.studies.runner import Run, both, choices, grid, timed
from sparseflash.dynamic.lists import schedule_from_selection
from sparseflash.dynamic.selection import Selection

KEY = "provider step page batch heads kv_heads n_q n head_dim dtype round".split()
SELECTED = "top_blocks"  # each key head reads its best blocks, by the means of their keys
STREAMING = "streaming"  # sinks and a window
CHOOSING = "choose and decode"
BLOCK = 64  # tokens of a block of keys
COLD = 2**28  # bytes that the caches of a measurement hold together: several times the L2
MOST_CACHES = 16
COPIED = {"cuda": 2**30, "cpu": 2**26}  # bytes
Call = Callable[[], Tensor]


@dataclass(kw_only=True)
class Options(runner.Options):
    lengths: list[int] = both([2**i for i in range(12, 18)], [1024, 4096])  # keys of a sequence
    n_q: list[int] = both([1, 4, 16], [1, 16])  # new queries
    pages: list[int] = field(default_factory=lambda: [0, 16])  # tokens of one; 0: contiguous
    masks: list[str] = field(default_factory=lambda: [DENSE, STREAMING, SELECTED])
    chosen: int = both(4096, 512)  # tokens that STREAMING and SELECTED see
    providers: list[str] = both(
        ["triton", "sdpa_flash", "sdpa_cudnn", "flashinfer"], ["cpu", "sdpa"]
    )
    batch: int = 1
    heads: int = both(32, 8)
    kv_heads: int = both(8, 2)
    head_dim: int = both(128, 64)
    dtype: str = both("bfloat16", "float32")
    seconds: float = both(0.04, 0.1)


def case_of(step: Found) -> Case:
    """Return the sizes of a step."""
    sizes = step.batch, step.heads, step.kv_heads, step.n_q, step.n, step.head_dim, step.dtype
    return Case(DENSE, *sizes, BLOCK, BLOCK)


def selected(step: Found) -> int:
    """Return how many blocks a step chooses; 0 for one with a mask of its own."""
    return int(step.mask[len(SELECTED) + 1 : -1]) if step.mask.startswith(SELECTED) else 0


def read_bytes(step: Found, keys: float) -> float:
    """Return those of one call: that many keys of each key head with values, q and out."""
    itemsize, dim = DTYPES[step.dtype].itemsize, 2 * step.head_dim
    return step.batch * dim * itemsize * (step.kv_heads * keys + step.heads * step.n_q)


class Inputs:
    """q, and as many caches as it takes for none of them to stay in the L2; drawn on the device.

    Keys and values are (B, H_kv, N, D), or with pages (pages, page, H_kv, D). All caches share one
    block table, as the layers of a model do.
    """

    def __init__(self, step: Found, device: torch.device):
        self.step, self.device, self.table = step, device, None
        generator = torch.Generator(device).manual_seed(0)
        shape = (step.batch, step.kv_heads, step.n, step.head_dim)
        if step.page:
            pages = step.batch * step.n // step.page
            shape = (pages, step.page, step.kv_heads, step.head_dim)
            order = torch.randperm(pages, device=device, generator=generator)
            self.table = order.view(step.batch, -1).int()

        def drawn(*shape: int) -> Tensor:
            options = {"dtype": DTYPES[step.dtype], "generator": generator}
            return torch.randn(shape, device=device, **options)

        self.q = drawn(step.batch, step.heads, step.n_q, step.head_dim)
        self.lengths = torch.full((step.batch,), step.n, dtype=torch.int32, device=device)
        count = 1
        if device.type == "cuda":
            wanted = -(-COLD // int(read_bytes(step, self.keys)))
            fit = int(free_memory(device) / 2 / read_bytes(step, step.n))
            count = max(1, min(max(2, wanted), MOST_CACHES, fit))
        self.caches = [(drawn(*shape), drawn(*shape)) for _ in range(count)]

    @property
    def keys(self) -> float:
        """Keys that some query of the first sequence sees."""
        return selected(self.step) * BLOCK or int(self._rows.any(0).sum())

    @cached_property
    def _rows(self) -> np.ndarray:
        """Bool (n_q, n): the keys that the queries see by a static mask, or by none."""
        s = self.step
        sizes = s.heads, s.kv_heads, s.n, s.n, s.head_dim, s.dtype, BLOCK, BLOCK
        return Case(s.mask, 1, *sizes).allowed(0, 0, np.arange(s.n - s.n_q, s.n))

    @cached_property
    def gate(self) -> Gate:
        """The gate for the first cache."""
        return Gate(case_of(self.step), self.q, *self.dense(0), seen=self.allowed)

    def dense(self, which: int) -> tuple[Tensor, Tensor]:
        """Return keys and values (B, H_kv, N, D) of one of the caches."""
        if self.table is None:
            return self.caches[which]
        pages = self.table.long()
        k, v = (cache[pages].flatten(1, 2).transpose(1, 2) for cache in self.caches[which])
        return k, v

    @cached_property
    def summaries(self) -> list[Tensor]:
        """Of each cache, the mean of every block of keys: (B, H_kv, blocks, D).

        A decoder keeps them up to date, so that they are no part of the time.
        """
        count = range(len(self.caches))
        return [self.dense(which)[0].unflatten(2, (-1, BLOCK)).mean(3) for which in count]

    def choose(self, which: int) -> Selection:
        """Return the best blocks for each key head, in one of the caches."""
        step, summary, blocks = self.step, self.summaries[which], selected(self.step)
        asking = self.q.unflatten(1, (step.kv_heads, -1)).mean((2, 3)).unsqueeze(2)
        scores = asking @ summary.mT  # (B, H_kv, 1, blocks)
        layout = torch.zeros_like(scores, dtype=torch.bool)
        layout.scatter_(-1, scores.topk(blocks).indices, True)
        sizes = {"n_q": step.n_q, "n_k": step.n}
        sizes["max_blocks"] = step.batch * step.kv_heads * blocks
        return Selection.from_layout(layout, (-(-step.n_q // 16) * 16, BLOCK), **sizes)

    def allowed(self, b: int, head: int, rows: np.ndarray) -> np.ndarray:
        """Return bool (rows, n): what queries of a head see in the first cache."""
        step = self.step
        if not selected(step):
            return self._rows[rows]
        codes = self.choose(0).codes[b, head * step.kv_heads // step.heads]  # (1, blocks)
        taken = (codes == -1).cpu().numpy().repeat(BLOCK, 1)
        return np.broadcast_to(taken, (len(rows), step.n))


class Ours(Provider):
    """`sparseflash.decode`; the label is the backend."""

    own = True

    def calls(self, inputs: Inputs, choosing: bool) -> list[Call]:
        """Return a call for every cache, which with `choosing` chooses its blocks itself."""
        step = inputs.step
        extents = step.n_q, step.n, step.batch, step.kv_heads, inputs.device

        def call(i: int, made: Any) -> Tensor:
            return sparseflash.decode(
                inputs.q, *inputs.caches[i], inputs.choose(i) if choosing else made,
                lengths=inputs.lengths, block_table=inputs.table, backend=self.label,
            )  # fmt: skip

        which: Any = range(len(inputs.caches))
        if selected(step):
            made = [schedule_from_selection(inputs.choose(i), *extents) for i in which]
        else:
            made = [None if step.mask == DENSE else masks.parse(step.mask)] * len(which)
        return [partial(call, i, made[i]) for i in which]


@dataclass(frozen=True)
class Sdpa(bench.Sdpa):
    """torch's scaled_dot_product_attention over a contiguous cache, by the kernel named."""

    def concerns(self, case: Found) -> bool:
        return case.mask == DENSE and not case.page

    def calls(self, inputs: Inputs, choosing: bool) -> list[Call]:
        call = self.prepare(inputs.step, inputs.device)  # type: ignore[arg-type]
        return [partial(call, inputs.q, *cache) for cache in inputs.caches]


class FlashInfer(Provider):
    """FlashInfer over a cache in pages, where it is installed."""

    package, install = "flashinfer-python", "pip install flashinfer-python"
    modules = ("flashinfer",)

    def concerns(self, case: Found) -> bool:
        return case.mask == DENSE and case.page > 0

    def unsupported(self, case: Found, device: torch.device, direction: str) -> str | None:
        needs = f"needs a CUDA device, not {device}"
        return self.missing() if device.type == "cuda" else needs

    def calls(self, inputs: Inputs, choosing: bool) -> list[Call]:
        flashinfer, step, q = importlib.import_module("flashinfer"), inputs.step, inputs.q
        assert inputs.table is not None
        pages = inputs.table.shape[1]
        start = torch.arange(step.batch + 1, dtype=torch.int32, device=q.device)
        last = torch.full((step.batch,), step.page, dtype=torch.int32, device=q.device)
        shared = torch.empty(2**27, dtype=torch.uint8, device=q.device)
        paging = start * pages, inputs.table.flatten(), last
        sizes = step.heads, step.kv_heads, step.head_dim, step.page
        if step.n_q == 1:
            wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(
                shared, "NHD", use_tensor_cores=True
            )
            wrapper.plan(*paging, *sizes, q_data_type=q.dtype)
        else:
            wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(shared, "NHD")
            wrapper.plan(start * step.n_q, *paging, *sizes, causal=False, q_data_type=q.dtype)
        tokens = q.transpose(1, 2).flatten(0, 1).contiguous()  # (B * n_q, H, D)
        turned = lambda out: out.unflatten(0, (step.batch, -1)).transpose(1, 2)  # noqa: E731
        return [lambda cache=cache: turned(wrapper.run(tokens, cache)) for cache in inputs.caches]


PROVIDERS: dict[str, Any] = {
    **{name: Ours(name) for name in ("triton", "cpu")},
    **{
        name: Sdpa(name, kernel=bench.PROVIDERS[name].kernel)  # type: ignore[attr-defined]
        for name in ("sdpa", "sdpa_flash", "sdpa_cudnn")
    },
    "flashinfer": FlashInfer("FlashInfer"),
}


def cases(run: Run) -> list[Found]:
    """Return the steps of the options, short caches first."""
    o = run.options
    choices(o, providers=PROVIDERS, dtype=DTYPES)
    same = "batch heads kv_heads head_dim dtype"
    found = grid(o, same, n=sorted(o.lengths), mask=o.masks, n_q=o.n_q, page=o.pages)
    for step in found:
        case_of(step).check()
        for unit in (BLOCK, step.page):
            if unit and step.n % unit:
                raise ValueError(f"lengths={step.n}: give multiples of {unit}, a block or a page")
        if step.n_q > step.n:
            raise ValueError(f"n_q={step.n_q}: give at most {step.n}, the keys")
        if step.mask == SELECTED:
            step["mask"] = f"{SELECTED}({min(o.chosen, step.n) // BLOCK})"
        elif step.mask == STREAMING:
            step["mask"] = f"sliding({o.chosen}) | global_tokens(64) & causal()"
        elif step.mask != DENSE:
            masks.parse(step.mask)
    return found


def ways(step: Found, run: Run) -> list[Row]:
    what = ("decode", CHOOSING) if selected(step) else ("decode",)
    names = [name for name in run.options.providers if PROVIDERS[name].concerns(step)]
    return [
        {"provider": name, **PROVIDERS[name].version(), "step": each}
        for name in names
        for each in what
    ]


@torch.no_grad()
def opened(step: Found, run: Run) -> Callable[[Row], dict[str, Any]]:
    inputs, device = Inputs(step, run.device), run.device

    @torch.no_grad()
    def one(row: Row) -> dict[str, Any]:
        provider = PROVIDERS[row["provider"]]
        if reason := provider.unsupported(step, device, "forward"):
            raise ValueError(reason)
        calls = provider.calls(inputs, row["step"] == CHOOSING)
        error = inputs.gate.passed(inputs.gate.forward_error(calls[0]()))
        times, read = time_of(calls, device, run.options.seconds), read_bytes(step, inputs.keys)
        gbs, copied = read / times.ms_median / 1e6, copy_gbs(str(device))
        numbers = {"density": inputs.keys / step.n, "caches": len(inputs.caches), "error": error}
        numbers |= {"read_mb": read / 1e6, "gbs": gbs, "copy_gbs": copied, "share": gbs / copied}
        return times._asdict() | numbers

    return one


def time_of(calls: Sequence[Call], device: torch.device, seconds: float) -> Times:
    """Return milliseconds of a call, all of them in turn; on a GPU they are one CUDA graph.

    Raise ValueError for calls that wait for the GPU.
    """

    def every() -> None:
        for call in calls:
            call()

    run = in_graph(every, device) if device.type == "cuda" else every
    if run is None:
        raise ValueError("it waits for the GPU, so that no CUDA graph can hold it")
    median, p20, p80, _ = measure(run, device, seconds)
    return Times(median / len(calls), p20 / len(calls), p80 / len(calls))


@cache
def copy_gbs(device: str) -> float:
    """Return 1e9 bytes a second of a large copy, read and written; once in a process."""
    where = torch.device(device)
    x = torch.ones(COPIED[where.type], dtype=torch.uint8, device=where)
    times = measure(partial(torch.empty_like(x).copy_, x), where, 0.2)
    return 2 * len(x) / times.ms_median / 1e6


def tables(frame: Any) -> dict[str, str]:
    """Return tables by mask: keys and queries down, providers across; sizes are the last row's.

    A cell has the median time of the rounds in microseconds, and the share of a copy's bandwidth.
    """
    rows = timed(frame, KEY, "batch heads kv_heads head_dim dtype device")
    across = [
        f"`{name}`{'' if step == 'decode' else ', choosing'}{f', pages of {page}' if page else ''}"
        for name, step, page in zip(rows.provider, rows.step, rows.page, strict=True)
    ]
    rows = rows.assign(across=across, kind=rows["mask"].str.split("(").str[0])
    rows = rows.sort_values(["n", "n_q"], kind="stable")
    found: dict[str, str] = {}
    for kind, own in rows.groupby("kind", sort=False):
        # the newest number of chosen blocks
        own = own[own["mask"] == own.groupby(["n", "across"])["mask"].transform("last")]
        table = pivot(own, ["n", "n_q"], "across", _cell)
        found[str(kind)] = markdown(table.rename(columns={"n": "keys", "n_q": "new queries"}), ())
    return found


def _cell(rows: Any) -> str:
    return f"{1000 * rows.ms_median.median():.1f} ({100 * rows.share.median():.0f} %)"
