"""Train the runs of a sweep with experiments.train or experiments.lm, at once on all GPUs.

    python -m experiments.sweep sweep=lra
    python -m experiments.sweep sweep=path_x gpus=[0,1] 'overrides=["seed=0,1"]'
    python -m experiments.sweep file=mine.yaml dry_run=true     # list the runs, and run nothing

The folders of the runs are the state: the same command continues where it was stopped and leaves
complete runs alone. Each run has a log.txt. See docs/guide/lra.md.
"""

import os
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import torch

from experiments.common.config import Checked, choose, help_rows, option, words
from experiments.common.files import digest, read_yaml
from experiments.common.program import HydraException, OverridesParser, program
from experiments.lm import settings as lm_settings
from experiments.lra import settings as settings_of
from experiments.lra.settings import Settings
from experiments.training import run_file

FORM = "a sweep has common: [overrides] and runs: {name: {with: [overrides], after: name}}"
PROGRAMS = {"train": settings_of.compose_settings, "lm": lm_settings.compose_settings}
KINDS = {"train": Settings, "lm": lm_settings.Settings}
TRAIN = {name: ["-m", f"experiments.{name}"] for name in PROGRAMS}
TORCHRUN = "-m torch.distributed.run --standalone --nproc-per-node".split()
DATA = -1  # the place of the process that makes data


@dataclass(frozen=True)
class Planned:
    """One run of a program; it starts from the weights of `after`."""

    program: str  # of PROGRAMS
    name: str
    overrides: tuple[str, ...]
    values: dict[str, str]  # of the overrides that vary within the entry
    settings: Settings | lm_settings.Settings
    after: "Planned | None"

    @property
    def complete(self) -> bool:
        return bool((run_file.read(self.settings.folder) or {}).get("complete"))

    @property
    def data(self) -> str:
        """A digest of what has to be made before the run; empty if there is nothing."""
        return digest(self.settings.data()) if isinstance(self.settings, Settings) else ""

    @property
    def log(self) -> Path:
        return self.settings.folder / "log.txt"


def planned(sweep: Mapping[str, Any], more: Sequence[str] = ()) -> list[Planned]:
    """Return all runs of a sweep, in its order.

    Args:
        sweep: as a file of conf/sweep. Values separated by commas give a run each. A run `after` an
            entry starts from the run of that entry with the same values.
        more: overrides of all runs, which take precedence over those of the sweep.

    Raises:
        ValueError: something in it is wrong, or a folder holds a run with other settings.
    """
    if sweep.keys() - {"common", "runs", "program"} or not isinstance(sweep.get("runs"), Mapping):
        raise ValueError(f"{FORM}; this one has {', '.join(map(str, sweep)) or 'nothing'}")
    program = sweep.get("program", "train")  # the runs are of it
    choose("program", program, PROGRAMS)
    found: dict[str, list[Planned]] = {}
    folders: dict[Path, str] = {}
    for name, entry in sweep["runs"].items():
        try:
            lists = sweep.get("common"), more
            found[name] = list(_entry(program, name, dict(entry or {}), found, *lists))
        except (ValueError, TypeError, HydraException) as error:
            known = [text.partition("=")[0] for text, _ in help_rows(KINDS[program])]
            text = words(error, known) if isinstance(error, HydraException) else str(error)
            raise ValueError(f"sweep, {name}: {' '.join(text.split())}") from error
        for run in found[name]:
            if (file := run_file.read(run.settings.folder)) is not None:
                run_file.refuse_other_settings(run.settings.folder, file["settings"], run.settings)
            if (other := folders.setdefault(run.settings.folder, run.name)) != run.name:
                raise ValueError(f"sweep: {other} and {run.name} share a folder: give one a name=")
    return [run for runs in found.values() for run in runs]


def _entry(
    program: str,
    name: str,
    entry: dict[str, Any],
    found: Mapping[str, list[Planned]],
    *lists: Any,
) -> Iterator[Planned]:
    common, more = lists
    lists = common, entry.pop("with", None), more
    after = entry.pop("after", None)
    if entry or not all(isinstance(texts, list | tuple | None) for texts in lists):
        raise ValueError('give {with: [overrides], after: name}, overrides such as ["seed=0,1"]')
    if after is not None and after not in found:
        raise ValueError(f"after={after} is not an entry above it")
    parsed = OverridesParser.create().parse_overrides([t for texts in lists for t in texts or ()])
    last = {override.get_key_element(): override for override in parsed}  # the last value counts
    if wrong := [key for key in last if not key.replace(".", "_").isidentifier() or "hydra" in key]:
        raise ValueError(f"{wrong[0]}: give settings of experiments.{program}, NAME=VALUE")
    varied = {k: [*o.sweep_string_iterator()] for k, o in last.items() if o.is_sweep_override()}
    fixed = [str(override.input_line) for key, override in last.items() if key not in varied]
    for chosen in product(*varied.values()):
        values = dict(zip(varied, chosen, strict=True))
        overrides, start = [*fixed, *(f"{key}={value}" for key, value in values.items())], None
        if after is not None:
            own = dict(text.split("=", 1) for text in overrides)
            able = [r for r in found[after] if all(own.get(k) == v for k, v in r.values.items())]
            if len(able) != 1 and len(found[after]) > 1:
                raise ValueError(f"no run of {after} has the values {values}")
            able = able or found[after]
            start = able[0]
            overrides.append(f"init_from='{start.settings.folder}'")
        label = "/".join([name, *(re.sub(r"\\(.)|['\"]", r"\1", value) for value in chosen)])
        settings = PROGRAMS[program](overrides)
        yield Planned(program, label, tuple(overrides), values, settings, start)


def state(run: Planned) -> str:
    """Return the state of a run, in words."""
    file = run_file.read(run.settings.folder) or {"result": None}
    if result := file["result"]:
        cut = "complete" if file["complete"] else f"cut short at step {result['steps']}"
        if "val_loss" in result:
            return f"{cut}, validation loss {result['val_loss']:.4f}"
        return f"{cut}, accuracy {100 * result['accuracy']:.1f} %"
    if run.after is not None and not run.after.complete:
        return f"waits for {run.after.name}"
    return "begun" if run.log.exists() else "not started"


def train(
    runs: Sequence[Planned], places: Sequence[str], processes: int = 1, minutes: float | None = None
) -> dict[str, str]:
    """Train the runs that are not complete; return by name why runs failed.

    The data of a run are made before it starts. A failure stops only the runs that start from it.
    When the time is over, and on Ctrl-C, SIGTERM and SIGHUP, the runs write checkpoints and end.

    Args:
        places: a CUDA_VISIBLE_DEVICES for each run at work at the same time; "": the CPU.
        processes: of each run; several are started by torchrun.
        minutes: of all runs together.
    """
    end = None if minutes is None else time.monotonic() + 60 * minutes
    failed, made, waiting = dict[str, str](), {""}, list(runs)
    data = {run.name: run.data for run in runs}
    at_work: dict[int, tuple[Planned, subprocess.Popen[bytes]]] = {}

    def start(run: Planned, place: int) -> None:
        command = [*TRAIN[run.program], *run.overrides]
        environment = dict(os.environ)
        if place == DATA:
            command += ["data_only=true", "device=cpu", f"scale={run.settings.scale}"]
        else:
            command = [*TORCHRUN, str(processes), *command] if processes > 1 else command
            environment |= {"CUDA_VISIBLE_DEVICES": places[place]} if places[place] else {}
        run.log.parent.mkdir(parents=True, exist_ok=True)
        with run.log.open("ab") as log:
            at_work[place] = run, subprocess.Popen(
                [sys.executable, *command], env=environment, stdout=log, stderr=log,
                start_new_session=True,  # Ctrl-C is for this process, which stops the others
            )  # fmt: skip
        print(f"{run.name}: {'makes data' if place == DATA else 'trains'}, {run.log}", flush=True)

    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) == signal.SIG_DFL:
            signal.signal(number, signal.default_int_handler)
    try:
        while end is None or time.monotonic() < end:
            for place, (run, process) in list(at_work.items()):
                if process.poll() is None:
                    continue
                del at_work[place]
                if process.returncode:
                    last = run.log.read_text(errors="replace").strip().rpartition("\n")[2]
                    failed[run.name] = f"failed, {last} (exit status {process.returncode})"
                elif place == DATA:
                    made.add(data[run.name])
                    continue
                print(f"{run.name}: {failed.get(run.name) or state(run)}", flush=True)
            busy = {run.name for place, (run, _) in at_work.items() if place != DATA}
            waiting = [r for r in waiting if r.name not in failed and not r.complete]
            able = [r for r in waiting if r.name not in busy and (not r.after or r.after.complete)]
            free = [place for place in range(len(places)) if place not in at_work]
            for run, place in zip([r for r in able if data[r.name] in made], free, strict=False):
                start(run, place)
            if DATA not in at_work and (left := [r for r in able if data[r.name] not in made]):
                start(left[0], DATA)
            if not at_work:
                break
            time.sleep(0.2)
    finally:
        for place, (_, process) in at_work.items():  # those that make data have children
            (os.killpg if place == DATA else os.kill)(process.pid, signal.SIGTERM)
        for run, process in at_work.values():
            process.wait()
            print(f"{run.name}: stopped, the same command continues it", flush=True)
    return failed


@dataclass
class Options(Checked):
    sweep: dict[str, Any] = option({})  # a file of conf/sweep
    file: str | None = option(None, "a sweep of your own, like those of conf/sweep")
    overrides: Any = option(None, 'of all runs; "seed=0,1" runs every seed', several=str)
    gpus: Any = option(None, "null: all GPUs there are, or the CPU", several=int, least=0)
    at_once: int = option(
        1, "runs that share a GPU; this pays for short runs and small batches", least=1
    )
    processes: int = option(1, "of a run, each with a GPU of its own (torchrun)", least=1)
    minutes: float | None = option(
        None, "after which the runs at work write a checkpoint and end", above=0
    )
    dry_run: bool = option(
        False, "true: list the runs with their state and command, and run nothing"
    )


def places(options: Options) -> list[str]:
    """Return the places of `train` for the options `gpus`, `at_once` and `processes`."""
    count, each = torch.cuda.device_count(), options.processes
    seen = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
    names = seen if len(seen) == count else [str(i) for i in range(count)]
    gpus = range(count) if options.gpus is None else options.gpus
    if wrong := [gpu for gpu in gpus if gpu not in range(count)]:
        known = f"has the GPUs 0 to {count - 1}" if count else "has no GPU"
        raise ValueError(f"gpus={wrong}: this machine {known}; without gpus= all are taken")
    groups = [",".join(names[gpu] for gpu in gpus[i : i + each]) for i in range(0, count, each)]
    return (groups[: len(gpus) // each] or [""]) * options.at_once


@program("sweep", Options)
def main(options: Options, command: str) -> None:
    sweep, file = options.sweep, options.file
    sweep = sweep if file is None else read_yaml(Path(file), FORM, f"file={file}")
    runs, free, failed = planned(sweep, options.overrides or []), places(options), {}
    if not options.dry_run:
        failed = train(runs, free, options.processes, options.minutes)
    for run in runs:
        print(f"{run.name}: {failed.get(run.name) or state(run)}")
        if options.dry_run:
            print(f"    python -m experiments.{run.program} {shlex.join(run.overrides)}")
    print(f"{sum(run.complete for run in runs)} of {len(runs)} runs complete, {len(failed)} failed")
    sys.exit(bool(failed))


if __name__ == "__main__":
    main()
