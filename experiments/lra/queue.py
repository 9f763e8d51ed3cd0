"""Runs of a plan, as many at a time as there are places, each in a process of its own."""

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field

from experiments.lra.plan_runs import PlannedRun
from experiments.lra.training.checkpoint import CHECKPOINT
from experiments.lra.training.result import summary
from experiments.lra.training.stop import Interrupted, Stop

TRAIN = ("-m", "experiments.train")
TORCHRUN = "-m torch.distributed.run --rdzv-backend c10d --rdzv-endpoint localhost:0".split()
LEAST = 1.0  # minutes that a run needs to be worth its start
POLL = 0.1  # seconds
STOPPED = (130, 143, -signal.SIGTERM)  # exit status of what was told to stop


@dataclass
class Job:
    """A process of experiments.train that is at work."""

    run: PlannedRun
    place: int | None  # None: makes the data of the run, and trains nothing
    process: subprocess.Popen[str]
    reader: threading.Thread
    stopped: bool = False

    def stop(self) -> None:
        """Has a run write its checkpoint and end; what makes data ends as it is."""
        self.stopped = True
        if self.place is None:
            self.kill(signal.SIGTERM)
        else:
            self.process.terminate()

    def kill(self, number: signal.Signals = signal.SIGKILL) -> None:
        """Signals the process and those that it started."""
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, number)


@dataclass
class Queue:
    """What is to be run, and what came of it.

    places: the GPUs that runs may have at the same time, as CUDA_VISIBLE_DEVICES names them; a GPU
        that takes several runs is there as often. None: the processor.
    minutes: after which runs at work write a checkpoint and are tested, and no more are begun.
    processes: of a run, which torchrun starts if they are several.
    """

    runs: Sequence[PlannedRun]
    places: Sequence[str | None]
    minutes: float | None = None
    processes: int = 1
    jobs: list[Job] = field(default_factory=list)
    failed: dict[str, str] = field(default_factory=dict)  # name of a run -> why
    ready: set[str] = field(default_factory=set)  # data that are made
    begun: float = field(default_factory=time.monotonic)

    def go(self) -> None:
        """Returns when nothing more can be run; the processes have ended then.

        Raises Interrupted if a signal came.
        """
        left = [run for run in self.runs if not run.complete]
        with Stop(None, self.begun) as stop:
            try:
                while stop.reason is None:
                    self._reap()
                    self._make_data(left)
                    left = self._start(left)
                    if not self.jobs and not self._startable(left):
                        return
                    time.sleep(POLL)
                for job in self.jobs:
                    job.stop()
                while self.jobs:
                    self._reap()
                    time.sleep(POLL)
                raise Interrupted(stop.reason)
            finally:
                for job in self.jobs:
                    job.kill()

    def state(self, run: PlannedRun) -> str:
        """What there is of a run, in a line."""
        if run.name in self.failed:
            return f"failed: {self.failed[run.name]}"
        result = run.result()
        if result is not None:
            return ("" if result["complete"] else "cut short: ") + summary(result)
        if run.after is not None and not run.after.complete:
            return f"waits for {run.after.name}"
        return "cut short" if (run.settings.folder / CHECKPOINT).exists() else "not begun"

    # ---- one round

    def _reap(self) -> None:
        """Lets go of the processes that ended."""
        for job in [job for job in self.jobs if job.process.poll() is not None]:
            job.reader.join()
            self.jobs.remove(job)
            code, data = job.process.returncode, job.run.data
            if code == 0 and job.place is None:
                self.ready.add(data)
            elif code == 0 or job.stopped or code in STOPPED:
                continue
            elif job.place is None:
                why = "its data could not be made, see above"
                self.failed |= {run.name: why for run in self.runs if run.data == data}
            else:
                self.failed[job.run.name] = f"exit status {code}, see above"

    def _make_data(self, left: Sequence[PlannedRun]) -> None:
        """Has the next data made that a run needs, one set at a time: it takes all cores."""
        busy = [job for job in self.jobs if job.place is None]
        if self._late():
            for job in busy:
                job.stop()
        elif not busy:
            wanted = (run for run in left if self._hopeful(run) and run.data not in self.ready)
            if (run := next(wanted, None)) is not None:
                self._open(run, None)

    def _start(self, left: list[PlannedRun]) -> list[PlannedRun]:
        """Gives the free places to the first runs that can begin; returns the others."""
        for place in set(range(len(self.places))) - {job.place for job in self.jobs}:
            able = (run for run in self._startable(left) if run.data in self.ready)
            if (run := next(able, None)) is not None:
                self._open(run, place)
                left = [other for other in left if other is not run]
        return left

    def _startable(self, left: Sequence[PlannedRun]) -> list[PlannedRun]:
        """Those that have nothing to wait for but their data."""
        if self._late():
            return []
        able = [run for run in left if self._hopeful(run)]
        return [run for run in able if run.after is None or run.after.complete]

    def _hopeful(self, run: PlannedRun) -> bool:
        """Whether neither it nor a run before it failed."""
        before = run.after is None or self._hopeful(run.after)
        return run.name not in self.failed and before

    # ---- processes

    def _open(self, run: PlannedRun, place: int | None) -> None:
        """Starts a process, in a session of its own: Ctrl-C comes to it from `go` alone."""
        overrides, environment = list(run.overrides), dict(os.environ)
        launcher = [sys.executable]
        if place is not None and self.processes > 1:
            launcher += [*TORCHRUN, "--nproc-per-node", str(self.processes)]
        if place is None:
            overrides += ["data_only=true", "device=cpu", f"scale={run.settings.scale}"]
        else:
            minutes = [x for x in (self._left(), run.settings.minutes) if x is not None]
            overrides += [f"minutes={min(minutes):.3f}"] if minutes else []
            environment |= {"CUDA_VISIBLE_DEVICES": gpu} if (gpu := self.places[place]) else {}
        process = subprocess.Popen(
            [*launcher, *TRAIN, *overrides], env=environment, start_new_session=True,
            text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip
        reader = threading.Thread(target=_tell, args=(run.name, process), daemon=True)
        reader.start()
        self.jobs.append(Job(run, place, process, reader))

    # ---- time

    def _left(self) -> float | None:
        """Minutes."""
        if self.minutes is None:
            return None
        return self.minutes - (time.monotonic() - self.begun) / 60

    def _late(self) -> bool:
        """Whether too little time is left to begin anything."""
        left = self._left()
        return left is not None and left < min(LEAST, (self.minutes or 0) / 2)


def _tell(name: str, process: subprocess.Popen[str]) -> None:
    """Every line that a process says, behind its name."""
    for line in process.stdout or ():
        print(f"[{name}] {line.rstrip()}", file=sys.stderr, flush=True)
