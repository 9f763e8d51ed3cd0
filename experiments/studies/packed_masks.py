"""Time of making packed masks next to the attention that they serve.

Documents with causal attention, with a window or with a shared prefix, trees of prefixes, and block
diffusion: our mask and FlexAttention's create_block_mask, each eager and, for the kinds in
`compiled`, compiled. Both must have equally many blocks before they are timed. On a GPU, masks are
also captured in a CUDA graph. See docs/guide/packed.md.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_block_mask

import sparseflash
from experiments.bench.cases import DTYPES
from experiments.bench.step import graph_ms, measure
from experiments.common.rows import OK, Found, Row, found, last_versions
from experiments.common.tables import MISSING, markdown
from experiments.studies import runner
from experiments.studies.runner import Run, both, choices, grid
from sparseflash import packed
from sparseflash.dynamic.selection import Selection
from sparseflash.testing import make_qkv

KEY = "step n documents batch heads head_dim dtype".split()
WINDOW, SIZE = 1024, 32  # tokens that a query sees, and of a block of diffusion
ATTENTION, OURS, FLEX = "attention", "packed mask and plan", "create_block_mask"
Seen = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


@dataclass(kw_only=True)
class Options(runner.Options):
    lengths: list[int] = both([8192, 16384, 32768], [1024])  # tokens
    kinds: list[str] = field(default_factory=lambda: [*KINDS])
    compiled: list[str] = field(default_factory=lambda: ["documents"])  # kinds timed so as well
    documents: int = 16  # in a sequence, of random lengths; nodes of a tree
    batch: int = 1
    heads: int = both(16, 2)
    head_dim: int = both(128, 64)
    dtype: str = both("bfloat16", "float32")
    seconds: float = both(0.15, 0.3)


class Kind(NamedTuple):
    """One kind of mask; the tensor that both ways are made from lies on the device."""

    text: str  # as rows have it
    given: Callable[[int, int, np.random.Generator], np.ndarray]  # of n tokens and documents
    ours: Callable[[Tensor, int], Selection]
    theirs: Callable[[Tensor, int], Seen]  # a mask_mod


def _offsets(n: int, documents: int, rng: np.random.Generator) -> np.ndarray:
    return np.array([0, *np.sort(rng.integers(0, n + 1, documents - 1)), n])


def _walk(n: int, documents: int, rng: np.random.Generator) -> np.ndarray:
    """Return enter and leave of a random tree with that many nodes."""
    enter = _offsets(n, documents, rng)[:-1]
    leave, path = np.full(len(enter), n), [0]
    for node in range(1, len(enter)):
        depth = int(rng.integers(1, len(path) + 1))
        leave[path[depth:]] = enter[node]
        path = [*path[:depth], node]
    return np.stack([enter, leave])


def _numbers(starts: Tensor, n: int) -> Tensor:
    """Return the document of every token."""
    token = torch.arange(n, dtype=starts.dtype, device=starts.device)
    return torch.searchsorted(starts.contiguous(), token, right=True) - 1


def _causal(offsets: Tensor, n: int, window: int | None = None, shared: bool = False) -> Seen:
    document = _numbers(offsets[:-1], n)

    def seen(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        same = document[q] == document[k]
        same = (same | (document[k] == 0)) if shared else same
        return same & (q >= k) & (q - k < (window or n))

    return seen


def _tree(walk: Tensor, n: int) -> Seen:
    last = walk[1][_numbers(walk[0], n)]
    return lambda b, h, q, k: (q >= k) & (q < last[k])


def _diffusion(offsets: Tensor, n: int) -> Seen:
    document = _numbers(offsets[:-1], n // 2)
    block = (torch.arange(n // 2, device=offsets.device) - offsets[document]) // SIZE
    document, block = document.repeat(2), block.repeat(2)

    def seen(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        own = ((q < n // 2) == (k < n // 2)) & (block[q] == block[k])
        return (document[q] == document[k]) & (own | ((k >= n // 2) & (block[k] < block[q])))

    return seen


def _of_documents(text: str, window: int | None = None, shared: bool = False) -> Kind:
    how = {"shared": shared, "causal": True} if window is None else {"window": (window - 1, 0)}
    return Kind(
        text, _offsets, lambda given, n: packed.documents(given, n, **how),  # type: ignore[arg-type]
        lambda given, n: _causal(given, n, window, shared),
    )  # fmt: skip


KINDS = {
    "documents": _of_documents("documents & causal"),
    "sliding": _of_documents(f"documents & sliding({WINDOW})", WINDOW),
    "shared": _of_documents("shared_prefix & causal", shared=True),
    "tree": Kind(
        "prefix_tree", _walk, lambda given, n: packed.prefix_tree(given[0], given[1], n), _tree
    ),
    "diffusion": Kind(
        f"documents & block_diffusion({SIZE})",
        lambda n, documents, rng: _offsets(n // 2, documents, rng),
        lambda given, n: packed.block_diffusion(given, n, SIZE), _diffusion,
    ),
}  # fmt: skip


def cases(run: Run) -> list[Found]:
    o = run.options
    choices(o, kinds=KINDS, compiled=KINDS, dtype=DTYPES)
    if any(n % 2 for n in o.lengths) and "diffusion" in o.kinds:
        raise ValueError(f"lengths={o.lengths}: give even numbers, for the two copies of diffusion")
    texts = [KINDS[kind].text for kind in o.kinds]
    return grid(o, "documents batch heads head_dim dtype", n=o.lengths, mask=texts)


def ways(case: Found, run: Run) -> list[Row]:
    compiled = case.mask in (KINDS[kind].text for kind in run.options.compiled)
    more = ("", ", compiled") if compiled else ("",)
    steps = [ATTENTION, *(f"{step}{end}" for step in (OURS, FLEX) for end in more)]
    return [{"step": step} for step in steps]


def opened(case: Found, run: Run) -> Callable[[Row], dict[str, Any]]:
    n, device, seconds = case.n, run.device, run.options.seconds
    kind = next(kind for kind in KINDS.values() if kind.text == case.mask)
    sizes = case.batch, case.heads, n, n, case.head_dim
    q, k, v = make_qkv(*sizes, dtype=DTYPES[case.dtype], device=device, requires_grad=True)
    numbers = kind.given(n, case.documents, np.random.default_rng(0))
    given = torch.tensor(numbers, dtype=torch.int32, device=device)
    selection = kind.ours(given, n)

    def ours(given: Tensor) -> object:
        return sparseflash.plan(kind.ours(given, n), q, k, v)

    def flex(given: Tensor) -> BlockMask:
        where = given.device.type
        return create_block_mask(kind.theirs(given, n), None, None, n, n, device=where)

    blocks, theirs = int((selection.codes != -2).sum()), flex_blocks(flex(given))
    if blocks != theirs:
        raise ValueError(f"{blocks} blocks here, {theirs} of create_block_mask: they must agree")
    plan: Any = ours(given)
    dout = torch.randn_like(q)
    torch._dynamo.reset()  # or the eighth case would be over its recompilation limit

    def attention(given: Tensor) -> object:
        return torch.autograd.grad(sparseflash.attention(q, k, v, plan), (q, k, v), dout)

    def one(row: Row) -> dict[str, Any]:
        name, _, compiled = row["step"].partition(", ")
        make: Any = {ATTENTION: attention, OURS: ours, FLEX: flex}[name]
        call = partial(torch.compile(make) if compiled else make, given)
        graph = None if name == ATTENTION else graph_ms(call, device, seconds)
        times = measure(call, device, seconds)
        return {**times._asdict(), "density": selection.density().item(), "ms_graph": graph}

    return one


def flex_blocks(mask: BlockMask) -> int:
    """Return the number of non-empty blocks."""
    full = mask.full_kv_num_blocks
    return int(mask.kv_num_blocks.sum()) + (0 if full is None else int(full.sum()))


def tables(frame: Any) -> dict[str, str]:
    """Return the masks of each length beside their attention, milliseconds and percent of it."""
    head = ["tokens", "mask", "attention", "mask and plan", "in a CUDA graph", "of attention, %"]
    lines = [[*head, "`create_block_mask`", "in a CUDA graph", "block density, %"]]
    by_step: dict[tuple, dict[str, Any]] = {}
    for row in found(last_versions(frame[frame.status == OK], KEY)):
        what = tuple(row[name] for name in (*KEY[1:], "mask", "device"))
        by_step.setdefault(what, {})[row.step] = row
    for steps in by_step.values():
        for end in ("", ", compiled"):
            if not (own := steps.get(OURS + end)) or not (flex := steps.get(FLEX + end)):
                continue
            times = (own.ms_median, own.ms_graph, flex.ms_median, flex.ms_graph)
            ours, graph, theirs, other = (MISSING if t is None else f"{t:.3g}" for t in times)
            attention = steps[ATTENTION].ms_median
            share = f"{100 * (own.ms_graph or own.ms_median) / attention:.1f}"
            name = f"`{own['mask']}`{', `torch.compile`' if end else ''}"
            density = f"{100 * own.density:.1f}"
            lines.append([f"{own.n:,}", name, f"{attention:.2f}", ours, graph, share, theirs,
                          other, density])  # fmt: skip
    return {"packed": markdown(lines, left=(1,))}
