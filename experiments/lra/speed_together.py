"""Training steps made ready in several processes at once, and then timed one after another.

Most of a measurement is compiling, which the processor's cores can do side by side; the GPU
belongs to one step at a time while it is timed.
"""

import multiprocessing
import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from experiments.lra.speed_case import StepCase
from experiments.lra.speed_rows import StepRow

_READY = "ready"
# (case, called between making ready and timing) -> its row
Measure = Callable[[StepCase, Callable[[], None]], StepRow]


@dataclass
class _Worker:
    case: StepCase
    pipe: Any
    process: Any

    def answer(self, seconds: float) -> Any:
        """What it says next: READY, a row, or a text that says why there is neither."""
        try:
            if self.pipe.poll(max(0.0, seconds)):
                return self.pipe.recv()
        except EOFError:
            self.process.join()
            return f"the process that measures ended with {self.process.exitcode}"
        return "the process that measures did not answer in time"


def run_together(
    cases: Sequence[StepCase], measure: Measure, workers: int, limit_s: float
) -> Iterator[tuple[StepCase, StepRow | str]]:
    """(case, its row, or why there is none) of every case, `workers` of them at a time.

    measure: a function of a module, which the processes import.
    limit_s: for all that are made ready at the same time, and again for every one that is timed.

    What found no memory beside the others is measured again beside fewer, in the end alone.
    """
    crowded = []
    for first in range(0, len(cases), workers):
        for case, row in _wave(cases[first : first + workers], measure, limit_s):
            if workers > 1 and isinstance(row, StepRow) and row.status.startswith("out of memory"):
                crowded.append(case)
            else:
                yield case, row
    if crowded:
        yield from run_together(crowded, measure, max(1, workers // 4), limit_s)


def _wave(
    cases: Sequence[StepCase], measure: Measure, limit_s: float
) -> Iterator[tuple[StepCase, StepRow | str]]:
    begun = time.monotonic()
    workers = [_start(case, measure) for case in cases]
    try:
        answers = [worker.answer(begun + limit_s - time.monotonic()) for worker in workers]
        took, ready = time.monotonic() - begun, answers.count(_READY)
        print(f"{ready} of {len(cases)} steps are ready after {took:.0f} s", flush=True)
        for worker, answer in zip(workers, answers, strict=True):
            if answer == _READY:
                worker.pipe.send(None)
                answer = worker.answer(limit_s)
            worker.process.terminate()  # it may hold memory that the next one needs
            worker.process.join()
            yield worker.case, answer
    finally:
        for worker in workers:
            worker.process.terminate()


def _start(case: StepCase, measure: Measure) -> _Worker:
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_work, args=(case, measure, theirs), daemon=True)
    process.start()
    theirs.close()
    return _Worker(case, ours, process)


def _work(case: StepCase, measure: Measure, pipe: Any) -> None:
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")  # there are enough processes

    def wait() -> None:
        pipe.send(_READY)
        pipe.recv()

    pipe.send(measure(case, wait))
