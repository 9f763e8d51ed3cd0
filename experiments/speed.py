"""Measure the speed of block-sparse attention and its peers: one row per measurement.

    python -m experiments.speed
    python -m experiments.speed mask=local:256,butterfly,random:0.1 seq_len=16384 -m
    python -m experiments.speed 'providers=[cpu,my_module:MyAttention]'

What the file of rows holds already is not measured again, so the same command resumes a stopped
run. Cells whose rounds differ by more than 15 % are measured once more.
See docs/guide/measuring.md.
"""

import os
import sys
from typing import Any

from experiments.bench.run import KEY, Bench, chosen, in_rounds, run, unmeasured, unstable
from experiments.bench.tables import report
from experiments.bench.timing import busy
from experiments.bench.warm import warm
from experiments.common.checks import check_options
from experiments.common.devices import set_defaults
from experiments.common.files import write_text
from experiments.common.program import program
from experiments.common.rows import Rows


@program("speed")
def main(options: dict[str, Any], command: str) -> None:
    """Measure what the configuration asks for and print it as tables."""
    device = set_defaults(options, {"cuda": {"seconds": 0.15}, "cpu": {"seconds": 0.25}})
    check_options(options, positive="seconds warm_s", whole="rounds", least={"workers": 0})
    wanted = in_rounds(chosen(options, device), options["rounds"])
    if device.type == "cpu" and (used := busy() or 0) > 0.2 * (os.cpu_count() or 1):
        print(
            f"warning: other programs use {used:.1f} of {os.cpu_count()} cores: end them, or times"
            " and speed-ups will be off",
            file=sys.stderr,
        )
    allowed = {name: options[name] for name in ("fresh", "allow_changes")}
    rows = Rows(options["rows"], KEY, **allowed)
    if options["workers"]:
        missing = unmeasured(wanted, rows.origin(device, command), rows)
        left_out = set(missing) - set(warm(missing, device, options["workers"], options["warm_s"]))
        wanted = [what for what in wanted if what not in left_out]
    bench = Bench(device, options["seconds"])
    found = run(wanted, bench, rows, command)
    if len(found) == len(wanted) and (again := unstable(wanted, found)):
        print(f"{len(again)} measurements again: their rounds differ by more than 15 %")
        found += run(again, bench, rows, command, again=True)
    print("\n" + report(found, rows.rows))
    table, plots = rows.path.with_suffix(".txt"), rows.path.parent / "plots"
    write_text(table, report(rows.rows) + "\n", "rows")
    print(f"\nrows:  {rows.path}\ntable: {table}")
    print(f"plots: python -m experiments.plot rows={rows.path} out={plots}")


if __name__ == "__main__":
    main()
