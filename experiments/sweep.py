"""Trains many runs of experiments.train, on all GPUs at the same time, in the order of a sweep.

    python -m experiments.sweep sweep=lra
    python -m experiments.sweep sweep=path_x minutes=30 gpus=[0,1] 'with=["seed=0,1"]'
    python -m experiments.sweep file=mine.yaml                    # a sweep like those of conf/sweep
    python -m experiments.sweep sweep=lra minutes=9 import=old.tar.xz export=new.tar.xz

The same command continues where it was stopped, on another machine from an export, and leaves
complete runs alone.
See docs/guide/lra.md.
"""

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from experiments.common.checks import as_list, check_options
from experiments.common.files import read_yaml
from experiments.common.program import program
from experiments.common.records import read as read_rows
from experiments.lra.run_files import read_runs
from experiments.lra.speed.rows import StepRow
from experiments.lra.sweep.export import read_export, write_export
from experiments.lra.sweep.gpus import compiler, shared, slots
from experiments.lra.sweep.order import in_order, run_minutes
from experiments.lra.sweep.queue import Queue
from experiments.lra.sweep.runs import FORM, sweep_runs
from experiments.training.clock import Interrupted

SPEED = Path("docs/results/lra/speed.csv")  # in a clone


@contextmanager
def optional(option: str) -> Iterator[None]:
    """Adds to a ValueError that the sweep also runs without what the option names."""
    try:
        yield
    except ValueError as error:
        raise ValueError(f"{error}, or give {option}=null") from None


def run(options: dict[str, Any]) -> bool:
    """Runs a sweep with the options of conf/sweep.yaml; returns whether nothing failed.

    Raises:
        ValueError: an option is wrong.
        Interrupted: a signal came, and the runs have written their checkpoints.
    """
    begun = time.monotonic()
    check_options(options, optional="minutes part_mib", positive="minutes part_mib")
    places = slots(options["gpus"], options["at_once"], options["processes"])
    file, sweep = options["file"], options["sweep"]
    if file is not None:
        sweep = read_yaml(Path(file), FORM, f"file={file}")
    compiled = None if options["compiled"] is None else Path(options["compiled"])
    runs = sweep_runs(sweep, options["with"])
    speed = SPEED if options["speed"] is None and SPEED.exists() else options["speed"]
    with optional("speed"):
        steps = [] if speed is None else read_rows(speed, StepRow)
    costs = run_minutes(runs, steps)
    if known := sweep.get("known"):
        with optional("sweep.known"):
            runs = in_order(runs, read_runs(known), costs)
    for path in as_list(options["import"]):
        print(read_export(Path(path), runs, compiled), flush=True)
    queue = Queue(runs, places, options["minutes"], options["processes"], costs, begun=begun)
    if options["dry_run"]:
        for planned in runs:
            cost = f", {costs[planned.name]:.1f} GPU minutes" if planned.name in costs else ""
            print(f"{planned.name}: {queue.state(planned)}{cost}")
            print(f"    {' '.join(planned.overrides)}")
        print(queue.progress())
        return True
    try:
        with shared(places) as environment:
            queue.environment = environment | compiler(compiled, len(places))
            queue.run()
    finally:
        print("", queue.report(), sep="\n", flush=True)
        if options["export"] is not None:
            told = {name: options[name] for name in ("weights", "part_mib")}
            print(write_export(Path(options["export"]), runs, compiled, **told), flush=True)
    return not queue.failed


@program("sweep")
def main(options: dict[str, Any], command: str) -> None:
    try:
        done = run(options)
    except Interrupted as stop:
        sys.exit(stop.code)
    sys.exit(0 if done else 1)


if __name__ == "__main__":
    main()
