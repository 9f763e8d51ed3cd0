"""Measures the speed of block-sparse attention and its peers: one CSV row per measurement.

    python -m experiments.speed
    python -m experiments.speed mask=local:256,butterfly,random:0.1 seq_len=16384 -m

What the CSV holds already is not measured again, so a run that was stopped goes on where it was.
See docs/guide/measuring.md.
"""

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import torch

from experiments.bench.cases import Case, make_grid
from experiments.bench.grids import GRIDS
from experiments.bench.loop import Bench, Task
from experiments.bench.providers import DIRECTIONS, concerns, default_providers, find
from experiments.bench.rows import SpeedRow
from experiments.bench.speed_table import newest, tables
from experiments.bench.warm import breaks_context, warm
from experiments.common.checks import as_list, choose, positive_number, whole_number
from experiments.common.devices import find_device
from experiments.common.program import program
from experiments.common.records import OK, Records


def plan(cases: Sequence[Case], providers: Sequence[str], directions: Sequence[str]) -> list[Task]:
    """Every measurement of the grid, ordered so that what belongs to a case comes together.

    Raises ValueError for a provider, direction, mask or block size that does not exist.
    """
    for direction in directions:
        choose("directions", direction, DIRECTIONS)
    found = {name: find(name) for name in providers}
    for case in cases:
        _ = case.blocks  # an impossible mask is refused now, not in the middle of the run
    return [
        Task(case, name, direction)
        for case in cases
        for name, provider in found.items()
        for direction in directions
        if concerns(provider, case, direction)
    ]


def empty_row(task: Task, device: torch.device, command: str) -> SpeedRow:
    """The row of a task before it is measured."""
    known: dict[str, Any] = asdict(task.case) | {"v_dim": task.case.value_dim}
    return SpeedRow(
        provider=task.provider,
        direction=task.direction,
        density=task.case.density,
        elements=task.case.elements,
        **known | SpeedRow.origin(str(device), command),
    )


def measured(task: Task, device: torch.device, records: Records[SpeedRow]) -> bool:
    """Whether the records hold a time for this task."""
    known = records.find(empty_row(task, device, ""))
    return known is not None and known.status == OK


def run_tasks(
    tasks: Sequence[Task], bench: Bench, records: Records[SpeedRow], command: str
) -> list[SpeedRow]:
    """The row of every task, measured now or found in `records`, to which new ones are added."""
    rows = []
    for i, task in enumerate(tasks, 1):
        row = empty_row(task, bench.device, command)
        known = records.find(row)
        if known is not None and known.status == OK:
            rows.append(known)
            print(f"[{i:3}/{len(tasks)}] {describe(known)}  (measured {known.date})", flush=True)
            continue
        row = bench.run(task, row)
        if known is None or known.status != row.status:  # the same refusal need not stand twice
            records.append(row)
        rows.append(row)
        print(f"[{i:3}/{len(tasks)}] {describe(row)}", flush=True)
        if breaks_context(row.status):
            print("the device is lost to this process: run again for the rest", flush=True)
            break
    return rows


def describe(row: SpeedRow) -> str:
    what = f"{row.provider:20} {row.direction:8} {row.mask:46} N {row.n_q:<6} D {row.head_dim:<3}"
    if row.status != OK:
        return f"{what}  {row.status}"
    share = "" if row.fraction is None else f"{100 * row.fraction:3.0f} % of ideal  "
    return f"{what} {row.ms:9.3f} ms {row.tflops:8.3f} TFLOP/s  {share}error {row.error:.1e}"


def chosen_tasks(options: dict[Any, Any], device: torch.device) -> list[Task]:
    """The tasks of the named grid, or of the masks and shapes that are given."""
    providers, directions = options["providers"], as_list(options["directions"])
    providers = None if providers is None else as_list(providers)
    names = "mask seq_len batch heads kv_heads head_dim v_dim dtype layout block_size".split()
    given = {name: options[name] for name in names}
    if options["grid"] is None:
        cases = make_grid(str(device), **given).cases()
        return plan(cases, providers or default_providers(device), directions)
    choose("grid", options["grid"], GRIDS)
    if any(value is not None for value in given.values()):
        raise ValueError(f"grid={options['grid']} has its own masks and shapes: leave these out")
    tasks = [
        task
        for part in GRIDS[options["grid"]](device)
        for task in plan(
            part.cases,
            [p for p in part.providers if providers is None or p in providers],
            directions,
        )
    ]
    return list(dict.fromkeys(tasks))


@program("speed")
def main(options: dict[str, Any], command: str) -> None:
    """Measures what the configuration asks for and prints it as tables."""
    device = find_device(options["device"])
    whole_number("workers", options["workers"], 0)
    for name in ("warm_s", "seconds"):
        if options[name] is not None:
            positive_number(name, options[name])
    tasks = chosen_tasks(options, device)
    seconds = options["seconds"] or (0.15 if device.type == "cuda" else 0.5)
    records = Records(
        options["csv"],
        SpeedRow,
        fresh=options["fresh"],
        allow_changes=options["allow_changes"],
    )
    if options["workers"]:
        missing = [t for t in tasks if not measured(t, device, records)]
        left_out = set(missing) - set(warm(missing, device, options["workers"], options["warm_s"]))
        tasks = [t for t in tasks if t not in left_out]
    rows = run_tasks(tasks, Bench(device, seconds), records, command)
    print("\n" + tables(rows, records.rows))
    table = records.path.with_suffix(".txt")
    table.write_text(tables(newest(records.rows)) + "\n")
    print(f"\nrows:  {records.path}\ntable: {table}\nplots: python -m experiments.plot")


if __name__ == "__main__":
    main()
