"""Trains many runs of experiments.train, on all GPUs at the same time, in the order of a plan.

    python -m experiments.plan plan=lra
    python -m experiments.plan plan=path_x minutes=30 gpus=[0,1] 'with=["seed=0,1"]'
    python -m experiments.plan file=mine.yaml                    # a plan like those of conf/plan

The same command goes on where it was stopped, and leaves alone what is complete. See docs/lra.md.
"""

import os
import sys
from pathlib import Path
from typing import Any

import hydra
import torch
from omegaconf import DictConfig, OmegaConf
from yaml import YAMLError

from experiments.common.checks import whole_number
from experiments.lra.plan_runs import PLAN, planned_runs
from experiments.lra.queue import Queue
from experiments.lra.training.stop import Interrupted


def places(gpus: list[int] | None, at_once: int, processes: int = 1) -> list[str | None]:
    """The GPUs that runs may have, each `at_once` times; None where the processor does the work.

    gpus: of those that this process sees; None: all of them.
    processes: how many GPUs each run takes: "0,1". Those left over stay idle.
    ValueError for one that is not there, or too few.
    """
    whole_number("at_once", at_once)
    whole_number("processes", processes)
    count = torch.cuda.device_count()
    seen = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
    names = seen if len(seen) == count else [str(i) for i in range(count)]
    if gpus is not None and (not isinstance(gpus, list) or not gpus):
        raise ValueError(f"gpus={gpus!r}: give a list, such as [0,1], or null for all")
    wanted = list(range(count)) if gpus is None else gpus
    if wrong := [gpu for gpu in wanted if gpu not in range(count)]:
        raise ValueError(f"gpus={wrong}: there are {count} here, counted from 0")
    if wanted and len(wanted) < processes:
        raise ValueError(f"processes={processes}: a run has {len(wanted)} GPUs, one for each")
    firsts = range(0, len(wanted) - processes + 1, processes)
    found: list[str | None] = [
        ",".join(names[gpu] for gpu in wanted[i : i + processes]) for i in firsts
    ]
    return (found or [None]) * at_once


def read(path: Path) -> dict[str, Any]:
    """A plan from a file; ValueError if that cannot be read."""
    try:
        plan = OmegaConf.to_container(OmegaConf.load(path))
    except (OSError, ValueError, YAMLError) as error:
        raise ValueError(f"file={path} cannot be read: {error}") from error
    if not isinstance(plan, dict):
        raise ValueError(f"file={path} is no plan: {PLAN}")
    return {str(name): value for name, value in plan.items()}


def follow(options: dict[str, Any]) -> bool:
    """Runs what the options of conf/plan.yaml ask for; returns whether nothing failed.

    Raises:
        ValueError: options that are none.
        Interrupted: a signal came, and the runs have written their checkpoints.
    """
    minutes = options["minutes"]
    number = isinstance(minutes, int | float) and not isinstance(minutes, bool)
    if minutes is not None and not (number and minutes > 0):
        raise ValueError(f"minutes={minutes!r}: give a number above 0")
    processes = options["processes"]
    slots = places(options["gpus"], options["at_once"], processes)
    plan = options["plan"] if options["file"] is None else read(Path(options["file"]))
    queue = Queue(planned_runs(plan, options["with"]), slots, minutes, processes)
    if options["dry_run"]:
        for run in queue.runs:
            print(f"{run.name}: {queue.state(run)}\n    {' '.join(run.overrides)}")
        return True
    try:
        queue.go()
    finally:
        print("", *(f"{run.name}: {queue.state(run)}" for run in queue.runs), sep="\n", flush=True)
    return not queue.failed


@hydra.main(version_base="1.3", config_path="conf", config_name="plan")
def main(config: DictConfig) -> None:
    options = OmegaConf.to_container(config, resolve=True)
    assert isinstance(options, dict)
    try:
        done = follow({str(name): value for name, value in options.items()})
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr, flush=True)
        sys.exit(1)
    except Interrupted as stop:
        sys.exit(stop.code)
    sys.exit(0 if done else 1)


if __name__ == "__main__":
    main()
