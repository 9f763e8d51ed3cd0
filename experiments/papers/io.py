"""FLOPs, bytes and time of forward and backward, in the shape of FlashAttention's Figure 2.

    python -m experiments.papers.io
    python -m experiments.papers.io 'parts=[sparsity]' sparse_n=8192
    python -m experiments.papers.io measure=false csv=docs/results/cpu/io.csv

Every attention at the shape of GPT-2 medium, ours against the block size of the mask, and ours
against sparsity. On a GPU, Nsight Compute counts the bytes where it may, in one process for all
rows. Each passes a gate against float64 first. Rows that the CSV holds are not measured again: the
same command continues a run that stopped. See docs/results/io.md.
"""

from pathlib import Path
from typing import Any

from experiments.bench.cases import DTYPES
from experiments.common.checks import check_options
from experiments.common.devices import set_defaults
from experiments.common.program import program
from experiments.common.records import OK, Records
from experiments.papers.attention.io_report import describe, draw, named, tables
from experiments.papers.attention.io_run import PARTS, Counts, measured, plan
from experiments.papers.attention.methods import METHODS
from experiments.papers.attention.resume import check_places, publish, resumed, tell
from experiments.papers.attention.rows import IoRow

DEFAULTS: dict[str, dict[str, Any]] = {
    "cuda": {
        "methods": ["standard", "compiled", "sdpa_flash", "sdpa_cudnn", "flash"], "batch": 64,
        "heads": 16, "dtype": "bfloat16", "seconds": 0.15, "sparse_n": 4096, "sparse_block": 128,
        "minutes": 9.0,
    },
    "cpu": {
        "methods": ["standard", "compiled", "sdpa", "flash"], "batch": 1, "heads": 4,
        "dtype": "float32", "seconds": 0.3, "sparse_n": 2048, "sparse_block": 64,
        "minutes": 4.0,
    },
}  # fmt: skip
SHAPE = ("batch", "heads", "n", "head_dim", "dtype")
DENSE_ONLY = tuple(name for name, method in METHODS.items() if method.exact and not method.mask)


@program("io", "experiments.papers.io")
def main(options: dict[str, Any], command: str) -> None:
    """Measures what the options ask for, and writes table and figure."""
    path = Path(options["csv"])
    if options["measure"]:
        device = set_defaults(options, DEFAULTS)
        check(options)
        shape = {name: options[name] for name in SHAPE}
        wanted = plan(options["parts"], options["methods"], shape, options)
        check_places(options, path)
        records = Records(path, IoRow, allow_changes=options["allow_changes"])
        rows = {what: what.row(device, command) for what in wanted}
        known = {what: records.find(row) for what, row in rows.items()}
        lacking = [what for what, row in known.items() if row is None or row.status != OK]
        lacking = [what for what in lacking if not what.setting().unsupported(device)]
        seconds = options["seconds"]
        counts = Counts(lacking) if device.type == "cuda" else None
        groups = (
            ([row], lambda rows, what=what: [measured(what, rows[0], device, seconds, counts)])
            for what, row in rows.items()
        )
        tell(resumed(groups, records, options["minutes"]), len(wanted), describe)
    publish(path, IoRow, tables, draw, options, named)


def check(options: dict[str, Any]) -> None:
    """Raises ValueError for options out of range."""
    methods = [name for name in DENSE_ONLY if name != "sparse"]
    check_options(
        options,
        lists="parts methods blocks densities",
        whole="batch heads n head_dim sparse_n sparse_block",
        positive="seconds density densities minutes",
        choices={"parts": PARTS, "methods": methods, "dtype": DTYPES},
    )


if __name__ == "__main__":
    main()
