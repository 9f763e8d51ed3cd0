"""Attention over a sequence that several devices share, beside other ways and one device.

It starts a process for each rank: NCCL on GPUs, gloo on CPUs. Each way passes the float64 gate,
then all ranks begin a call together and the slowest counts. `ms_local` is the same call with the
transfers left out: the difference is what they cost. See docs/guide/many_gpus.md.

    ours     `sparseflash.distributed`, its own choice of owners and of what travels
    heads    the same with route="heads" (Ulysses)
    grid     a mesh of two dimensions: two ranks share the heads, the others blocks of tokens
    torch    FlexAttention with torch's context parallelism: all keys are gathered first
    ring     torch's ring attention, causal masks only
    one      one device with the whole sequence
"""

import os
import shlex
import shutil
import socket
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from datetime import timedelta
from functools import lru_cache, partial
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as F
from matplotlib import pyplot as plt
from matplotlib.figure import Figure
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

import sparseflash
from experiments.bench.cases import DTYPES, Case
from experiments.bench.gate import Gate
from experiments.bench.step import MIB, draw
from experiments.common import figures as f
from experiments.common.devices import find_device
from experiments.common.rows import OK, Row, found, last_versions
from experiments.common.tables import MISSING, markdown, short
from experiments.studies import runner
from experiments.studies.runner import both, choices, free
from masks import interop
from sparseflash.distributed import ContextParallel, context_parallel

KEY = "provider direction heads kv_heads n_q head_dim dtype ranks link".split()
PROVIDERS = ("ours", "heads", "grid", "torch", "ring", "one")
DIRECTIONS = ("forward", "backward")
BLOCK = 128
entered = ExitStack()  # what the way that is measured has entered


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
    lengths = np.diff(ends, prepend=0)
    return f"documents({tuple(map(int, lengths))}) & causal()"


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
    """Measure what the rows lack, in a process for each rank; those but the first keep no rows."""
    device = find_device(options.device)
    choices(options, providers=PROVIDERS, dtype=DTYPES)
    if device.type == "cuda" and torch.cuda.device_count() < options.ranks:
        count = torch.cuda.device_count()
        raise ValueError(f"ranks={options.ranks}: this machine has {count} GPUs; device=cpu works")
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(s.getsockname()[1])}
    place |= {} if options.peer_access else {"NCCL_P2P_DISABLE": "1"}
    command = shlex.join(["python", "-m", "experiments.study", *sys.argv[1:]])
    with mock.patch.dict(os.environ, place), tempfile.TemporaryDirectory() as folder:
        names = [options.rows, *(f"{folder}/{i}.jsonl" for i in range(1, options.ranks))]
        for name in names[1:] if Path(options.rows).exists() else ():
            shutil.copy(options.rows, name)
        mp.start_processes(  # pyright: ignore[reportPrivateImportUsage]
            _rank, (device.type, options, names, command), options.ranks, start_method="spawn"
        )


def _rank(rank: int, kind: str, options: Options, names: list[str], command: str) -> None:
    if kind == "cuda":
        torch.cuda.set_device(rank)
    else:
        torch.set_num_threads(1)
    backend, timeout = "nccl" if kind == "cuda" else "gloo", timedelta(minutes=5)
    dist.init_process_group(backend, rank=rank, world_size=options.ranks, timeout=timeout)
    device = f"{kind}:{rank}" if kind == "cuda" else kind
    if rank:
        sys.stdout = sys.stderr = open(os.devnull, "w")
    own = replace(options, rows=names[rank], device=device)
    Run(sys.modules[__name__], own, command).go()
    dist.destroy_process_group()


class Run(runner.Run):
    """The same turns on every rank."""

    def late(self, end: float) -> bool:
        late = torch.tensor(float(super().late(end)), device=self.device)
        dist.broadcast(late, 0)
        return bool(late.item())


def cases(run: runner.Run) -> list[Case]:
    o, made = run.options, []
    for n in o.lengths:
        for heads in o.heads:
            q_heads, kv_heads = map(int, heads.split(":"))
            sizes = 1, q_heads, kv_heads, n, n, o.head_dim, o.dtype, BLOCK, BLOCK
            made += [Case(mask, *sizes) for mask in o.masks or [make(n) for make in MASKS.values()]]
    for case in made:
        case.check()
    return made


def ways(case: Case, run: runner.Run) -> list[Row]:
    o = run.options
    link = "gloo" if run.device.type == "cpu" else "nvlink" if o.peer_access else "host memory"
    about = {"ranks": o.ranks, "link": link}
    return [{"provider": p, "direction": d, **about} for p in o.providers for d in DIRECTIONS]


def opened(case: Case, run: runner.Run) -> Callable[[Row], dict[str, Any]]:
    measured = Measured(case, run.device, run.options.seconds)

    def one(row: Row) -> dict[str, Any]:
        if (
            row["provider"] == "one" and dist.get_rank()
        ):  # its failure must not leave others waiting
            return {}
        call, plan, facts = measured.prepared(row["provider"])
        return facts | measured.timed(call, plan, row["direction"])

    return one


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


class Measured:
    """One case on one rank."""

    def __init__(self, case: Case, device: torch.device, seconds: float):
        self.case, self.device, self.seconds = case, device, seconds
        self.whole = [t.detach() for t in draw(case, device)]
        self.gate = Gate(case, *self.whole)
        self.prepared = lru_cache(1)(self._prepared)

    def plan(self, mesh: Any = None, **how: Any) -> ContextParallel:
        """Return a plan of the whole sequence."""
        sizes = {name: getattr(self.case, name) for name in ("heads", "kv_heads", "head_dim")}
        return context_parallel(mesh, self.case.blocks, self.case.n_q, **sizes, **how)

    def _prepared(self, name: str) -> tuple[Any, ContextParallel | None, Row]:
        """Return the call of a way, its plan, and fields of its rows, after the gate."""
        entered.close()
        free(self.device)  # what the way before held
        start = time.perf_counter()
        call, plan, facts = getattr(self, f"_{name}")()
        facts = {"plan_ms": 1000 * (time.perf_counter() - start), **facts}
        return call, plan, facts | {"error": self.gate.passed(self._error(call, plan))}

    def _own(self, plan: ContextParallel | None, x: Tensor) -> Tensor:
        return x.detach() if plan is None else plan.shard(x, 2)

    def _error(self, call: Any, plan: ContextParallel | None) -> float:
        """Return the larger error of both directions, on every rank."""
        gate = self.gate
        q, k, v = (self._own(plan, x).requires_grad_() for x in self.whole)
        out = call(q, k, v)
        grads = torch.autograd.grad(out, (q, k, v), self._own(plan, gate.dout))
        found: Any = [Gathered(x, plan) for x in (out.detach(), *grads)]
        error = max(gate.forward_error(found[0]), gate.backward_error(*found[1:]))
        vars(gate).pop("dout", None)  # as large as out
        return self._most(error, plan)

    def timed(self, call: Any, plan: ContextParallel | None, direction: str) -> Row:
        """Return times of a direction, what it sends, and the peak of both."""
        gpu = self.device.type == "cuda"
        q, k, v = (self._own(plan, x).requires_grad_() for x in self.whole)
        free(self.device)
        before = torch.cuda.memory_allocated(self.device) if gpu else 0
        if gpu:
            torch.cuda.reset_peak_memory_stats(self.device)
        out = call(q, k, v)
        dout = torch.randn_like(out)
        calls = {
            "forward": lambda: call(q, k, v),
            "backward": lambda: torch.autograd.grad(out, (q, k, v), dout, retain_graph=True),
        }
        run = calls[direction]
        calls["backward"]()
        peak = torch.cuda.max_memory_allocated(self.device) - before if gpu else 0
        sent = plan.bytes_sent if plan else 0
        run()
        moved = self._most(plan.bytes_sent - sent if plan else 0, plan)
        ms = self._times(run, plan)
        with mock.patch.object(dist, "all_to_all_single", _nothing):
            local = self._times(run, plan) if moved else ms
        median, p20, p80 = map(float, np.quantile(ms, [0.5, 0.2, 0.8]))
        flops = self.case.flops(direction) / (1 if plan is None else dist.get_world_size())
        return {
            "ms_median": median, "ms_p20": p20, "ms_p80": p80, "calls": len(ms),
            "ms_local": float(np.median(local)), "tflops": flops / median / 1e9,
            "mb_sent": moved / 1e6, "peak_mib": self._most(peak, plan) / MIB,
        }  # fmt: skip

    def _times(self, run: Any, plan: ContextParallel | None) -> list[float]:
        """Return milliseconds of calls that all ranks begin together, each of the slowest rank.

        On GPUs the calls are queued, as those of a training step are.
        """
        token, count, times = torch.zeros(1, device=self.device), 3, torch.zeros(0)
        for _ in range(2):  # first how many
            ticks = []
            for _ in range(count):
                if plan is not None:
                    dist.all_reduce(token)
                start = self._tick()
                run()
                ticks.append((start, self._tick()))
            if self.device.type == "cuda":
                torch.cuda.synchronize(self.device)
                ms = [start.elapsed_time(end) for start, end in ticks]
            else:
                ms = [1000 * (end - start) for start, end in ticks]
            times = torch.tensor(ms, dtype=torch.float64, device=self.device)
            if plan is not None:
                dist.all_reduce(times, dist.ReduceOp.MAX)
            count = int(np.clip(1000 * self.seconds / times.median().item(), 3, 200))
        return times.tolist()

    def _tick(self) -> Any:
        if self.device.type == "cpu":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def _most(self, value: float, plan: ContextParallel | None) -> float:
        """Return the largest value of all ranks; without a plan, that of this rank."""
        most = torch.tensor(float(value), dtype=torch.float64, device=self.device)
        if plan is not None:
            dist.all_reduce(most, dist.ReduceOp.MAX)
        return most.item()

    # ---- ways: each returns (call of own q, k and v, plan, fields of the rows) ----

    def _ours(self, mesh: Any = None, **how: Any) -> Any:
        plan = self.plan(mesh, **how)
        facts = {"owner": plan.partition.name, "route": plan.route}
        facts |= {"imbalance": plan.partition.imbalance, "share": plan.partition.share}
        facts["modelled"] = plan.partition.speedup
        return partial(sparseflash.attention, mask=plan), plan, facts

    def _heads(self) -> Any:
        return self._ours(route="heads", owner="contiguous")

    def _grid(self) -> Any:
        ranks = dist.get_world_size()
        if ranks < 4 or ranks % 2:
            raise ValueError(f"{ranks} ranks are no mesh of two heads and more: give ranks=4 or 8")
        mesh = init_device_mesh(self.device.type, (2, ranks // 2), mesh_dim_names=("heads", "cp"))
        return self._ours(mesh)

    def _one(self) -> Any:
        return partial(sparseflash.attention, mask=self.case.blocks), None, {}

    def _torch(self) -> Any:
        from torch._functorch import config
        from torch.distributed.tensor.experimental._context_parallel import flex_cp_allgather
        from torch.nn.attention.flex_attention import flex_attention

        if self.device.type == "cpu":
            raise ValueError("FlexAttention has no backward on a CPU")
        blocks, ranks = self.case.blocks, dist.get_world_size()
        if self.case.n_q % (ranks * BLOCK):
            raise ValueError(f"n is no multiple of {ranks * BLOCK}")
        assert blocks is not None
        # its load balancers take masks without heads; the first that is nearly the best
        names = ("contiguous", "zigzag", "snake") if blocks.heads == 1 else ("contiguous",)
        found = {name: blocks.partition(ranks, owner=name, queries=False) for name in names}
        least = min(p.imbalance for p in found.values())
        name = next(name for name, p in found.items() if p.imbalance < 1.02 * least)
        plan = self.plan(owner=name, route="keys")
        order = [np.flatnonzero(plan.owner == rank) for rank in range(ranks)]
        rows = blocks.take(order[dist.get_rank()], np.concatenate(order))
        block_mask = interop.to_flex(rows, self.device)
        torch._dynamo.reset()
        config.donated_buffer = False
        compiled: Any = torch.compile(flex_attention, dynamic=False)
        gqa, group = (
            self.case.heads != self.case.kv_heads,
            dist.distributed_c10d._get_default_group().group_name,
        )

        def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            k, v = flex_cp_allgather(k, v, 2, group)
            return compiled(q, k, v, block_mask=block_mask, enable_gqa=gqa)

        return call, plan, {"owner": name}

    def _ring(self) -> Any:
        from torch.distributed.tensor.experimental import context_parallel as shared
        from torch.nn.attention import SDPBackend, sdpa_kernel

        if not self.case.causal:
            raise ValueError("torch's ring attention takes causal masks only")
        if self.device.type == "cpu":
            raise ValueError("torch's ring attention runs on GPUs")
        mesh = init_device_mesh("cuda", (dist.get_world_size(),))
        plan = self.plan(owner="zigzag", route="keys")
        whole = torch.zeros(1, 1, self.case.n_q, 1, device=self.device)
        entered.enter_context(sdpa_kernel(SDPBackend.FLASH_ATTENTION))
        entered.enter_context(shared(mesh, buffers=[whole], buffer_seq_dims=[2]))
        group = self.case.heads // self.case.kv_heads

        def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            if group > 1:  # it has no grouped heads
                k, v = (x.repeat_interleave(group, 1) for x in (k, v))
            return F.scaled_dot_product_attention(q, k, v, is_causal=True)

        return call, plan, {"owner": "zigzag"}


def _nothing(*_: Any, **__: Any) -> Any:
    return mock.Mock(wait=lambda: None)


def tables(frame: Any) -> dict[str, str]:
    """Return, for each length, heads and link, a table of masks."""
    rows = found(last_versions(frame, KEY))
    made: dict[str, dict[str, dict[str, Row]]] = {}
    for row in rows:
        title = f"{row.heads}:{row.kv_heads} heads, {row.n_q} tokens, {row.ranks} ranks, {row.link}"
        made.setdefault(title, {}).setdefault(row.mask, {})[f"{row.provider} {row.direction}"] = row
    return {title: _table(by_mask) for title, by_mask in made.items()}


def _table(by_mask: dict[str, dict[str, Any]]) -> str:
    head = ["mask", "density", "one, ms", "ours, ms", "speed-up", "model", "transfers, %"]
    head += ["MB sent", "TFLOP/s a GPU", "peak GiB", "plan ms"]
    head += [f"/ {name}" for name in PROVIDERS[1:5]]
    lines = []
    for mask, rows in by_mask.items():

        def total(provider: str, field: str = "ms_median", rows: Any = rows) -> float | None:
            values = [rows.get(f"{provider} {d}", {}).get(field) for d in DIRECTIONS]
            return None if None in values else sum(values)

        def over(a: float | None, b: float | None) -> str:
            return short(a / b) if a and b else ""

        one, ours, local = total("one"), total("ours"), total("ours", "ms_local")
        first = next(iter(rows.values()))
        mine = rows.get("ours forward", {})
        name = mask if len(mask) < 40 else f"{mask[:24]}...{mask[-11:]}"
        exposed = f"{100 * (ours / local - 1):.1f}" if ours and local else ""
        flops = sum(
            (r.get("tflops") or 0.0) * (r.get("ms_median") or 0.0)
            for r in (rows.get(f"ours {d}", {}) for d in DIRECTIONS)
        )
        lines.append([
            f"`{name}`", short(first.get("density")), *(short(x) if x else "" for x in (one, ours)),
            over(one, ours), short(mine["modelled"]) if mine.get("modelled") else "", exposed,
            short(total("ours", "mb_sent")), over(flops, ours),
            short((mine.get("peak_mib") or 0.0) / 1024), short(mine.get("plan_ms")),
            *(over(total(p), ours) for p in PROVIDERS[1:5]),
        ])  # fmt: skip
    kept = [i for i in range(len(head)) if any(line[i] not in ("", "0", MISSING) for line in lines)]
    return markdown([[line[i] for i in kept] for line in [head, *lines]])


def figures(frame: Any) -> dict[str, Figure]:
    """Return, for each length, heads and link that several numbers of ranks were measured with, how
    many times one device they are, with the model in grey.
    """
    rows = [row for row in found(last_versions(frame, KEY)) if row.status == OK]
    settings: dict[tuple[Any, ...], list[Any]] = {}
    for row in rows:
        key = row.heads, row.kv_heads, row.n_q, row.link, row.device
        settings.setdefault(key, []).append(row)
    made = {}
    for (heads, kv_heads, n, link, device), own in settings.items():
        ranks = sorted({row.ranks for row in own})
        if len(ranks) < 2:
            continue
        names = {make(n): name for name, make in MASKS.items()}
        figure, axes = plt.subplots(figsize=(f.COLUMN, 2.8))
        f.reference(axes, ranks, ranks, "ideal")
        masks = dict.fromkeys(row.mask for row in own)
        for i, mask in enumerate(masks):
            points = _points([row for row in own if row.mask == mask])
            look = f.Style(f"C{i}", "osD^vPX*"[i % 8], "-")
            f.curve(axes, [*points], [p[0] for p in points.values()], look, names.get(mask, mask))
            model = {count: p[1] for count, p in points.items() if p[1]}
            axes.plot([*model], [*model.values()], color="0.75", lw=0.7, zorder=0)
        axes.set(xscale="log", xlabel="devices", xticks=ranks, xticklabels=ranks)
        axes.set_ylabel("times one device")
        axes.minorticks_off()
        f.plain_log_axis(axes, 2, "x")
        f.legend(figure, [axes], columns=3, most=9)
        made[f.file_name("scaling", heads, kv_heads, n, link, device)] = figure
    return made


def _points(rows: list[Any]) -> dict[int, tuple[float, float | None]]:
    """Return the speed-up of ours over one device, and that of the model, by ranks."""
    ms: dict[int, dict[str, float]] = {}
    model: dict[int, float | None] = {}
    for row in rows:
        ms.setdefault(row.ranks, {})[f"{row.provider} {row.direction}"] = row.ms_median
        if row.provider == "ours":
            model[row.ranks] = row.get("modelled")
    needed = [f"{name} {d}" for name in ("one", "ours") for d in DIRECTIONS]
    found: dict[int, tuple[float, float | None]] = {}
    for count, times in sorted(ms.items()):
        if all(name in times for name in needed):
            one, ours = (sum(times[f"{name} {d}"] for d in DIRECTIONS) for name in ("one", "ours"))
            found[count] = one / ours, model[count]
    return found
