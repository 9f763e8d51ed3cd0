"""Time of making packed masks next to the attention that they serve.

    python -m experiments.papers.packed_masks
    python -m experiments.papers.packed_masks 'seq_lens=[32768]' 'kinds=[tree]' documents=64

Documents with causal attention, with a window or with a shared prefix, trees of prefixes, and block
diffusion: our mask and FlexAttention's create_block_mask, each eager and, for the kinds in
`compiled`, compiled. Both must have equally many blocks before they are timed. `share` is the time
of the mask over that of attention forward and backward. On a GPU, masks are also captured in a CUDA
graph.
"""

from collections.abc import Callable
from itertools import product
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_block_mask

import sparseflash
from experiments.bench.cases import DTYPES
from experiments.bench.timing import graph_ms, measure
from experiments.common.checks import as_list, check_options, choose
from experiments.common.devices import set_defaults
from experiments.common.program import program
from experiments.common.records import OK, Records
from experiments.papers.packed_kinds import KINDS
from experiments.papers.rows import PackedRow
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
    device = set_defaults(options, DEFAULTS)
    options["compiled"] = as_list(options["compiled"])  # of none, too
    check_options(
        options,
        lists="seq_lens kinds",
        whole="seq_lens documents batch heads head_dim",
        positive="seconds",
        choices={"dtype": DTYPES, "kinds": KINDS},
    )
    for name in options["compiled"]:
        choose("compiled", name, KINDS)
    for n in options["seq_lens"]:
        if n % 2 and "diffusion" in options["kinds"]:
            raise ValueError(f"seq_lens={n}: give even numbers, for the two copies of diffusion")
    whole = {name: options[name] for name in ("documents", "batch", "heads", "head_dim")}
    records = Records(options["csv"], PackedRow, allow_changes=options["allow_changes"])
    for n, name in product(options["seq_lens"], options["kinds"]):
        case = name, n, whole, options["dtype"], device
        for row in rows(*case, options["seconds"], command, name in options["compiled"]):
            records.append(row)
            shares = (row.ms_median, row.share, row.ms_graph, row.graph_share)
            numbers = (f"{x:9.4f}" if x else " " * 9 for x in shares)
            print(f"{n:6} {row.mask:32} {row.step:30}", *numbers, flush=True)


def rows(
    name: str, n: int, sizes: dict[str, int], dtype: str, device: torch.device, seconds: float,
    command: str, compiled: bool,
) -> list[PackedRow]:  # fmt: skip
    """The rows of one kind and length: attention first, then the masks."""
    kind = KINDS[name]
    batch, heads, head_dim = (sizes[name] for name in ("batch", "heads", "head_dim"))
    q, k, v = make_qkv(
        batch, heads, n, n, head_dim, dtype=DTYPES[dtype], device=device, requires_grad=True
    )
    numbers = kind.given(n, sizes["documents"], np.random.default_rng(0))
    given = torch.tensor(numbers, dtype=torch.int32, device=device)
    found = kind.ours(given, n)

    def ours(given: Tensor):
        return sparseflash.plan(kind.ours(given, n), q, k, v)

    def flex(given: Tensor) -> BlockMask:
        where = given.device.type
        return create_block_mask(kind.theirs(given, n), None, None, n, n, device=where)

    blocks, theirs = int((found.codes != -2).sum()), flex_blocks(flex(given))
    if blocks != theirs:
        raise ValueError(f"{blocks} blocks here, {theirs} of create_block_mask: they must agree")
    plan, dout = ours(given), torch.randn_like(q)

    def attend() -> object:
        return torch.autograd.grad(sparseflash.attention(q, k, v, plan), (q, k, v), dout)

    def timed(step: str, call: Callable[[], object], serves: PackedRow | None) -> PackedRow:
        times = measure(call, device, seconds)
        graph = None if serves is None else graph_ms(call, device, seconds)
        attention = serves.ms_median if serves else None
        return PackedRow(
            mask=kind.text, density=found.density().item(), status=OK, step=step, n=n,
            dtype=dtype, **sizes, **times._asdict(), ms_graph=graph,
            share=times.ms_median / attention if attention else None,
            graph_share=graph / attention if graph and attention else None,
            **PackedRow.origin(str(device), command),
        )  # fmt: skip

    made = [timed("attention", attend, None)]
    torch._dynamo.reset()  # or the eighth case would be over its recompilation limit
    makers: dict[str, Callable[[Tensor], object]] = {
        "packed mask and plan": ours,
        "create_block_mask": flex,
    }
    for step, make in makers.items():
        calls = {step: make}
        if compiled:
            calls[f"{step}, compiled"] = torch.compile(make)
        for way, call in calls.items():
            made.append(timed(way, lambda call=call: call(given), made[0]))
    return made


def flex_blocks(mask: BlockMask) -> int:
    """Non-empty blocks."""
    full = mask.full_kv_num_blocks
    return int(mask.kv_num_blocks.sum()) + (0 if full is None else int(full.sum()))


if __name__ == "__main__":
    main()
