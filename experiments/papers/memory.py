"""Activation memory and time of Llama layers, with and without activation checkpointing.

    python -m experiments.papers.memory
    python -m experiments.papers.memory 'lengths=[1024,4096]' dim=1024 hidden=2752 heads=16
    python -m experiments.papers.memory measure=false csv=docs/results/cpu/memory.csv

Standard attention and ours, each without checkpointing, with every layer checkpointed, and ours
with attention's out and LSE kept. Peaks of two depths give what a layer adds, beside the formula.
A context too long for the memory gets a row that says so. Rows that the CSV holds are not measured
again: the same command continues a run that stopped. See docs/results/memory.md.
"""

from pathlib import Path
from typing import Any

import torch

from experiments.bench.cases import DTYPES
from experiments.common.checks import check_options
from experiments.common.devices import set_defaults
from experiments.common.program import program
from experiments.common.records import Records
from experiments.papers.attention.memory_report import describe, draw, named, tables
from experiments.papers.attention.memory_run import base_row, measured
from experiments.papers.attention.resume import check_places, publish, resumed, tell
from experiments.papers.attention.rows import MemoryRow
from experiments.papers.attention.stack import ATTENTIONS, CHECKPOINTS, Sizes

DEFAULTS: dict[str, dict[str, Any]] = {
    "cuda": {
        "lengths": [2**i for i in range(10, 17)], "dim": 4096, "hidden": 11008, "heads": 32,
        "dtype": "bfloat16", "seconds": 0.3, "minutes": 9.0,
    },
    "cpu": {
        "lengths": [256, 512, 1024, 2048], "dim": 128, "hidden": 344, "heads": 4,
        "dtype": "float32", "seconds": 0.2, "minutes": 4.0,
    },
}  # fmt: skip


@program("memory", "experiments.papers.memory")
def main(options: dict[str, Any], command: str) -> None:
    """Measures what the options ask for, and writes table and figure."""
    path = Path(options["csv"])
    if options["measure"]:
        device = set_defaults(options, DEFAULTS)
        check(options)
        check_places(options, path)
        records = Records(path, MemoryRow, allow_changes=options["allow_changes"])
        rows = planned(options, device, command)
        seconds = options["seconds"]
        groups = (([row], lambda found: [measured(found[0], device, seconds)]) for row in rows)
        tell(resumed(groups, records, options["minutes"]), len(rows), describe)
    publish(path, MemoryRow, tables, draw, options, named)


def planned(options: dict[str, Any], device: torch.device, command: str) -> list[MemoryRow]:
    """The rows to measure, the short lengths first."""
    names = ("dim", "hidden", "heads", "dtype")
    return [
        base_row(
            Sizes(options["batch"], n, **{name: options[name] for name in names}),
            attention, checkpoint, options["layers"], device, command,
        )
        for n in sorted(options["lengths"])
        for attention in ATTENTIONS
        for checkpoint in CHECKPOINTS
        if (attention, checkpoint) != ("standard", "selective")
    ]  # fmt: skip


def check(options: dict[str, Any]) -> None:
    """Raises ValueError for options out of range."""
    check_options(
        options,
        lists="lengths",
        whole="batch dim hidden heads",
        least={"lengths": 16, "layers": 4},  # half of the layers: one alone is all edge
        positive="seconds minutes",
        choices={"dtype": DTYPES},
    )
    if options["dim"] % (2 * options["heads"]):
        raise ValueError(
            f"dim={options['dim']}: give a multiple of 2 * heads = {2 * options['heads']}, "
            "for rotary embeddings of whole pairs"
        )


if __name__ == "__main__":
    main()
