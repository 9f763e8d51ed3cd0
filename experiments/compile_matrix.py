"""Compiles the kernels in use with every supported Triton, for GPUs that need not be there.

    python -m experiments.compile_matrix
    python -m experiments.compile_matrix 'tritons=[3.9.0]' 'targets=[sm_90a]' 'calls=head dim 128'
    python -m experiments.compile_matrix measure=false csv=docs/results/cpu/compile_matrix.csv.gz \\
        page=docs/results/compile_matrix.md

A CSV row for each variant: registers, spills, shared memory, serialised wgmma. Exit status 1 where
a kernel does not compile or is beyond its limits. See docs/guide/measuring.md.
"""

import sys
from pathlib import Path
from typing import Any

from experiments.bench.compile_matrix.calls import Call, hopper_calls, portable_calls
from experiments.bench.compile_matrix.chips import CHIPS, HOPPER
from experiments.bench.compile_matrix.rows import CompileRow
from experiments.bench.compile_matrix.run import folder_of, run
from experiments.bench.compile_matrix.table import page_tables, tables
from experiments.common.checks import as_list, at_least_one, choose
from experiments.common.files import beside, write_text
from experiments.common.program import program
from experiments.common.records import Records, read
from experiments.common.text_table import fill

CALLS = "experiments/bench/compile_matrix/calls.py"


@program("compile_matrix")
def main(options: dict[str, Any], command: str) -> None:
    """Compiles what the configuration asks for, and writes rows and tables."""
    path = Path(options["csv"])
    if options["measure"]:
        allowed = {name: options[name] for name in ("fresh", "allow_changes")}
        records = Records(path, CompileRow, **allowed)
        path, rows = records.path, compile_all(options, records, command)
    else:
        rows = read(path, CompileRow)
    if options["page"]:
        table = Path(options["page"])
        write_text(table, fill(table.read_text(), page_tables(rows)), "page")
    else:
        table = beside(path, ".md")
        write_text(table, tables(rows), "csv")
    print(f"rows: {path}\ntables: {table}")
    faults = [(row, fault) for row in rows for fault in row.faults()]
    for row, fault in faults:
        print(
            f"Triton {row.triton}, {row.target}, {row.kernel} ({row.backend}, {row.label}): {fault}"
        )
    if faults:
        sys.exit(1)


def compile_all(
    options: dict[str, Any], records: Records[CompileRow], command: str
) -> list[CompileRow]:
    """The rows that the configuration asks for; what `records` lacks is compiled."""
    targets = as_list(options["targets"])
    at_least_one(options, "targets tritons")
    for target in targets:
        choose("targets", target, CHIPS)
    wanted = str(options["calls"] or "")
    chosen = {target: _calls(target, wanted) for target in targets}
    if not any(chosen.values()):
        raise ValueError(f"calls is {wanted!r}, which no call has in its name: see {CALLS}")
    rows: list[CompileRow] = []
    for version in map(str, as_list(options["tritons"])):
        folder = folder_of(version, Path(options["tritons_dir"]))
        for target, calls in chosen.items():
            rows += run(version, folder, target, calls, records, command)
    return rows


def _calls(target: str, wanted: str) -> list[Call]:
    calls = hopper_calls() if target == HOPPER else []
    return [c for c in calls + portable_calls() if wanted in f"{c.backend} {c.label}"]


if __name__ == "__main__":
    main()
