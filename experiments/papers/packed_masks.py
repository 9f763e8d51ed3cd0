"""Time of making the mask of packed documents next to the attention that it serves.

    python -m experiments.papers.packed_masks
    python -m experiments.papers.packed_masks 'seq_lens=[32768]' documents=64

Causal attention within documents: our mask and FlexAttention's create_block_mask, each eager and
compiled. Both must have equally many blocks before they are timed. `share` is the time of the mask
over that of attention forward and backward. On a GPU, masks are also captured in a CUDA graph.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_block_mask

import sparseflash
from experiments.bench.cases import DTYPES
from experiments.bench.timing import graph_ms, measure
from experiments.common.checks import as_list, choose, positive_number, whole_number
from experiments.common.devices import find_device
from experiments.common.program import program
from experiments.common.records import OK, Records
from experiments.papers.rows import PackedRow
from sparseflash import packed
from sparseflash.testing import make_qkv

DEFAULTS = {
    "cuda": {
        "seq_lens": [8192, 16384, 32768], "heads": 16, "head_dim": 128, "dtype": "bfloat16",
        "seconds": 0.15,
    },
    "cpu": {"seq_lens": [1024], "heads": 2, "head_dim": 64, "dtype": "float32", "seconds": 0.3},
}  # fmt: skip


@program("packed_masks", "experiments.papers.packed_masks")
def main(options: dict[str, Any], command: str) -> None:
    """Measures what the configuration asks for, prints it and appends it to the CSV."""
    device = find_device(options["device"])
    for name, value in DEFAULTS[device.type].items():
        options[name] = value if options[name] is None else options[name]
    choose("dtype", options["dtype"], DTYPES)
    lengths = as_list(options["seq_lens"])
    whole = {name: options[name] for name in ("documents", "batch", "heads", "head_dim")}
    for name, value in [*whole.items(), *(("seq_lens", n) for n in lengths)]:
        whole_number(name, value)
    positive_number("seconds", options["seconds"])
    records = Records(options["csv"], PackedRow, allow_changes=options["allow_changes"])
    for n in lengths:
        for row in rows(n, whole, options["dtype"], device, options["seconds"], command):
            records.append(row)
            shares = (row.ms_median, row.share, row.ms_graph, row.graph_share)
            print(f"{n:6} {row.step:30}", *(f"{x:9.4f}" if x else " " * 9 for x in shares))


def rows(
    n: int, sizes: dict[str, int], dtype: str, device: torch.device, seconds: float, command: str
) -> list[PackedRow]:
    """The rows of one length: attention first, then the masks."""
    batch, heads, head_dim = (sizes[name] for name in ("batch", "heads", "head_dim"))
    q, k, v = make_qkv(
        batch, heads, n, n, head_dim, dtype=DTYPES[dtype], device=device, requires_grad=True
    )
    cuts = np.sort(np.random.default_rng(0).integers(0, n + 1, sizes["documents"] - 1))
    cu_seqlens = torch.tensor([0, *cuts, n], dtype=torch.int32, device=device)
    found = packed.documents(cu_seqlens, n, causal=True)
    blocks, theirs = int((found.codes != -2).sum()), flex_blocks(flex_mask(cu_seqlens, n))
    if blocks != theirs:
        raise ValueError(f"{blocks} blocks here, {theirs} of create_block_mask: they must agree")

    def ours(cu_seqlens: Tensor):
        return sparseflash.plan(packed.documents(cu_seqlens, n, causal=True), q, k, v)

    def flex(cu_seqlens: Tensor) -> BlockMask:
        return flex_mask(cu_seqlens, n)

    plan, dout = ours(cu_seqlens), torch.randn_like(q)

    def attend() -> object:
        return torch.autograd.grad(sparseflash.attention(q, k, v, plan), (q, k, v), dout)

    def timed(step: str, call: Callable[[], object], serves: PackedRow | None) -> PackedRow:
        times = measure(call, device, seconds)
        graph = None if serves is None else graph_ms(call, device, seconds)
        attention = serves.ms_median if serves else None
        return PackedRow(
            mask="documents & causal", density=found.density().item(), status=OK, step=step, n=n,
            dtype=dtype, **sizes, **times._asdict(), ms_graph=graph,
            share=times.ms_median / attention if attention else None,
            graph_share=graph / attention if graph and attention else None,
            **PackedRow.origin(str(device), command),
        )  # fmt: skip

    made = [timed("attention", attend, None)]
    for name, make in (("packed.documents and plan", ours), ("create_block_mask", flex)):
        compiled = torch.compile(make)
        for step, call in ((name, make), (f"{name}, compiled", compiled)):
            made.append(timed(step, lambda call=call: call(cu_seqlens), made[0]))
    return made


def flex_mask(cu_seqlens: Tensor, n: int) -> BlockMask:
    """The same mask by FlexAttention."""
    token = torch.arange(n, dtype=torch.int32, device=cu_seqlens.device)
    document = torch.searchsorted(cu_seqlens[1:], token, right=True)

    def seen(b: Tensor, h: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (document[query] == document[key]) & (query >= key)

    return create_block_mask(seen, None, None, n, n, device=cu_seqlens.device.type)


def flex_blocks(mask: BlockMask) -> int:
    """Non-empty blocks."""
    full = mask.full_kv_num_blocks
    return int(mask.kv_num_blocks.sum()) + (0 if full is None else int(full.sum()))


if __name__ == "__main__":
    main()
