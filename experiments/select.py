"""Measures what selecting blocks costs beside the attention that it saves.

    python -m experiments.select
    python -m experiments.select seq_len=4096 'selectors=["top_k(4)","moba(512, 3)"]'

For each selector, one CSV row per step: the selection from q and k, its schedule, attention forward
and backward with the schedule made beforehand, and the whole chain. `share` is
(selection + schedule) / attention forward. On a GPU, every step but backward is also captured in a
CUDA graph and its replay timed: the difference is what the host takes that the GPU does not hide.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

import masks
import sparseflash
from experiments.bench.cases import DTYPES
from experiments.bench.rows import SelectRow
from experiments.bench.timing import measure
from experiments.common.checks import choose, positive_number, whole_number
from experiments.common.devices import find_device
from experiments.common.program import program
from experiments.common.records import OK, Records
from sparseflash import select
from sparseflash.schedule import as_tensors
from sparseflash.select.schedule import schedule_from_selection
from sparseflash.testing import make_qkv

STEPS = ("selection", "schedule", "forward", "backward", "chain")
SHAPES: dict[str, tuple[Any, ...]] = {  # batch, heads, seq_len, head_dim, dtype
    "cuda": (2, 16, 32768, 128, "bfloat16"),
    "cpu": (1, 4, 1024, 64, "float32"),
}


def default_selectors(density: float, seq_len: int, heads: int, kv_heads: int, head_dim: int):
    """One of each kind, with about this share of the key blocks where the kind has such a knob."""
    causal, share = masks.causal(), float(density)
    chunk = max(128, seq_len // 64 // 128 * 128)
    gate = select.Gate(heads, head_dim, kv_heads, block_size=128)
    return [
        select.top_k(share),
        select.top_k(share, "max"),
        select.top_k(share, "bound"),
        select.top_k(share, within=causal, always=masks.local(0)),
        select.mass(0.9, max_blocks=max(1, round(density * seq_len / 128))),
        select.antidiagonal(16, 0.9, max_blocks=max(1, round(density * seq_len / 128))),
        select.antidiagonal(64, 0.9, max_blocks=max(1, round(density * seq_len / 128))),
        select.gate(gate, share),
        select.moba(chunk, max(1, round(density * seq_len / chunk)), union=True),
        select.nsa(max(1, round(density * seq_len / 64)), union=True),
    ]


def parse(text: str) -> select.Selector:
    """The selector of a call such as `top_k(0.1, within=causal())`; the text is run as Python."""
    found = eval(text, {"__builtins__": {}}, vars(masks) | vars(select))
    if not isinstance(found, select.Selector):
        raise ValueError(f"{text!r} is no selector: give a call of sparseflash.select")
    return found


def steps(
    selector: select.Selector, q: Tensor, k: Tensor, v: Tensor
) -> tuple[select.Selection, dict[str, Callable[[], object]]]:
    """A selection, and what is timed."""
    q, k, v = (t.detach().requires_grad_() for t in (q, k, v))
    extents = (q.shape[2], k.shape[2], q.shape[0], q.shape[1], q.device)
    selection = selector(q, k)

    def schedule() -> tuple[list[Tensor], list[int]]:
        return as_tensors(schedule_from_selection(selection, *extents))

    def attend(tensors: list[Tensor], ints: list[int]) -> Tensor:
        options = (q.shape[-1] ** -0.5, 0.0, None, False, "auto")
        return torch.ops.sparseflash.forward(q, k, v, tensors, ints, *options)[0]

    made = schedule()
    out, dout = attend(*made), torch.randn_like(q)
    backward = lambda: torch.autograd.grad(out, (q, k, v), dout, retain_graph=True)  # noqa: E731
    calls = {
        "selection": lambda: selector(q, k),
        "schedule": schedule,
        "forward": torch.no_grad()(lambda: attend(*made)),
        "backward": backward,
        "chain": torch.no_grad()(lambda: sparseflash.attention(q, k, v, selector(q, k))),
    }
    return selection, calls


def run(
    selector: select.Selector, qkv: tuple[Tensor, ...], dtype: str, seconds: float, command: str
) -> list[SelectRow]:
    """The rows of one selector."""
    q, k, v = qkv
    selection, calls = steps(selector, q, k, v)
    times = {step: measure(calls[step], q.device, seconds) for step in STEPS}
    medians = {step: times[step].median for step in STEPS}
    in_graph = {
        step: graph_ms(calls[step], q.device, seconds) for step in STEPS if step != "backward"
    }
    return [
        SelectRow(
            mask=str(selector),
            status=OK,
            step=step,
            batch=q.shape[0],
            heads=q.shape[1],
            kv_heads=k.shape[1],
            n_q=q.shape[2],
            n_k=k.shape[2],
            head_dim=q.shape[3],
            dtype=dtype,
            block_q=selection.block_size[0],
            block_k=selection.block_size[1],
            density=selection.density().item(),
            partial=(selection.codes >= 0).float().mean().item(),
            ms_median=times[step].median,
            ms_p20=times[step].p20,
            ms_p80=times[step].p80,
            share=share(medians) if step == "chain" else None,
            ms_graph=in_graph.get(step),
            graph_share=share(in_graph) if step == "chain" else None,
            **SelectRow.origin(str(q.device), command),
        )
        for step in STEPS
    ]


def share(ms: Mapping[str, float | None]) -> float | None:
    """(selection + schedule) / forward; None where one of them is."""
    selection, schedule, forward = (ms[step] for step in ("selection", "schedule", "forward"))
    if selection is None or schedule is None or forward is None:
        return None
    return (selection + schedule) / forward


def graph_ms(call: Callable[[], object], device: torch.device, seconds: float) -> float | None:
    """Median time of the call as a CUDA graph; None on a CPU, or for one that waits for the GPU."""
    if device.type != "cuda":
        return None
    side = torch.cuda.Stream(device)
    side.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(side):
        call()
    torch.cuda.current_stream(device).wait_stream(side)
    try:
        torch.cuda.set_sync_debug_mode("error")
        call()
    except RuntimeError:
        return None
    finally:
        torch.cuda.set_sync_debug_mode("default")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return measure(graph.replay, device, seconds).median


def describe(rows: list[SelectRow]) -> str:
    """One line for a selector."""
    last = rows[-1]
    eager = "  ".join(f"{row.step} {row.ms_median:.3f}" for row in rows)
    text = f"{last.mask:58} density {last.density:.3f}  ms: {eager}  share {last.share:.3f}"
    graph = "  ".join(f"{row.step} {row.ms_graph:.3f}" for row in rows if row.ms_graph)
    if graph:
        text += f"\n    in a graph: {graph}"
    return text if last.graph_share is None else f"{text}  share {last.graph_share:.3f}"


@program("select")
def main(given: dict[str, Any], command: str) -> None:
    """Measures what the configuration asks for, prints it and appends it to the CSV."""
    measure_all(given, command)


def measure_all(given: dict[str, Any], command: str) -> list[SelectRow]:
    """The rows of the selectors of a configuration, which are also added to its CSV."""
    device = find_device(given["device"])
    names = ("batch", "heads", "seq_len", "head_dim", "dtype")
    batch, heads, seq_len, head_dim, dtype = (
        given[name] or default for name, default in zip(names, SHAPES[device.type], strict=True)
    )
    kv_heads = given["kv_heads"] or heads
    counts = {"batch": batch, "heads": heads, "seq_len": seq_len, "head_dim": head_dim}
    for name, value in (counts | {"kv_heads": kv_heads}).items():
        whole_number(name, value)
    choose("dtype", dtype, DTYPES)
    positive_number("density", given["density"])
    qkv = make_qkv(
        batch, heads, seq_len, seq_len, head_dim,
        kv_heads=kv_heads, dtype=DTYPES[dtype], device=device,
    )  # fmt: skip
    if given["selectors"]:
        selectors = [parse(text) for text in given["selectors"]]
    else:
        selectors = default_selectors(given["density"], seq_len, heads, kv_heads, head_dim)
    seconds = given["seconds"] or (0.15 if device.type == "cuda" else 0.5)
    positive_number("seconds", seconds)
    records = Records(given["csv"], SelectRow, allow_changes=given["allow_changes"])
    found: list[SelectRow] = []
    for selector in selectors:
        module = getattr(selector, "module", None)
        if module is not None:
            module.to(device)
        rows = run(selector, qkv, dtype, seconds, command)
        for row in rows:
            records.append(row)
        print(describe(rows), flush=True)
        found += rows
    return found


if __name__ == "__main__":
    main()
