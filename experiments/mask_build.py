"""Measures the making of block masks: ours, FlexAttention's, and the schedule on a device.

    python -m experiments.mask_build
    python -m experiments.mask_build 'mask=[causal,local:256]' 'seq_len=[16384,1048576]'

Every measurement has a process of its own with one core; one CSV row each.
See docs/guide/measuring.md.
"""

from typing import Any

import torch

from experiments.bench.mask_build.child import BUILDERS
from experiments.bench.mask_build.run import run, table
from experiments.bench.rows import BuildRow
from experiments.common.checks import as_list, choose, positive_number, whole_number
from experiments.common.devices import find_device
from experiments.common.program import program
from experiments.common.records import Records


@program("mask_build")
def main(options: dict[str, Any], command: str) -> None:
    """Measures what the configuration asks for and prints it as a table."""
    torch.set_num_threads(1)
    device = find_device(options["device"])
    lengths = as_list(options["seq_len"])
    for length in lengths:
        whole_number("seq_len", length)
    whole_number("block_size", options["block_size"])
    for name in ("seconds", "limit_s", "limit_gib"):
        if name != "limit_gib" or options[name] is not None:
            positive_number(name, options[name])
    builders = as_list(options["builders"]) or [
        name for name in BUILDERS if name != "schedule" or device.type == "cuda"
    ]
    for name in builders:
        choose("builders", name, BUILDERS)
    allowed = {name: options[name] for name in ("fresh", "allow_changes")}
    records = Records(options["csv"], BuildRow, **allowed)
    rows = run(as_list(options["mask"]), lengths, builders, device, options, records, command)
    print("\n" + table(rows) + f"\n\nrows: {records.path}")


if __name__ == "__main__":
    main()
