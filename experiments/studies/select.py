"""Time of selecting blocks at run time next to the attention that it saves.

For each selector the selection from q and k, its schedule, attention forward and backward with the
schedule made beforehand, and the whole chain. On a GPU, each step but backward is also captured in
a CUDA graph: the difference is what the host takes that the GPU does not hide.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import masks
import sparseflash
from experiments.bench.cases import DTYPES
from experiments.bench.step import graph_ms, measure
from experiments.common.rows import Found, Row, found, last_versions
from experiments.common.tables import markdown
from experiments.studies import runner
from experiments.studies.runner import Run, both, grid
from sparseflash import select
from sparseflash.dynamic.lists import schedule_from_selection
from sparseflash.schedule.blocks import Schedule
from sparseflash.testing import make_qkv

KEY = "step batch heads kv_heads n_q n_k head_dim dtype".split()
STEPS = ("selection", "schedule", "forward", "backward", "chain")


@dataclass(kw_only=True)
class Options(runner.Options):
    density: float = 0.1  # the share of key blocks of a query block, where a selector has a knob
    seq_len: int = both(32768, 1024)
    batch: int = both(2, 1)
    heads: int = both(16, 4)
    kv_heads: int | None = None  # null: heads
    head_dim: int = both(128, 64)
    dtype: str = both("bfloat16", "float32")
    seconds: float = both(0.15, 0.5)


def cases(run: Run) -> list[Found]:
    o = run.options
    sizes = {"kv_heads": o.kv_heads or o.heads, "n_q": o.seq_len, "n_k": o.seq_len}
    return grid(o, "batch heads head_dim dtype", mask=[*selectors(o)], **sizes)


def selectors(o: Options) -> dict[str, select.Selector]:
    """Return one of each kind by its text."""
    share, n = float(o.density), o.seq_len
    chunk = max(128, n // 64 // 128 * 128)

    def blocks(size: int) -> int:
        return max(1, round(share * n / size))

    found = [
        *(select.top_k(share, pool) for pool in ("mean", "max", "bound")),
        select.top_k(share, within=masks.causal(), always=masks.local(0)),
        select.mass(0.9, max_blocks=blocks(128)),
        select.moba(chunk, blocks(chunk), union=True),
        select.nsa(blocks(64), union=True),
    ]
    return {str(selector): selector for selector in found}


def ways(case: Found, run: Run) -> list[Row]:
    return [{"step": step} for step in STEPS]


def opened(case: Found, run: Run) -> Callable[[Row], Row]:
    selector, device = selectors(run.options)[case.mask], run.device
    seconds = run.options.seconds
    q, k, v = make_qkv(
        case.batch, case.heads, case.n_q, case.n_k, case.head_dim, kv_heads=case.kv_heads,
        dtype=DTYPES[case.dtype], device=device, requires_grad=True,
    )  # fmt: skip
    extents = (case.n_q, case.n_k, case.batch, case.heads, device)
    selection = selector(q, k)

    def schedule() -> Schedule:
        return schedule_from_selection(selection, *extents)

    def attend(mask: Schedule | select.Selection) -> Tensor:
        return sparseflash.attention(q, k, v, mask)  # pyright: ignore[reportReturnType]

    made = schedule()
    out, dout = attend(made), torch.randn_like(q)
    calls: dict[str, Callable[[], object]] = {
        "selection": lambda: selector(q, k),
        "schedule": schedule,
        "forward": torch.no_grad()(lambda: attend(made)),
        "backward": lambda: torch.autograd.grad(out, (q, k, v), dout, retain_graph=True),
        "chain": torch.no_grad()(lambda: attend(selector(q, k))),
    }
    about = {
        "density": selection.density().item(),
        "partial": (selection.codes >= 0).float().mean().item(),  # blocks with a bit tile
        "block_q": selection.block_size[0],
        "block_k": selection.block_size[1],
    }

    def one(row: Row) -> Row:
        call = calls[row["step"]]
        times = measure(call, device, seconds)
        graph = None if row["step"] == "backward" else graph_ms(call, device, seconds)
        return {**about, **times._asdict(), "ms_graph": graph}

    return one


def tables(frame: Any) -> dict[str, str]:
    """Return the milliseconds of each selector, from Python / as a CUDA graph.

    Share: selection and schedule over forward. In line: what the chain takes beyond forward,
    over forward.
    """
    by_selector: dict[str, dict[str, Any]] = {}
    for row in found(last_versions(frame, KEY)):
        by_selector.setdefault(row.mask, {})[row.step] = row
    heads = ["selector", "density", "selection", "schedule", "forward", "backward"]
    lines = [[*heads, "share", "in line"]]
    for text, rows in by_selector.items():
        if not {*STEPS} <= {*rows}:
            continue
        both = [{s: row[name] for s, row in rows.items()} for name in ("ms_median", "ms_graph")]
        eager, both = both[0], [ms for ms in both if ms["selection"] and ms["chain"]]
        cells = [" / ".join(f"{ms[step]:.3f}" for ms in both) for step in STEPS[:2]]
        cells += [f"{eager['forward']:.2f}", f"{eager['backward']:.1f}"]
        shares = ((ms["selection"] + ms["schedule"]) / ms["forward"] for ms in both)
        in_line = (ms["chain"] / ms["forward"] - 1 for ms in both)
        cells += [" / ".join(f"{x:.3f}" for x in part) for part in (shares, in_line)]
        lines.append([f"`{text}`", f"{rows['chain'].density:.2g}", *cells])
    return {"selectors": markdown(lines)}
