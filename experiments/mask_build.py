"""Measures the making of block masks: ours, FlexAttention's, and the schedule on a device.

    python -m experiments.mask_build
    python -m experiments.mask_build 'mask=[causal,local:256]' 'seq_len=[16384,1048576]'

Every measurement has a process of its own with one core; one CSV row each.
See docs/guide/measuring.md.
"""

from typing import Any

import torch

import masks
from experiments.bench.mask_build.child import BUILDERS
from experiments.bench.mask_build.named_masks import GALLERY, OF_LENGTH, make
from experiments.bench.mask_build.run import run, table
from experiments.bench.rows import BuildRow
from experiments.common.checks import check_options
from experiments.common.devices import find_device
from experiments.common.program import program
from experiments.common.records import Records


@program("mask_build")
def main(options: dict[str, Any], command: str) -> None:
    """Measures what the configuration asks for and prints it as a table."""
    torch.set_num_threads(1)
    device = find_device(options["device"])
    check_options(
        options,
        lists="mask seq_len builders",
        optional="builders limit_gib",
        whole="seq_len block_size",
        positive="seconds limit_s limit_gib",
        choices={"builders": BUILDERS},
    )
    masks.causal().build(16, block_size=options["block_size"])
    names = [str(mask) for mask in options["mask"]]
    options["mask"] = [*GALLERY, *OF_LENGTH] if names == ["gallery"] else names
    for mask in options["mask"]:
        for n in options["seq_len"]:
            make(mask, n)  # an error of the text or the length, before anything is measured
    builders = options["builders"] or [
        name for name in BUILDERS if name != "schedule" or device.type == "cuda"
    ]
    allowed = {name: options[name] for name in ("fresh", "allow_changes")}
    records = Records(options["csv"], BuildRow, **allowed)
    rows = run(options["mask"], options["seq_len"], builders, device, options, records, command)
    print("\n" + table(rows) + f"\n\nrows: {records.path}")


if __name__ == "__main__":
    main()
