"""Time and bandwidth of decoding: a few new queries against a long cache.

Ours, torch's SDPA by each of its kernels, and FlashInfer where it is installed. On a GPU the calls
are one CUDA graph over several caches, as layers of a model are, so that no cache is in the L2.
Rows hold the bytes that must be read, their bandwidth, and its share of that of a copy on the same
device in the same run. See docs/guide/decoding.md.
"""

import importlib
import warnings
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field
from functools import cache, cached_property, partial
from itertools import product
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

import masks
import sparseflash
from experiments.bench import cases as bench
from experiments.bench.cases import DENSE, DTYPES
from experiments.bench.gate import LIMIT
from experiments.bench.provider import Provider
from experiments.bench.timing import Times, in_graph, measure
from experiments.common.devices import free_memory
from experiments.common.rows import OK, Row, last_versions
from experiments.common.tables import markdown, pivot
from experiments.studies import runner
from experiments.studies.runner import Run, choices
from sparseflash.dynamic.lists import schedule_from_selection
from sparseflash.dynamic.selection import Selection
from sparseflash.schedule.blocks import Schedule
from sparseflash.testing import oracle, relative_error

KEY = "provider step page batch heads kv_heads n_q n head_dim dtype round".split()
SELECTED = "top_blocks"  # each key head reads its best blocks, by the means of their keys
STREAMING = "sliding({}) | global_tokens(64) & causal()"
CHOOSING = "choose and decode"
BLOCK = 64  # tokens of a block of keys
COLD = 2**28  # bytes that the caches of a measurement hold together: several times the L2
MOST_CACHES = 16
COPIED = {"cuda": 2**30, "cpu": 2**26}  # bytes
Call = Callable[[], Tensor]


@dataclass(kw_only=True)
class Options(runner.Options):
    name: str = "decode"
    lengths: list[int]  # keys of a sequence
    n_q: list[int]  # new queries
    pages: list[int] = field(default_factory=lambda: [0, 16])  # tokens of one; 0: contiguous
    masks: list[str] = field(default_factory=list)  # dense, texts, top_blocks; none: one of each
    chosen: int  # tokens that the window and top_blocks see
    providers: list[str]
    batch: int = 1
    heads: int
    kv_heads: int
    head_dim: int
    dtype: str


DEFAULTS = {
    "cuda": Options(
        lengths=[2**i for i in range(12, 18)], n_q=[1, 4, 16], chosen=4096, heads=32, kv_heads=8,
        head_dim=128, dtype="bfloat16", seconds=0.04,
        providers=[
            "triton", "sdpa_flash", "sdpa_cudnn", "sdpa_efficient", "sdpa_math", "flashinfer"
        ],
    ),
    "cpu": Options(
        lengths=[1024, 4096], n_q=[1, 16], chosen=512, heads=8, kv_heads=2, head_dim=64,
        dtype="float32", providers=["cpu", "sdpa"],
    ),
}  # fmt: skip


@dataclass(frozen=True)
class Step:
    """One decoding step. mask: "dense", the text of a mask, or "top_blocks".

    page: tokens of a page, 0 for a contiguous cache. chosen: tokens that top_blocks reads.
    """

    mask: str
    page: int
    batch: int
    heads: int
    kv_heads: int
    n_q: int
    n: int
    head_dim: int
    dtype: str
    chosen: int

    def check(self) -> None:
        """Raise ValueError for values that no step can have."""
        if self.heads % self.kv_heads:
            heads = f"heads={self.heads} is not a multiple of kv_heads={self.kv_heads}"
            raise ValueError(f"{heads}: change one of them")
        for unit in (BLOCK, self.page):
            if unit and self.n % unit:
                raise ValueError(f"lengths={self.n}: give multiples of {unit}, a block or a page")
        if not 0 < self.n_q <= self.n:
            raise ValueError(f"n_q={self.n_q}: give from 1 to {self.n}, the keys")
        if self.mask not in (DENSE, SELECTED):
            masks.parse(self.mask)

    def row(self) -> Row:
        mask = f"{SELECTED}({self.blocks})" if self.mask == SELECTED else self.mask
        return {k: v for k, v in asdict(self).items() if k != "chosen"} | {"mask": mask}

    @property
    def blocks(self) -> int:
        """Blocks that top_blocks takes."""
        return min(self.chosen, self.n) // BLOCK

    @cached_property
    def own_rows(self) -> np.ndarray:
        """Bool (n_q, n): the keys that the queries see by a static mask, or by none."""
        shape = self.batch, self.heads, self.kv_heads, self.n, self.n, self.head_dim, self.dtype
        case = bench.Case(self.mask, *shape, BLOCK, BLOCK)
        return case.allowed(0, 0, np.arange(self.n - self.n_q, self.n))

    def read_bytes(self, keys: float) -> float:
        """Return those of one call: that many keys of each key head with values, q and out."""
        itemsize, dim = DTYPES[self.dtype].itemsize, 2 * self.head_dim
        return self.batch * dim * itemsize * (self.kv_heads * keys + self.heads * self.n_q)


class Inputs:
    """q, and as many caches as it takes for none of them to stay in the L2; drawn on the device.

    Keys and values are (B, H_kv, N, D), or with pages (pages, page, H_kv, D). All caches share one
    block table, as the layers of a model do.
    """

    def __init__(self, step: Step, device: torch.device):
        self.step, self.device = step, device
        self._generator = torch.Generator(device).manual_seed(0)
        self.q = self._draw(step.batch, step.heads, step.n_q, step.head_dim)
        shape = (step.batch, step.kv_heads, step.n, step.head_dim)
        self.table = None
        if step.page:
            pages = step.batch * step.n // step.page
            shape = (pages, step.page, step.kv_heads, step.head_dim)
            order = torch.randperm(pages, device=device, generator=self._generator)
            self.table = order.view(step.batch, -1).int()
        self.lengths = torch.full((step.batch,), step.n, dtype=torch.int32, device=device)
        self.caches = [(self._draw(*shape), self._draw(*shape)) for _ in range(self._count())]

    def _draw(self, *shape: int) -> Tensor:
        options = {"dtype": DTYPES[self.step.dtype], "generator": self._generator}
        return torch.randn(shape, device=self.device, **options)

    def _count(self) -> int:
        if self.device.type != "cuda":
            return 1
        whole = self.step.read_bytes(self.step.n)
        wanted = -(-COLD // int(self.step.read_bytes(self.keys)))
        return max(1, min(max(2, wanted), MOST_CACHES, int(free_memory(self.device) / 2 / whole)))

    @property
    def keys(self) -> float:
        """Keys that some query of the first sequence sees."""
        step = self.step
        return step.blocks * BLOCK if step.mask == SELECTED else int(step.own_rows.any(0).sum())

    def keys_of(self, which: int, b: int, head: int) -> tuple[Tensor, Tensor]:
        """Return keys and values (N, D) of a sequence and key head in one of the caches."""
        found = self.caches[which]
        if self.table is None:
            return found[0][b, head], found[1][b, head]
        pages = self.table[b].long()
        k, v = (cache[pages, :, head].flatten(0, 1) for cache in found)
        return k, v

    @cached_property
    def summaries(self) -> list[Tensor]:
        """Of each cache, the mean of every block of keys: (B, H_kv, blocks, D).

        A decoder keeps them up to date, so that they are no part of the time.
        """
        found = []
        for keys, _ in self.caches:
            if self.table is not None:  # (B, H_kv, N, D), one cache at a time
                keys = keys[self.table.long()].flatten(1, 2).transpose(1, 2)
            found.append(keys.unflatten(2, (-1, BLOCK)).mean(3))
        return found

    def choose(self, which: int) -> Selection:
        """Return the best blocks for each key head, in one of the caches."""
        step, summary = self.step, self.summaries[which]
        asking = self.q.unflatten(1, (step.kv_heads, -1)).mean((2, 3)).unsqueeze(2)
        scores = asking @ summary.mT  # (B, H_kv, 1, blocks)
        best = scores.topk(step.blocks).indices
        layout = torch.zeros_like(scores, dtype=torch.bool).scatter_(-1, best, True)
        sizes = {"n_q": step.n_q, "n_k": step.n}
        sizes["max_blocks"] = step.batch * step.kv_heads * step.blocks
        return Selection.from_layout(layout, (-(-step.n_q // 16) * 16, BLOCK), **sizes)

    def allowed(self, b: int, head: int) -> Tensor:
        """Return bool (n_q, n): what the queries of a key head see in the first cache."""
        if self.step.mask != SELECTED:
            return torch.from_numpy(self.step.own_rows).to(self.device)
        taken = self.choose(0).codes[b, head] == -1  # (1, blocks)
        return taken.repeat_interleave(BLOCK, 1).expand(self.step.n_q, -1)


class Decoder(Provider):
    """One that decodes a step; a subclass says for which steps and where."""

    def concerns(self, case: Step) -> bool:
        return True

    def calls(self, inputs: Inputs, choosing: bool) -> list[Call]:
        """Return a call for every cache, which with `choosing` chooses its blocks itself."""
        raise NotImplementedError


@dataclass(frozen=True)
class SparseFlash(Decoder):
    """`sparseflash.decode` with one backend."""

    own = True

    def calls(self, inputs: Inputs, choosing: bool) -> list[Call]:
        step, which = inputs.step, range(len(inputs.caches))
        extents = step.n_q, step.n, step.batch, step.kv_heads, inputs.device
        planned: list[Any] = [None] * len(inputs.caches)
        if step.mask == SELECTED:
            planned = [schedule_from_selection(inputs.choose(i), *extents) for i in which]
        elif step.mask != DENSE:
            planned = [masks.parse(step.mask)] * len(inputs.caches)

        def call(i: int, mask: masks.Mask | Schedule | None) -> Tensor:
            return sparseflash.decode(
                inputs.q, *inputs.caches[i], inputs.choose(i) if choosing else mask,
                lengths=inputs.lengths, block_table=inputs.table, backend=self.label,
            )  # fmt: skip

        return [partial(call, i, mask) for i, mask in enumerate(planned)]


@dataclass(frozen=True)
class Sdpa(Decoder):
    """torch's scaled_dot_product_attention over a contiguous cache, by the kernel named."""

    kernel: SDPBackend | None = None

    def concerns(self, case: Step) -> bool:
        return case.mask == DENSE and not case.page

    def unsupported(self, case: Step, device: torch.device, direction: str) -> str | None:
        needs = self.kernel is not None and device.type != "cuda"
        return f"needs a CUDA device, not {device}" if needs else None

    def calls(self, inputs: Inputs, choosing: bool) -> list[Call]:
        gqa = inputs.step.heads != inputs.step.kv_heads

        def call(which: int) -> Tensor:
            with warnings.catch_warnings():  # why a kernel refuses: the row says that it does
                warnings.simplefilter("ignore")
                with nullcontext() if self.kernel is None else sdpa_kernel(self.kernel):
                    k, v = inputs.caches[which]
                    return F.scaled_dot_product_attention(inputs.q, k, v, enable_gqa=gqa)

        return [partial(call, i) for i in range(len(inputs.caches))]


class FlashInfer(Decoder):
    """FlashInfer over a cache in pages, where it is installed."""

    package, install = "flashinfer-python", "pip install flashinfer-python"
    modules = ("flashinfer",)

    def concerns(self, case: Step) -> bool:
        return case.mask == DENSE and case.page > 0

    def unsupported(self, case: Step, device: torch.device, direction: str) -> str | None:
        if device.type != "cuda":
            return f"needs a CUDA device, not {device}"
        return self.missing()

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

        def call(which: int) -> Tensor:
            out = wrapper.run(tokens, inputs.caches[which])
            return out.unflatten(0, (step.batch, step.n_q)).transpose(1, 2)

        return [partial(call, i) for i in range(len(inputs.caches))]


PROVIDERS: dict[str, Decoder] = {
    "triton": SparseFlash("triton"),
    "cpu": SparseFlash("cpu"),
    "sdpa": Sdpa("SDPA"),
    "sdpa_flash": Sdpa("FlashAttention-2", kernel=SDPBackend.FLASH_ATTENTION),
    "sdpa_cudnn": Sdpa("cuDNN", kernel=SDPBackend.CUDNN_ATTENTION),
    "sdpa_efficient": Sdpa("SDPA, memory-efficient", kernel=SDPBackend.EFFICIENT_ATTENTION),
    "sdpa_math": Sdpa("SDPA, math", kernel=SDPBackend.MATH),
    "flashinfer": FlashInfer("FlashInfer"),
}


def cases(run: Run) -> list[Step]:
    """Return the steps of the options, short caches first.

    Without `masks`: no mask, a window with sinks, and chosen blocks. Four queries then take no mask
    alone, and only a single query takes chosen blocks.
    """
    o, found = run.options, []
    choices(o, providers=PROVIDERS, dtype=DTYPES)
    streaming = STREAMING.format(o.chosen)
    sizes = {n: getattr(o, n) for n in "batch heads kv_heads head_dim dtype chosen".split()}
    texts = o.masks or [DENSE, streaming, SELECTED]
    for n, text, n_q, page in product(sorted(o.lengths), texts, o.n_q, o.pages):
        few = n_q == 1 or text == DENSE or (n_q == max(o.n_q) and text == streaming)
        if o.masks or few:
            found.append(Step(mask=text, page=page, n_q=n_q, n=n, **sizes))
            found[-1].check()
    return found


def ways(step: Step, run: Run) -> list[Row]:
    """Return the providers that a step concerns, with and without the choice of blocks."""
    what = ("decode", CHOOSING) if step.mask == SELECTED else ("decode",)
    names = [name for name in run.options.providers if PROVIDERS[name].concerns(step)]
    return [
        {"provider": name, **PROVIDERS[name].version(), "step": each}
        for name in names
        for each in what
    ]


@torch.no_grad()
def opened(step: Step, run: Run) -> Callable[[Row], dict[str, Any]]:
    """Return what measures the call of a provider."""
    inputs, device = Inputs(step, run.device), run.device

    @torch.no_grad()
    def one(row: Row) -> dict[str, Any]:
        provider = PROVIDERS[row["provider"]]
        if reason := provider.unsupported(step, device, "forward"):
            raise ValueError(reason)
        calls = provider.calls(inputs, row["step"] == CHOOSING)
        error = gate_error(inputs, calls[0]())
        if not error < (limit := LIMIT[DTYPES[step.dtype]]):
            return {"status": f"wrong result: error {error:.3g}, limit {limit:g}", "error": error}
        times, read = time_of(calls, device, run.options.seconds), step.read_bytes(inputs.keys)
        gbs, copied = read / times.ms_median / 1e6, copy_gbs(str(device))
        numbers = {"density": inputs.keys / step.n, "caches": len(inputs.caches), "error": error}
        numbers |= {"read_mb": read / 1e6, "gbs": gbs, "copy_gbs": copied, "share": gbs / copied}
        return times._asdict() | numbers

    return one


def gate_error(inputs: Inputs, out: Tensor) -> float:
    """Return the largest relative error of the first and last sequence and head."""
    step, group = inputs.step, inputs.step.heads // inputs.step.kv_heads
    errors = []
    for b, head in {(0, 0), (step.batch - 1, step.kv_heads - 1)}:
        own = slice(head * group, (head + 1) * group)
        k, v = (t.double()[None, None] for t in inputs.keys_of(0, b, head))
        expected, _ = oracle(inputs.q[None, b, own].double(), k, v, inputs.allowed(b, head))
        errors.append(relative_error(out[None, b, own], expected))
    return max(errors)


def time_of(calls: Sequence[Call], device: torch.device, seconds: float) -> Times:
    """Return milliseconds of a call, all of them in turn; on a GPU they are one CUDA graph.

    Raise ValueError for calls that wait for the GPU.
    """

    def every() -> None:
        for call in calls:
            call()

    run: Callable[[], object] | None = every
    if device.type == "cuda":
        run = in_graph(every, device)
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
    """Return tables by mask and cache: keys and queries down, providers across.

    A cell has the median time of the rounds in microseconds, and the share of a copy's bandwidth.
    Shapes, dtypes and devices are tables of their own.
    """
    rows = last_versions(frame[frame.status == OK], KEY)
    chosen = rows["mask"].str.startswith(SELECTED)
    across = [
        f"`{name}`{'' if step == 'decode' else ', choosing'}{f', pages of {page}' if page else ''}"
        for name, step, page in zip(rows.provider, rows.step, rows.page, strict=True)
    ]
    kind = rows["mask"].where(~chosen, SELECTED)
    rows = rows.assign(across=across, kind=kind, new=rows.n_q).sort_values(
        ["n", "n_q"], kind="stable"
    )
    shape = ["batch", "heads", "kv_heads", "head_dim", "dtype", "device"]
    found: dict[str, str] = {}
    groups: Any = rows.groupby([*shape, "kind"], sort=False)
    for (*sizes, mask), own in groups:
        # the newest number of chosen blocks
        own = own[own["mask"] == own.groupby(["n", "across"])["mask"].transform("last")]
        table = pivot(own, ["n", "n_q"], "across", _cell)
        table = table.rename(columns={"n": "keys", "n_q": "new queries"})
        several = len(rows[shape].drop_duplicates()) > 1
        name = mask.split("(")[0] + (f": {', '.join(map(str, sizes))}" if several else "")
        found[name] = markdown(table, left=())
    return found


def _cell(rows: Any) -> str:
    return f"{1000 * rows.ms_median.median():.1f} ({100 * rows.share.median():.0f} %)"
