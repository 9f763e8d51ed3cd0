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

from experiments.bench import run as speed
from experiments.bench.tables import report
from experiments.common.files import write_text
from experiments.common.program import program
from experiments.studies.runner import Run


@program("speed", speed.Options)
def main(options: speed.Options, command: str) -> None:
    """Measure what the options ask for and print it as tables."""
    run = Run(speed, options, command)
    load, cores = os.getloadavg()[0], os.cpu_count() or 1
    if run.device.type == "cpu" and load > 0.2 * cores:
        print(
            f"warning: the load of this machine is {load:.1f} on {cores} cores: end other programs,"
            " or times and speed-ups will be off",
            file=sys.stderr,
        )
    found, rows = run.go(), run.rows
    print("\n" + report(found, rows.rows))
    table, plots = rows.path.with_suffix(".txt"), rows.path.parent / "plots"
    write_text(table, report(rows.rows) + "\n", "rows")
    print(f"\nrows:  {rows.path}\ntable: {table}")
    print(f"plots: python -m experiments.plot rows={rows.path} out={plots}")


if __name__ == "__main__":
    main()
