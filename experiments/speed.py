"""Measures the speed of block-sparse attention and its peers: one CSV row per measurement.

    python -m experiments.speed
    python -m experiments.speed mask=local:256,butterfly,random:0.1 seq_len=16384 -m

What the CSV holds already is not measured again, so the same command resumes a stopped run.
See docs/guide/measuring.md.
"""

import os
import sys
from typing import Any

from experiments.bench.measure import Bench
from experiments.bench.reports.table import tables
from experiments.bench.rows import SpeedRow
from experiments.bench.speed_run import chosen, in_rounds, run, unmeasured
from experiments.bench.timing import busy
from experiments.bench.warm import warm
from experiments.common.checks import check_options
from experiments.common.devices import set_defaults
from experiments.common.files import beside, write_text
from experiments.common.program import program
from experiments.common.records import Records


@program("speed")
def main(options: dict[str, Any], command: str) -> None:
    """Measures what the configuration asks for and prints it as tables."""
    device = set_defaults(options, {"cuda": {"seconds": 0.15}, "cpu": {"seconds": 0.25}})
    check_options(options, positive="seconds warm_s", whole="rounds", least={"workers": 0})
    wanted = in_rounds(chosen(options, device), options["rounds"])
    allowed = {name: options[name] for name in ("fresh", "allow_changes")}
    if device.type == "cpu" and (used := busy() or 0) > 0.2 * (os.cpu_count() or 1):
        print(
            f"warning: other programs use {used:.1f} of {os.cpu_count()} cores: end them, or times"
            " and speed-ups will be off",
            file=sys.stderr,
        )
    records = Records(options["csv"], SpeedRow, **allowed)
    table = beside(records.path, ".txt")
    if options["workers"]:
        missing = unmeasured(wanted, device, records)
        left_out = set(missing) - set(warm(missing, device, options["workers"], options["warm_s"]))
        wanted = [what for what in wanted if what not in left_out]
    rows = run(wanted, Bench(device, options["seconds"]), records, command)
    print("\n" + tables(rows, records.rows))
    write_text(table, tables(records.rows) + "\n", "csv")
    print(f"\nrows:  {records.path}\ntable: {table}")
    plots = records.path.parent / "plots"
    print(f"plots: python -m experiments.plot csv={records.path} out={plots}")


if __name__ == "__main__":
    main()
