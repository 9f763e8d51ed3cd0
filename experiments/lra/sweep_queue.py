"""The processes of a sweep: as many runs at a time as there are places for them."""

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field

from experiments.lra.sweep_runs import SweepRun
from experiments.lra.training.checkpoint import CHECKPOINT
from experiments.lra.training.clock import Interrupted, Stop
from experiments.lra.training.result import summary

TRAIN = ("-m", "experiments.train")
TORCHRUN = "-m torch.distributed.run --rdzv-backend c10d --rdzv-endpoint localhost:0".split()
LEAST = 1.0  # minutes; a run with less time left is not started
POLL = 0.1  # seconds
STOPPED = (130, 143, -signal.SIGTERM)  # exit statuses of a process that a signal stopped


@dataclass
class Worker:
    """A running process of experiments.train."""

    run: SweepRun
    place: int | None  # None: makes the data of the run, and trains nothing
    process: subprocess.Popen[str]
    reader: threading.Thread
    stopped: bool = False

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
        minutes: time limit. Running runs then write a checkpoint and are tested; no more start.
        processes: of a run; torchrun starts them if there are several.
    """

    runs: Sequence[SweepRun]
    places: Sequence[str | None]
    minutes: float | None = None
    processes: int = 1
    workers: list[Worker] = field(default_factory=list)
    failed: dict[str, str] = field(default_factory=dict)  # name of a run -> why
    ready: set[str] = field(default_factory=set)  # digests of data that are made
    begun: float = field(default_factory=time.monotonic)

    def run(self) -> None:
        """Returns when nothing more can run and all processes have ended.

        Raises Interrupted if a signal came.
        """
        left = [run for run in self.runs if not run.complete]
        with Stop(None, self.begun) as stop:
            try:
                while stop.reason is None:
                    self._collect()
                    self._make_data(left)
                    left = self._start(left)
                    if not self.workers and not self._startable(left):
                        return
                    time.sleep(POLL)
                for worker in self.workers:
                    worker.stop()
                while self.workers:
                    self._collect()
                    time.sleep(POLL)
                raise Interrupted(stop.reason)
            finally:
                for worker in self.workers:
                    worker.kill()

    def state(self, run: SweepRun) -> str:
        """The state of a run, in a line."""
        if run.name in self.failed:
            return f"failed: {self.failed[run.name]}"
        result = run.result()
        if result is not None:
            return ("" if result["complete"] else "cut short: ") + summary(result)
        if run.after is not None and not run.after.complete:
            return f"waits for {run.after.name}"
        return "cut short" if (run.settings.folder / CHECKPOINT).exists() else "not started"

    # ---- one round

    def _collect(self) -> None:
        """Removes the processes that ended, and notes what they did."""
        for worker in [worker for worker in self.workers if worker.process.poll() is not None]:
            worker.reader.join()
            self.workers.remove(worker)
            code, data = worker.process.returncode, worker.run.data
            if code == 0 and worker.place is None:
                self.ready.add(data)
            elif code == 0 or worker.stopped or code in STOPPED:
                continue
            elif worker.place is None:
                why = "its data could not be made, see above"
                self.failed |= {run.name: why for run in self.runs if run.data == data}
            else:
                self.failed[worker.run.name] = f"exit status {code}, see above"

    def _make_data(self, left: Sequence[SweepRun]) -> None:
        """Makes the next data that a run needs, one set at a time, because it uses all cores."""
        busy = [worker for worker in self.workers if worker.place is None]
        if self._late():
            for worker in busy:
                worker.stop()
        elif not busy:
            wanted = (run for run in left if self._possible(run) and run.data not in self.ready)
            if (run := next(wanted, None)) is not None:
                self._open(run, None)

    def _start(self, left: list[SweepRun]) -> list[SweepRun]:
        """Starts runs in the free places; returns those that are left."""
        for place in set(range(len(self.places))) - {worker.place for worker in self.workers}:
            able = (run for run in self._startable(left) if run.data in self.ready)
            if (run := next(able, None)) is not None:
                self._open(run, place)
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

    def _open(self, run: SweepRun, place: int | None) -> None:
        """Starts a process, in its own session, so that only `run` passes Ctrl-C on to it."""
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
        reader = threading.Thread(target=_forward, args=(run.name, process), daemon=True)
        reader.start()
        self.workers.append(Worker(run, place, process, reader))

    # ---- time

    def _left(self) -> float | None:
        """Minutes that are left."""
        if self.minutes is None:
            return None
        return self.minutes - (time.monotonic() - self.begun) / 60

    def _late(self) -> bool:
        """Whether too little time is left to start anything."""
        left = self._left()
        return left is not None and left < min(LEAST, (self.minutes or 0) / 2)


def _forward(name: str, process: subprocess.Popen[str]) -> None:
    """Prints every line of a process after its name."""
    for line in process.stdout or ():
        print(f"[{name}] {line.rstrip()}", file=sys.stderr, flush=True)
