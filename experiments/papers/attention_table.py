"""Runtime and memory of attentions against length, in the shape of FlashAttention's appendix E.

    python -m experiments.papers.attention_table
    python -m experiments.papers.attention_table 'lengths=[1024,4096]' 'methods=[standard,flash]'
    python -m experiments.papers.attention_table head_dim=128 causal=true      # as in Figure 6
    python -m experiments.papers.attention_table 'variants=[dropout]'  # padding, plain, both
    python -m experiments.papers.attention_table measure=false csv=docs/results/cpu/lengths.csv.gz

Exact attentions pass a gate against float64 first. What runs out of memory, or would take too long,
gets a row with the reason. Rows that the CSV holds are not measured again: the same command goes on
where the last one stopped. See docs/results/attention_table.md.
"""

from pathlib import Path
from typing import Any

from experiments.bench.cases import DTYPES
from experiments.common.checks import check_options, share
from experiments.common.devices import set_defaults
from experiments.common.program import program
from experiments.common.records import Records
from experiments.papers.attention.length_report import describe, draw_all, named, tables
from experiments.papers.attention.lengths import Run, settings
from experiments.papers.attention.methods import CAUSAL, CPU_METHODS, GPU_METHODS, METHODS, VARIANTS
from experiments.papers.attention.resume import check_places, publish, tell
from experiments.papers.attention.rows import LengthRow

DEFAULTS: dict[str, dict[str, Any]] = {
    "cuda": {
        "lengths": [2**i for i in range(7, 21)], "variants": [*VARIANTS], "batch": 16, "heads": 8,
        "dtype": "bfloat16", "seconds": 0.05, "limit_s": 5.0, "minutes": 9.0,
    },
    "cpu": {
        "lengths": [2**i for i in range(7, 12)], "variants": ("plain", "both"), "batch": 1,
        "heads": 2, "dtype": "float32", "seconds": 0.03, "limit_s": 1.0, "minutes": 4.0,
    },
}  # fmt: skip


@program("attention_table", "experiments.papers.attention_table")
def main(options: dict[str, Any], command: str) -> None:
    """Measures what the options ask for, and writes table and figures."""
    path = Path(options["csv"])
    if options["measure"]:
        device = set_defaults(options, DEFAULTS)
        known = CPU_METHODS if device.type == "cpu" else GPU_METHODS
        if options["causal"]:
            known = tuple(name for name in known if METHODS[name].kind in CAUSAL)
        check(options)
        methods = options["methods"] or known
        wanted = settings(options, methods, options["dtype"])
        if not wanted:
            raise ValueError(f"peers_to={options['peers_to']}: all lengths are above; give more")
        check_places(options, path)
        records = Records(path, LengthRow, allow_changes=options["allow_changes"])
        run = Run(device, options["seconds"], options["limit_s"], records, command)
        tell(run.go(wanted, options["minutes"]), 3 * len(wanted), describe)
    publish(path, LengthRow, tables, draw_all, options, named)


def check(options: dict[str, Any]) -> None:
    """Raises ValueError for options out of range."""
    check_options(
        options,
        lists="methods lengths variants",
        optional="methods",
        whole="batch heads head_dim peers_to",
        least={"lengths": 16},
        positive="seconds limit_s minutes",
        choices={"methods": METHODS, "variants": VARIANTS, "dtype": DTYPES},
    )
    share("dropout", options["dropout"])


if __name__ == "__main__":
    main()
