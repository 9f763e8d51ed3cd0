"""The processes of a sweep: as many runs at a time as there are places for them."""

import math
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import IO

from experiments.lra.result import refuse_other_settings, summary
from experiments.lra.sweep.runs import SweepRun
from experiments.training.clock import SIGNALS, Interrupted, Stop
from experiments.training.state import CHECKPOINT

TRAIN = ("-m", "experiments.train")
TORCHRUN = "-m torch.distributed.run --rdzv-backend c10d --rdzv-endpoint localhost:0".split()
LEAST = 1.0  # minutes; a run with less time left is not started
GRACE = 40.0  # seconds in which stopped runs write their checkpoints
POLL = 0.1  # seconds
# exit statuses of a process that a signal stopped
STOPPED = {status for n in SIGNALS for status in (128 + n, -n)}


@dataclass
class Worker:
    """A running process of experiments.train."""

    run: SweepRun
    place: int | None  # None: makes the data of the run, and trains nothing
    process: subprocess.Popen[str]
    stopped: bool = False
    last: str = ""  # the last line that it printed

    def __post_init__(self) -> None:
        self.reader = threading.Thread(target=self._forward, daemon=True)
        self.reader.start()

    def _forward(self) -> None:
        """Prints every line of the process after the name of its run."""
        for line in self.process.stdout or ():
            self.last = line.strip() or self.last
            print(f"[{self.run.name}] {line.rstrip()}", file=sys.stderr, flush=True)

    def stop(self) -> None:
        """Lets a run write its checkpoint and end; stops the making of data at once."""
        self.stopped = True
        if self.place is None:
            self.kill(signal.SIGTERM)
        else:
            self.process.terminate()

    def kill(self, number: signal.Signals = signal.SIGKILL) -> None:
        """Signals the process and its children."""
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, number)


@dataclass
class Queue:
    """The runs of a sweep and their state.

    Args:
        places: a CUDA_VISIBLE_DEVICES for each run that may run at the same time; None: the CPU.
        minutes: time limit, at which the runs at work write a checkpoint and end.
        processes: of a run; torchrun starts them if there are several.
        costs: GPU minutes of runs by their names, where they are known.
        environment: of all processes, besides that of this one.
    """

    runs: Sequence[SweepRun]
    places: Sequence[str | None]
    minutes: float | None = None
    processes: int = 1
    costs: Mapping[str, float] = field(default_factory=dict)
    environment: Mapping[str, str] = field(default_factory=dict)
    workers: list[Worker] = field(default_factory=list)
    failed: dict[str, str] = field(default_factory=dict)  # name of a run -> why
    ready: set[str] = field(default_factory=set)  # digests of data that are made
    begun: float = field(default_factory=time.monotonic)

    def __post_init__(self):
        """A folder that holds a run with other settings counts as failed, though it is complete."""
        for run in self.runs:
            try:
                refuse_other_settings(run.settings)
            except ValueError as error:
                self.failed[run.name] = str(error)

    def run(self) -> None:
        """Returns when nothing more can run or the time is over, and all processes have ended.

        Raises Interrupted if a signal came.
        """
        left = [run for run in self.runs if not self._complete(run)]
        with Stop(None, self.begun) as stop:
            try:
                while stop.reason is None and self._left() > 0:
                    self._collect()
                    self._make_data(left)
                    left = self._start(left)
                    if not self.workers and not self._startable(left):
                        return
                    time.sleep(POLL)
                self._stop()
                if stop.reason is not None:
                    raise Interrupted(stop.reason)
            finally:
                for worker in self.workers:
                    worker.kill()

    def _stop(self) -> None:
        """Lets the runs write their checkpoints."""
        end = time.monotonic() + GRACE
        for worker in self.workers:
            worker.stop()
        while self.workers and time.monotonic() < end:
            self._collect()
            time.sleep(POLL)

    def state(self, run: SweepRun) -> str:
        """The state of a run, in a line."""
        if run.name in self.failed:
            return f"failed: {self.failed[run.name]}"
        result = run.result()
        if result is not None:
            return ("" if result["complete"] else "cut short: ") + summary(result)
        if run.after is not None and not self._complete(run.after):
            return f"waits for {run.after.name}"
        if run.at_work:
            return "at work"
        return "cut short" if (run.settings.folder / CHECKPOINT).exists() else "not started"

    def progress(self) -> str:
        """How many runs there are in which state, and what is left, in a line."""
        left = [run for run in self.runs if not self._complete(run)]
        at_work = [worker for worker in self.workers if worker.place is not None]
        text = f"{len(self.runs) - len(left)} of {len(self.runs)} runs complete"
        text += f", {len(at_work)} at work" if at_work else ""
        text += f", {len(self.failed)} failed" if self.failed else ""
        known = [self.costs[run.name] for run in left if run.name in self.costs]
        text += f"; about {sum(known):.0f} GPU minutes left" if known else ""
        unknown = len(left) - len(known)
        return text + (f", and {unknown} runs of unknown length" if known and unknown else "")

    def _complete(self, run: SweepRun) -> bool:
        return run.name not in self.failed and run.complete

    def report(self) -> str:
        """The state of every run, those of one state in one line, and the progress."""
        found: dict[str, list[str]] = {}
        for run in self.runs:
            found.setdefault(self.state(run), []).append(run.name)
        lines = (f"{', '.join(names)}: {state}" for state, names in found.items())
        return "\n".join([*lines, self.progress()])

    # ---- one round

    def _collect(self) -> None:
        """Removes the processes that ended, and notes what they did."""
        for worker in [worker for worker in self.workers if worker.process.poll() is not None]:
            worker.reader.join()
            self.workers.remove(worker)
            self._note(worker)
            if worker.place is not None:
                print(self.progress(), file=sys.stderr, flush=True)

    def _note(self, worker: Worker) -> None:
        """Notes what a process did that ended."""
        code, data = worker.process.returncode, worker.run.data
        if code == 0 and worker.place is None:
            self.ready.add(data)
        elif code == 0 or worker.stopped or code in STOPPED:
            return
        elif worker.place is None:
            why = f"its data could not be made: {worker.last}"
            self.failed |= {run.name: why for run in self.runs if run.data == data}
        else:
            self.failed[worker.run.name] = f"exit status {code}: {worker.last}"

    def _make_data(self, left: Sequence[SweepRun]) -> None:
        """Makes the next data that a run needs, one set at a time, because it uses all cores."""
        busy = [worker for worker in self.workers if worker.place is None]
        if self._late():
            for worker in busy:
                worker.stop()
        elif not busy:
            wanted = (run for run in left if self._possible(run) and run.data not in self.ready)
            if (run := next(wanted, None)) is not None:
                self._open(run)

    def _start(self, left: list[SweepRun]) -> list[SweepRun]:
        """Starts runs in the free places; returns those that are left."""
        free = sorted(set(range(len(self.places))) - {worker.place for worker in self.workers})
        able = [run for run in self._startable(left) if run.data in self.ready] if free else []
        for run in able:
            if not free:
                break
            with run.claim() as claim:
                if claim is None:  # at work in another sweep, which may leave it unfinished
                    continue
                if not run.complete:
                    self._open(run, free.pop(0), claim)
            left = [other for other in left if other is not run]
        return left

    def _startable(self, left: Sequence[SweepRun]) -> list[SweepRun]:
        """The runs that wait for nothing but their data."""
        if self._late():
            return []
        able = [run for run in left if self._possible(run)]
        return [run for run in able if run.after is None or run.after.complete]

    def _possible(self, run: SweepRun) -> bool:
        """Whether neither the run nor one before it failed."""
        before = run.after is None or self._possible(run.after)
        return run.name not in self.failed and before

    # ---- processes

    def _open(self, run: SweepRun, place: int | None = None, claim: IO[str] | None = None) -> None:
        """Starts a process, in its own session, so that only `run` passes Ctrl-C on to it."""
        overrides, environment = list(run.overrides), os.environ | self.environment
        launcher = [sys.executable]
        if place is not None and self.processes > 1:
            launcher += [*TORCHRUN, "--nproc-per-node", str(self.processes)]
        if place is None:
            overrides += ["data_only=true", "device=cpu", f"scale={run.settings.scale}"]
        else:
            environment |= {"CUDA_VISIBLE_DEVICES": gpu} if (gpu := self.places[place]) else {}
        process = subprocess.Popen(
            [*launcher, *TRAIN, *overrides], env=environment, start_new_session=True,
            text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            pass_fds=[claim.fileno()] if claim else [],
        )  # fmt: skip
        self.workers.append(Worker(run, place, process))

    # ---- time

    def _left(self) -> float:
        """Minutes that are left."""
        minutes = math.inf if self.minutes is None else self.minutes
        return minutes - (time.monotonic() - self.begun) / 60

    def _late(self) -> bool:
        """Whether too little time is left to start anything."""
        return self._left() < min(LEAST, (self.minutes or 0) / 2)
