"""What the terms of the softmax cost: time of a call with a term over that without, same backend.

    python -m experiments.papers.term_costs
    python -m experiments.papers.term_costs 'head_dims=[128]' 'terms=[sink]' rounds=5
    python -m experiments.papers.term_costs measure=false csv=PATH

Sinks, soft-capping by a cap that few or most scores come near, slopes and the bias by distance,
forward and backward, and the row maxima, forward: dense and on a random mask. Every call passes a
gate against float64 first, with the gradients of the terms. Calls with and without take turns. Rows
that the CSV holds are not measured again. See docs/guide/attention.md.
"""

from functools import partial
from pathlib import Path
from typing import Any

import torch

from experiments.bench.cases import DENSE, DTYPES, Case
from experiments.common.checks import check_options
from experiments.common.devices import set_defaults
from experiments.common.program import program
from experiments.common.records import Records, read
from experiments.papers.attention.resume import resumed, tell
from experiments.papers.costs.calls import ALL, MAX, NONE, TERMS
from experiments.papers.costs.measure import BACKENDS, Group, measured, warm
from experiments.papers.costs.report import describe, table
from experiments.papers.rows import TermRow
from sparseflash.backends.nvidia import nvidia_capability

DEFAULTS: dict[str, dict[str, Any]] = {
    "cuda": {
        "batch": 2, "heads": 16, "seq_len": 8192, "head_dims": [64, 128], "dtype": "bfloat16",
        "block": 128, "seconds": 0.06, "workers": 12,
    },
    "cpu": {
        "batch": 1, "heads": 2, "seq_len": 512, "head_dims": [64], "dtype": "float32",
        "block": 64, "seconds": 0.1, "workers": 0,
    },
}  # fmt: skip


@program("term_costs", "experiments.papers.term_costs")
def main(options: dict[str, Any], command: str) -> None:
    """Measures what the options ask for, and prints the table of the file of rows."""
    path = Path(options["csv"])
    if options["measure"]:
        device = set_defaults(options, DEFAULTS)
        groups = planned(options, device)
        records = Records(path, TermRow, allow_changes=options["allow_changes"])
        each = [
            (group.rows(device, command), partial(measured, group, device, options["seconds"]))
            for group in groups
        ]
        left = [
            group
            for group, (rows, _) in zip(groups, each, strict=True)
            if any(records.find(row) is None for row in rows)
        ]
        if options["workers"] and left:
            warm(left, device, options["workers"])
        count = sum(len(rows) for rows, _ in each)
        tell(resumed(each, records, options["minutes"]), count, describe)
    print("\n" + table(read(path, TermRow)))


def planned(options: dict[str, Any], device: torch.device) -> list[Group]:
    """The groups of the options; ValueError for options out of range."""
    if options["kv_heads"] is None:
        options["kv_heads"] = options["heads"]
    check_options(
        options,
        lists="head_dims densities terms backends",
        optional="backends",
        whole="batch heads kv_heads seq_len block radius rounds",
        least={"workers": 0},
        positive="seconds minutes densities",
        choices={"terms": (*TERMS, ALL, MAX), "dtype": DTYPES, "backends": BACKENDS},
    )
    if max(options["densities"]) > 1:
        raise ValueError(f"densities={max(options['densities'])}: give shares of at most 1")
    backends = options["backends"] or default_backends(device)
    found = []
    for head_dim in options["head_dims"]:
        for density in options["densities"]:
            mask = DENSE
            if density < 1:
                mask = f"random_blocks({density}, block={options['block']})"
            block, n = options["block"] if density < 1 else 0, options["seq_len"]
            sizes = options["batch"], options["heads"], options["kv_heads"], n, n, head_dim
            case = Case(mask, *sizes, options["dtype"], block, block)
            if block:
                case.check()
            for backend in backends:
                wanted = [term for term in BACKENDS[backend] if term in options["terms"]]
                if wanted:
                    terms = (NONE, *wanted)
                    found.append(Group(case, backend, terms, options["radius"], options["rounds"]))
    if not found:
        names = ", ".join(options["terms"])
        raise ValueError(f"terms={names}: backends={', '.join(backends)} has none; give others")
    return found


def default_backends(device: torch.device) -> list[str]:
    """Those of the device that have terms."""
    if device.type != "cuda":
        return ["cpu"]
    return ["hopper", "triton"] if nvidia_capability(device) == (9, 0) else ["triton"]


if __name__ == "__main__":
    main()
