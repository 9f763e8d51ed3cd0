"""Attention over a sequence that several devices share, beside other ways and one device.

It starts a process for each rank: NCCL on GPUs, gloo on CPUs. Each way passes the float64 gate,
then all ranks begin a call together and the slowest counts. `ms_local` is the same call with the
transfers left out: the difference is what they cost. See docs/guide/many_gpus.md.

    ours     `sparseflash.distributed`, its own choice of owners and of what travels
    heads    the same with route="heads" (Ulysses)
    grid     a mesh of two dimensions: two ranks share the heads, the others blocks of tokens
    torch    FlexAttention with torch's context parallelism: all keys are gathered first
    ring     torch's ring attention with FlashAttention-2, causal; its key heads are repeated
    one      one device with the whole sequence
"""

import os
import shlex
import socket
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from datetime import timedelta
from functools import lru_cache, partial
from typing import Any
from unittest import mock

import numpy as np
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from matplotlib import pyplot as plt
from matplotlib.figure import Figure
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

import sparseflash
from experiments.bench.cases import DTYPES, Case
from experiments.bench.cost import DIRECTIONS
from experiments.bench.gate import Gate
from experiments.bench.step import MIB, draw, times_of
from experiments.common import figures as f
from experiments.common.devices import find_device
from experiments.common.rows import Found, Row, last_versions
from experiments.common.tables import MISSING, markdown, short
from experiments.studies import runner
from experiments.studies.runner import both, choices, free, pair
from masks import interop, parse
from sparseflash.distributed import ContextParallel, context_parallel

KEY = "provider direction heads kv_heads n_q head_dim dtype ranks link".split()
BLOCK = 128
SETTING = "heads kv_heads n_q ranks link device".split()


@dataclass(kw_only=True)
class Options(runner.Options):
    ranks: int = 2
    masks: list[str] = field(default_factory=list)  # []: those of MASKS; n stands for the length
    lengths: list[int] = both([131072], [2048])
    heads: list[str] = both(["64:8"], ["4:2"])  # query heads : key heads
    head_dim: int = both(128, 32)
    dtype: str = both("bfloat16", "float32")
    providers: list[str] = field(default_factory=lambda: [*PROVIDERS])
    peer_access: bool = True  # false: NCCL without NVLink or peer access, as a slow link
    seconds: float = 0.3


def documents(n: int) -> str:
    """Return packed documents of very different lengths, as texts have them."""
    share = np.random.default_rng(0).lognormal(0.0, 1.0, 40)
    ends = np.round(np.cumsum(share / share.sum()) * n).astype(int)
    return f"documents({tuple(map(int, np.diff(ends, prepend=0)))}) & causal()"


MASKS: dict[str, Callable[[int], str]] = {  # by name, of n tokens
    "window": lambda n: f"sliding({n // 32}) & causal()",
    "documents": documents,
    "Longformer": lambda n: f"local({n // 128}) | global_tokens(64)",
    "BigBird by head": lambda n: f"bigbird({BLOCK}, 3)",
    "NATTEN": lambda n: f"neighborhood({(h := 2 ** (int(np.log2(n)) // 2), n // h)}, 31)",
    "block diffusion": lambda n: f"block_diffusion({n // 32})",
    "causal": lambda n: "causal()",
    "random .1": lambda n: "random_blocks(0.1, block=128)",
}


def collect(options: Options) -> None:
    """Measure what the rows lack, in a process for each rank."""
    device = find_device(options.device)
    choices(options, providers=PROVIDERS, dtype=DTYPES)
    for text in options.masks:
        parse(text)  # raises here, not in the ranks
    for text in options.heads:
        pair("heads", text)
    if device.type == "cuda" and (count := torch.cuda.device_count()) < options.ranks:
        raise ValueError(f"ranks={options.ranks}: this machine has {count} GPUs; device=cpu works")
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(s.getsockname()[1])}
    place |= {} if options.peer_access else {"NCCL_P2P_DISABLE": "1"}
    given = device.type, options, shlex.join(["python", "-m", "experiments.study", *sys.argv[1:]])
    with mock.patch.dict(os.environ, place):
        mp.start_processes(_rank, given, options.ranks, start_method="spawn")  # pyright: ignore


def _rank(rank: int, kind: str, options: Options, command: str) -> None:
    if kind == "cuda":
        torch.cuda.set_device(rank)
    else:
        torch.set_num_threads(1)
    backend, timeout = "nccl" if kind == "cuda" else "gloo", timedelta(minutes=5)
    dist.init_process_group(backend, rank=rank, world_size=options.ranks, timeout=timeout)
    if rank:
        sys.stdout = sys.stderr = open(os.devnull, "w")
    own = replace(options, device=f"{kind}:{rank}" if kind == "cuda" else kind)
    run = runner.Run(sys.modules[__name__], own, command)
    if rank:
        run.rows._write = lambda line: None  # it notes its rows, and the first rank writes them
    dist.barrier()  # all have read the rows that there were
    run.go()
    dist.destroy_process_group()


def cases(run: runner.Run) -> list[Case]:
    o, made = run.options, []
    for n in o.lengths:
        for heads in o.heads:
            sizes = 1, *pair("heads", heads), n, n, o.head_dim, o.dtype, BLOCK, BLOCK
            made += [Case(mask, *sizes) for mask in o.masks or [make(n) for make in MASKS.values()]]
    for case in made:
        case.check()
    return made


def ways(case: Case, run: runner.Run) -> list[Row]:
    o = run.options
    link = "gloo" if run.device.type == "cpu" else "nvlink" if o.peer_access else "host memory"
    about = {"ranks": o.ranks, "link": link}
    return [{"provider": p, "direction": d, **about} for p in o.providers for d in DIRECTIONS]


class Gathered:
    """A tensor whose tokens lie on all ranks; some heads of it are fetched when they are read.

    Every rank reads the same.
    """

    def __init__(self, x: Tensor, plan: ContextParallel | None):
        self.x, self.plan = x, plan

    def __getitem__(self, at: tuple[Any, ...]) -> Tensor:
        own = self.x[at[:2]]
        whole = own if self.plan is None else self.plan.unshard(own, -2)
        return whole if len(at) == 2 else whole[..., at[2], :]


def opened(case: Case, run: runner.Run) -> Callable[[Row], dict[str, Any]]:
    device, gpu = run.device, run.device.type == "cuda"
    whole = [t.detach() for t in draw(case, device)]
    gate = Gate(case, *whole)

    def own(plan: ContextParallel | None, x: Tensor) -> Tensor:
        return x.detach() if plan is None else plan.shard(x, 2)

    @lru_cache(1)
    def prepared(name: str) -> tuple[Any, ContextParallel | None, Row]:
        """Return the call of own q, k and v, its plan, and fields of its rows, after the gate."""
        free(device)  # what the way before held
        start = time.perf_counter()
        call, plan, facts = PROVIDERS[name](case, device)
        facts = {"plan_ms": 1000 * (time.perf_counter() - start), **facts}
        q, k, v = (own(plan, x).requires_grad_() for x in whole)
        out = call(q, k, v)
        grads = torch.autograd.grad(out, (q, k, v), own(plan, gate.dout))
        found: Any = [Gathered(x, plan) for x in (out.detach(), *grads)]
        error = max(gate.forward_error(found[0]), gate.backward_error(*found[1:]))
        vars(gate).pop("dout", None)  # as large as out
        return call, plan, facts | {"error": gate.passed(slowest(error, plan, device).item())}

    def one(row: Row) -> dict[str, Any]:
        if row["provider"] == "one" and dist.get_rank():
            return {}  # its failure must not leave others waiting
        call, plan, facts = prepared(row["provider"])
        q, k, v = (own(plan, x).requires_grad_() for x in whole)
        free(device)
        before = torch.cuda.memory_allocated(device) if gpu else 0
        if gpu:
            torch.cuda.reset_peak_memory_stats(device)
        out = call(q, k, v)
        dout = torch.randn_like(out)

        def backward() -> object:
            return torch.autograd.grad(out, (q, k, v), dout, retain_graph=True)

        backward()
        timed = backward if row["direction"] == "backward" else lambda: call(q, k, v)
        peak = torch.cuda.max_memory_allocated(device) - before if gpu else 0
        sent = plan.bytes_sent if plan else 0
        timed()
        moved = slowest(plan.bytes_sent - sent if plan else 0, plan, device).item()
        ms = times(timed, plan, device, run.options.seconds)
        nothing = mock.Mock(return_value=mock.Mock(wait=lambda: None))
        with mock.patch.object(dist, "all_to_all_single", nothing):
            local = times(timed, plan, device, run.options.seconds) if moved else ms
        flops = case.flops(row["direction"]) / (1 if plan is None else dist.get_world_size())
        return facts | {
            **times_of(ms)._asdict(), "ms_local": times_of(local).ms_median,
            "tflops": flops / times_of(ms).ms_median / 1e9,
            "mb_sent": moved / 1e6, "peak_mib": slowest(peak, plan, device).item() / MIB,
        }  # fmt: skip

    return one


def times(
    run: Callable[[], object], plan: ContextParallel | None, device: torch.device, seconds: float
) -> list[float]:
    """Return milliseconds of calls that all ranks begin together, each of the slowest rank.

    On GPUs the calls are queued, as those of a training step are.
    """

    def tick() -> Any:
        if device.type == "cpu":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    token, count, found = torch.zeros(1, device=device), 3, torch.zeros(0)
    for _ in range(2):  # first how many
        ticks = []
        for _ in range(count):
            if plan is not None:
                dist.all_reduce(token)
            ticks.append((tick(), run(), tick()))
        if device.type == "cuda":
            torch.cuda.synchronize(device)
            ms = [start.elapsed_time(end) for start, _, end in ticks]
        else:
            ms = [1000 * (end - start) for start, _, end in ticks]
        found = slowest(ms, plan, device)
        count = int(np.clip(1000 * seconds / found.median().item(), 3, 200))
    return found.tolist()


def slowest(values: Any, plan: ContextParallel | None, device: torch.device) -> Tensor:
    """Return the largest values of all ranks, float64; without a plan, those of this rank."""
    found = torch.tensor(values, dtype=torch.float64, device=device)
    if plan is not None:
        dist.all_reduce(found, dist.ReduceOp.MAX)
    return found


# ---- ways: each returns (call of own q, k and v, plan, fields of the rows)


def plan_of(case: Case, mesh: Any = None, **how: Any) -> ContextParallel:
    """Return a plan of the whole sequence."""
    sizes = {name: getattr(case, name) for name in ("heads", "kv_heads", "head_dim")}
    return context_parallel(mesh, case.blocks, case.n_q, **sizes, **how)


def ours(case: Case, device: torch.device, mesh: Any = None, **how: Any) -> Any:
    plan = plan_of(case, mesh, **how)
    part = plan.partition
    facts = {"owner": part.name, "route": plan.route, "modelled": part.speedup}
    facts |= {"imbalance": part.imbalance, "share": part.share}
    return partial(sparseflash.attention, mask=plan), plan, facts


def on_a_grid(case: Case, device: torch.device) -> Any:
    ranks = dist.get_world_size()
    if ranks < 4 or ranks % 2:
        raise ValueError(f"{ranks} ranks are no mesh of two heads and more: give ranks=4 or 8")
    mesh = init_device_mesh(device.type, (2, ranks // 2), mesh_dim_names=("heads", "cp"))
    return ours(case, device, mesh)


def torch_gathered(case: Case, device: torch.device) -> Any:
    from torch._functorch import config
    from torch.distributed.tensor.experimental._context_parallel import flex_cp_allgather
    from torch.nn.attention.flex_attention import flex_attention

    if device.type == "cpu":
        raise ValueError("FlexAttention has no backward on a CPU")
    blocks, ranks = case.blocks, dist.get_world_size()
    if case.n_q % (ranks * BLOCK):
        raise ValueError(f"n is no multiple of {ranks * BLOCK}")
    assert blocks is not None
    # its load balancers take masks without heads; the first that is nearly the best
    names = ("contiguous", "zigzag", "snake") if blocks.heads == 1 else ("contiguous",)
    found = {n: blocks.partition(ranks, owner=n, queries=False).imbalance for n in names}
    name = next(n for n in names if found[n] < 1.02 * min(found.values()))
    plan = plan_of(case, owner=name, route="keys")
    order = [np.flatnonzero(plan.owner == rank) for rank in range(ranks)]
    rows = blocks.take(order[dist.get_rank()], np.concatenate(order))
    torch._dynamo.reset()
    config.donated_buffer = False
    compiled: Any = torch.compile(flex_attention, dynamic=False)
    group = dist.distributed_c10d._get_default_group().group_name
    options = {"block_mask": interop.to_flex(rows, device)}
    options |= {"enable_gqa": case.heads != case.kv_heads}

    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return compiled(q, *flex_cp_allgather(k, v, 2, group), **options)

    return call, plan, {"owner": name}


class Ring(torch.autograd.Function):
    """torch's ring attention: each rank passes its keys on to the next, and computes meanwhile."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        from torch.distributed.tensor.experimental._context_parallel import _attention as ring

        ops = torch.ops.aten
        names = [
            "_scaled_dot_product_flash_attention",
            "_scaled_dot_product_flash_attention_for_cpu",
        ]
        op = getattr(ops, names[q.device.type == "cpu"])
        group = dist.distributed_c10d._get_default_group()
        common = {"dropout_p": 0.0, "is_causal": True}
        out, lse, *rest = ring._templated_ring_attention(group, 2, op, q, k, v, **common)
        ctx.save_for_backward(q, k, v, out, lse)
        if rest:  # on a GPU: lengths, their largest, and the state of the generator
            more = "cum_seq_q cum_seq_k max_q max_k philox_seed philox_offset".split()
            common |= dict(zip(more, rest, strict=False))
        back = getattr(ops, op.__name__ + "_backward").default
        ctx.back = partial(ring._templated_ring_attention_backward, group, 2, back, **common)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        q, k, v, out, lse = ctx.saved_tensors
        return ctx.back(grads[0], "grad_out", q, k, v, out, lse)[:3]


def ring(case: Case, device: torch.device) -> Any:
    if case.mask != "causal()" or case.n_q % (2 * dist.get_world_size() * BLOCK):
        raise ValueError("torch's ring attention takes causal(), and two equal chunks a rank")
    group = case.heads // case.kv_heads

    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return Ring.apply(q, k.repeat_interleave(group, 1), v.repeat_interleave(group, 1))

    return call, plan_of(case, owner="zigzag", route="keys"), {"owner": "zigzag"}


PROVIDERS: dict[str, Callable[[Case, torch.device], Any]] = {
    "ours": ours,
    "heads": partial(ours, route="heads", owner="contiguous"),
    "grid": on_a_grid,
    "torch": torch_gathered,
    "ring": ring,
    "one": lambda case, _: (partial(sparseflash.attention, mask=case.blocks), None, {}),
}


# ---- tables and the figure


def summary(frame: Any) -> list[Found]:
    """Return a line for each setting and mask: milliseconds of both directions together by
    provider, as multiples of ours of the same process (`over`), how many times one device ours is,
    and what the rows of ours say.
    """
    made = []
    every = frame[(frame.provider == "ours") & frame.ms_median.notna()]
    sums: Any = every.groupby([*SETTING, "mask", "process"]).ms_median
    beside = sums.sum()[sums.count() == 2]
    groups: Any = last_versions(frame, KEY).groupby([*SETTING, "mask"], sort=False)
    for key, own in groups:
        pairs = {p: rows for p, rows in own.groupby("provider") if rows.ms_median.count() == 2}
        line = Found(zip([*SETTING, "mask"], key, strict=True), density=own.density.iloc[0])
        line["ms"] = {p: rows.ms_median.sum() for p, rows in pairs.items()}
        processes = {p: (*key, rows.process.iloc[0]) for p, rows in pairs.items()}
        line["over"] = {p: line.ms[p] / beside[k] for p, k in processes.items() if k in beside}
        if (ours := pairs.get("ours")) is not None:
            ms, first = line.ms["ours"], ours.iloc[0]
            line["speed_up"] = line.over.get("one")
            line["transfers"] = 100 * (ms / ours.ms_local.sum() - 1)
            line["mb_sent"], line["gib"] = ours.mb_sent.sum(), first.peak_mib / 1024
            line["tflops"] = (ours.tflops * ours.ms_median).sum() / ms
            line |= {"plan_ms": first.plan_ms, "modelled": first.get("modelled")}
        made.append(line)
    return made


def tables(frame: Any) -> dict[str, str]:
    """Return, for each length, heads and link, a table of masks."""
    made: dict[str, list[Found]] = {}
    for line in summary(frame):
        title = f"{line.heads}:{line.kv_heads} heads, {line.n_q} tokens, {line.ranks} ranks"
        made.setdefault(f"{title}, {line.link}", []).append(line)
    return {title: _table(lines) for title, lines in made.items()}


def _table(lines: list[Found]) -> str:
    peers = [p for p in PROVIDERS if p not in ("ours", "one")]
    head = ["mask", "density", "one, ms", "ours, ms", "speed-up", "model", "transfers, %"]
    head += ["MB sent", "TFLOP/s a GPU", "peak GiB", "plan ms", *(f"/ {p}" for p in peers)]
    texts = []
    for line in lines:
        mask = line["mask"]
        mask = mask if len(mask) < 40 else f"{mask[:24]}...{mask[-11:]}"
        exposed = MISSING if line.transfers is None else f"{line.transfers:.1f}"
        numbers = [line.density, line.ms.get("one"), line.ms.get("ours"), line.speed_up]
        more = line.mb_sent, line.tflops, line.gib, line.plan_ms
        ratios = [line.over.get(p, float("nan")) for p in peers]
        texts.append([f"`{mask}`", *map(short, [*numbers, line.modelled]), exposed,
                      *map(short, [*more, *ratios])])  # fmt: skip
    kept = [i for i in range(len(head)) if any(line[i] not in ("0", MISSING) for line in texts)]
    return markdown([[line[i] for i in kept] for line in [head, *texts]])


def figures(frame: Any) -> dict[str, Figure]:
    """Return, for each length, heads and link that several numbers of ranks were measured with, how
    many times one device they are, with the model in grey.
    """
    settings: dict[tuple[Any, ...], list[Found]] = {}
    for line in (line for line in summary(frame) if line.speed_up):
        key = line.heads, line.kv_heads, line.n_q, line.link, line.device
        settings.setdefault(key, []).append(line)
    made = {}
    for (*sizes, n, link, device), lines in settings.items():
        ranks = sorted({line.ranks for line in lines})
        if len(ranks) < 2:
            continue
        names = {make(n): name for name, make in MASKS.items()}
        figure, axes = plt.subplots(figsize=(f.COLUMN, 2.8))
        f.reference(axes, ranks, ranks, "ideal")
        for i, mask in enumerate(dict.fromkeys(line["mask"] for line in lines)):
            own = sorted((r for r in lines if r["mask"] == mask), key=lambda r: r.ranks)
            look = f.Style(f"C{i}", "osD^vPX*"[i % 8], "-")
            counts = [r.ranks for r in own]
            f.curve(axes, counts, [r.speed_up for r in own], look, names.get(mask, mask))
            axes.plot(counts, [r.modelled for r in own], color="0.75", lw=0.7, zorder=0)
        axes.set(xscale="log", xlabel="devices", xticks=ranks, xticklabels=ranks)
        axes.set_ylabel("times one device")
        axes.minorticks_off()
        f.plain_log_axis(axes, 2, "x")
        f.legend(figure, [axes], columns=3, most=9)
        made[f.file_name("scaling", *sizes, n, link, device)] = figure
    return made
