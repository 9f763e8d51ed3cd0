"""The cost of selecting blocks at run time, step by step, beside the attention that it saves."""

import ast
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

import masks
import sparseflash
from experiments.bench.rows import SelectRow
from experiments.bench.timing import graph_ms, measure
from experiments.common.files import reason
from experiments.common.records import OK
from sparseflash import select
from sparseflash.schedule import Schedule
from sparseflash.select.schedule import schedule_from_selection

SELECTORS = ("top_k", "mass", "antidiagonal", "gate", "moba", "nsa")
STEPS = ("selection", "schedule", "forward", "backward", "chain")


def default_selectors(density: float, seq_len: int, heads: int, kv_heads: int, head_dim: int):
    """One of each kind, with about this share of the key blocks where the kind has such a knob."""
    causal, share = masks.causal(), float(density)
    chunk = max(128, seq_len // 64 // 128 * 128)

    def blocks(size: int) -> int:
        return max(1, round(density * seq_len / size))

    gate = select.Gate(heads, head_dim, kv_heads, block_size=128)
    return [
        select.top_k(share),
        select.top_k(share, "max"),
        select.top_k(share, "bound"),
        select.top_k(share, within=causal, always=masks.local(0)),
        select.mass(0.9, max_blocks=blocks(128)),
        select.antidiagonal(16, 0.9, max_blocks=blocks(128)),
        select.antidiagonal(64, 0.9, max_blocks=blocks(128)),
        select.gate(gate, share),
        select.moba(chunk, blocks(chunk), union=True),
        select.nsa(blocks(64), union=True),
    ]


def parse(text: str) -> select.Selector:
    """Return the selector of a call such as `top_k(0.1, within=causal())`.

    Arguments are constants, masks, and `Gate(...)` of constants. Raise ValueError for another text.
    """
    try:
        return _call(ast.parse(text, mode="eval").body, SELECTORS)
    except (SyntaxError, TypeError, ValueError, RecursionError, MemoryError) as error:
        raise ValueError(
            f"selectors: {text!r} is no selector ({reason(error)}); "
            "give a call of sparseflash.select, such as top_k(0.1)"
        ) from error


def _call(node: ast.AST, names: tuple[str, ...]) -> Any:
    match node:
        case ast.Call(ast.Name(name), args, keywords) if name in names:
            named = {str(keyword.arg): _argument(keyword.value) for keyword in keywords}
            return getattr(select, name)(*map(_argument, args), **named)
    raise ValueError(f"choose from {', '.join(names)}")


def _argument(node: ast.expr) -> Any:
    """A constant, a gate, or a mask."""
    try:
        return ast.literal_eval(node)
    except ValueError:
        is_gate = isinstance(node, ast.Call) and ast.unparse(node.func) == "Gate"
        return _call(node, ("Gate",)) if is_gate else masks.parse(ast.unparse(node))


def steps(
    selector: select.Selector, q: Tensor, k: Tensor, v: Tensor
) -> tuple[select.Selection, dict[str, Callable[[], object]]]:
    """A selection, and what is timed."""
    q, k, v = (t.detach().requires_grad_() for t in (q, k, v))
    extents = (q.shape[2], k.shape[2], q.shape[0], q.shape[1], q.device)
    selection = selector(q, k)

    def schedule() -> Schedule:
        return schedule_from_selection(selection, *extents)

    def attend(mask: Schedule | select.Selection) -> Tensor:
        out = sparseflash.attention(q, k, v, mask)
        assert isinstance(out, Tensor)
        return out

    made = schedule()
    out, dout = attend(made), torch.randn_like(q)
    calls = {
        "selection": lambda: selector(q, k),
        "schedule": schedule,
        "forward": torch.no_grad()(lambda: attend(made)),
        "backward": lambda: torch.autograd.grad(out, (q, k, v), dout, retain_graph=True),
        "chain": torch.no_grad()(lambda: attend(selector(q, k))),
    }
    return selection, calls


def run(
    selector: select.Selector, qkv: tuple[Tensor, ...], dtype: str, seconds: float, command: str
) -> list[SelectRow]:
    """The rows of one selector."""
    q, k, v = qkv
    selection, calls = steps(selector, q, k, v)
    times = {step: measure(calls[step], q.device, seconds) for step in STEPS}
    medians = {step: times[step].ms_median for step in STEPS}
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
            **times[step]._asdict(),
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


def describe(rows: list[SelectRow]) -> str:
    """One line for a selector."""
    last = rows[-1]
    eager = "  ".join(f"{row.step} {row.ms_median:.3f}" for row in rows)
    text = f"{last.mask:58} density {last.density:.3f}  ms: {eager}  share {last.share:.3f}"
    graph = "  ".join(f"{row.step} {row.ms_graph:.3f}" for row in rows if row.ms_graph)
    if graph:
        text += f"\n    in a graph: {graph}"
    return text if last.graph_share is None else f"{text}  share {last.graph_share:.3f}"
