"""Time of attention where every query picks key blocks for itself, beside the same of others.

    python -m experiments.papers.picks
    python -m experiments.papers.picks 'lengths=[8192]' 'selectors=["nsa(16, 64)"]'
    python -m experiments.papers.picks measure=false csv=PATH

`picks` gives `sparseflash.attention` the lists, `selection` the same pairs as blocks with bits,
planned beforehand, and `causal` no selection at all. `fla` is the selected branch of NSA in
flash-linear-attention, `cudnn` that of cuDNN Frontend, where they are installed. Each passes a gate
against float64 first, output and gradients. Choosing the blocks is not part of the time; what a
kernel does with their lists is. Rows that the CSV holds are not measured again: the same command
continues a run that stopped. See docs/guide/selectors.md.
"""

from functools import partial
from pathlib import Path
from typing import Any

from experiments.bench.cases import DTYPES
from experiments.common.checks import check_options
from experiments.common.devices import set_defaults
from experiments.common.program import program
from experiments.common.records import Records, read
from experiments.papers.attention.resume import resumed, tell
from experiments.papers.picking.cases import Shape
from experiments.papers.picking.measure import Group, measured
from experiments.papers.picking.providers import PROVIDERS
from experiments.papers.picking.report import describe, tables
from experiments.papers.rows import PickRow

DEFAULTS: dict[str, dict[str, Any]] = {
    "cuda": {
        "lengths": [8192, 32768], "selectors": ["nsa(16, 64)", "moba(256, 4)"], "head_dim": 128,
        "dtype": "bfloat16", "providers": list(PROVIDERS), "seconds": 0.1,
    },
    "cpu": {
        "lengths": [512], "selectors": ["nsa(4, 32)", "moba(128, 2)"], "head_dim": 32,
        "dtype": "float32", "providers": ["picks", "causal"], "seconds": 0.1,
    },
}  # fmt: skip
HEADS = {"cuda": {True: (64, 4), False: (16, 16)}, "cpu": {True: (4, 1), False: (2, 2)}}  # NSA


@program("picks", "experiments.papers.picks")
def main(options: dict[str, Any], command: str) -> None:
    """Measures what the options ask for, and prints tables of the file of rows."""
    path = Path(options["csv"])
    if options["measure"]:
        device = set_defaults(options, DEFAULTS)
        groups = planned(options, device.type)
        records = Records(path, PickRow, allow_changes=options["allow_changes"])
        each = [
            (
                group.rows(device, command),
                partial(measured, group.shape, device, options["seconds"]),
            )
            for group in groups
        ]
        count = sum(len(rows) for rows, _ in each)
        tell(resumed(each, records, options["minutes"]), count, describe)
    print("\n" + tables(read(path, PickRow)))


def planned(options: dict[str, Any], device: str) -> list[Group]:
    """The groups of the options, short sequences first; ValueError for options out of range."""
    check_options(
        options,
        lists="lengths selectors providers",
        whole="batch head_dim rounds lengths",
        positive="seconds minutes",
        choices={"dtype": DTYPES, "providers": PROVIDERS},
    )
    found = []
    for n in sorted(options["lengths"]):
        for selector in options["selectors"]:
            usual = HEADS[device][str(selector).startswith("nsa")]
            heads, kv_heads = options["heads"], options["kv_heads"]
            if kv_heads is None:
                kv_heads = usual[1] if heads is None else heads
            heads = usual[0] if heads is None else heads
            sizes = options["batch"], heads, kv_heads, n, options["head_dim"], options["dtype"]
            shape = Shape(str(selector), *sizes)
            shape.check()
            found.append(Group(shape, tuple(options["providers"]), options["rounds"]))
    return found


if __name__ == "__main__":
    main()
