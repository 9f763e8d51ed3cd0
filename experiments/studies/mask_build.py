"""Time and memory of making block masks, and of their schedules on the device.

`masks` goes from an expression to its `BlockMask`, without the cache, and `schedule` from that to
lists on the device. FlexAttention's `create_block_mask` is measured by the study packed_masks.
"""

import tracemalloc
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

import masks
from experiments.bench.step import MIB, measure
from experiments.common.rows import Found, Row
from experiments.common.tables import markdown, pivot
from experiments.studies import runner
from experiments.studies.runner import Run, choices, grid, timed
from masks.build import cache
from sparseflash.schedule.blocks import to_device

KEY = ("builder", "seq_len", "block")
BUILDERS = ("masks", "schedule")
DOCUMENTS = "documents & causal"  # of random lengths, 2,000 tokens in the mean
STRUCTURED = "local:256+butterfly:128+global:64"
MASKS = ("causal", "local:256", STRUCTURED, f"({STRUCTURED})*causal", DOCUMENTS, "random:0.01")


@dataclass(kw_only=True)
class Options(runner.Options):
    seconds: float = 0.5
    mask: list[str] = field(default_factory=lambda: [*MASKS])  # texts of masks.parse
    lengths: list[int] = field(default_factory=lambda: [4096, 65536, 1048576])
    block: int = 128  # tokens of a block
    builders: list[str] = field(default_factory=lambda: [*BUILDERS])


def mask_of(text: str, n: int) -> masks.Mask:
    """Return the mask of a text for n tokens."""
    if text != DOCUMENTS:
        return masks.parse(text)
    drawn = 1 + np.random.default_rng(0).exponential(2000, n // 100 + 100).astype(int)
    ends = np.minimum(np.cumsum(drawn), n)
    return masks.documents(np.diff(np.unique(ends), prepend=0)) & masks.causal()


def cases(run: Run) -> list[Found]:
    o = run.options
    choices(o, builders=BUILDERS)
    found = grid(mask=o.mask, seq_len=sorted(o.lengths), block=o.block)
    for case in found:
        mask_of(case.mask, case.seq_len)
    return found


def ways(case: Found, run: Run) -> list[Row]:
    return [{"builder": name} for name in run.options.builders]


def opened(case: Found, run: Run) -> Callable[[Row], Row]:
    mask, device = mask_of(case.mask, case.seq_len), run.device
    heads = 1 if mask.period == 0 else None  # a head of many, or as many as repeat

    def build() -> masks.BlockMask:
        cache.clear()
        return mask.build(case.seq_len, block_size=case.block, heads=heads)

    tracemalloc.start()
    blocks = build()
    peak = tracemalloc.get_traced_memory()[1] / MIB
    tracemalloc.stop()
    counts = {"density": blocks.density, "nnz": blocks.nnz}
    counts |= {"runs": len(blocks.starts), "tiles": len(blocks.bits)}

    def one(row: Row) -> Row:
        if row["builder"] == "masks":
            times = measure(build, torch.device("cpu"), run.options.seconds)
            return counts | {"peak_mib": peak} | times._asdict()
        times = measure(lambda: to_device(blocks, device), device, run.options.seconds)
        return counts | times._asdict()

    return one


def tables(frame: Any) -> dict[str, str]:
    """Return the milliseconds of each builder: masks down, tokens across."""
    rows = timed(frame, KEY).sort_values("seq_len", kind="stable")
    table = pivot(rows, ["builder", "mask"], "seq_len", lambda g: f"{g.ms_median.median():.3g}")
    return {"builders": markdown(table, left=(0, 1))}
