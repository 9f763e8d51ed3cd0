"""Prepares training steps in several processes at once, and times one after another.

Most of a measurement is compilation, which can use all cores. The GPU runs one step at a time while
it is timed.
"""

import os
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from experiments.common.processes import CONTEXT, leave_alone
from experiments.lra.speed.case import StepCase
from experiments.lra.speed.rows import StepRow

_READY = "ready"
Measure = Callable[[StepCase, Callable[[], None]], StepRow]  # the callable waits for its turn
Found = tuple[StepCase, StepRow | str]


def run_together(
    cases: Sequence[StepCase], measure: Measure, workers: int, limit_s: float
) -> Iterator[Found]:
    """Yields every case with its row, or the reason why there is none, `workers` at a time.

    A case that runs out of memory is measured again beside fewer others, at last alone.

    measure: a function at the top of a module, which the processes import.
    limit_s: seconds for the cases that are prepared together, and again for each one timed.
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


def _wave(cases: Sequence[StepCase], measure: Measure, limit_s: float) -> Iterator[Found]:
    begun = time.monotonic()
    workers = [_start(case, measure) for case in cases]
    try:
        answers = [_answer(*worker, begun + limit_s - time.monotonic()) for worker in workers]
        took, ready = time.monotonic() - begun, answers.count(_READY)
        print(f"{ready} of {len(cases)} steps are ready after {took:.0f} s", flush=True)
        for case, (pipe, process), answer in zip(cases, workers, answers, strict=True):
            if answer == _READY:
                pipe.send(None)
                answer = _answer(pipe, process, limit_s)
            process.terminate()  # it may hold memory that the next one needs
            process.join()
            yield case, answer
    finally:
        for _, process in workers:
            process.terminate()


def _answer(pipe: Any, process: Any, seconds: float) -> Any:
    """_READY, a row, or the reason why there is neither."""
    try:
        if pipe.poll(max(0.0, seconds)):
            return pipe.recv()
    except EOFError:
        process.join()
        return f"the process that measures ended with {process.exitcode}"
    return "the process that measures did not answer in time"


def _start(case: StepCase, measure: Measure) -> tuple[Any, Any]:
    ours, theirs = CONTEXT.Pipe()
    process = CONTEXT.Process(target=_work, args=(case, measure, theirs), daemon=True)
    process.start()
    theirs.close()
    return ours, process


def _work(case: StepCase, measure: Measure, pipe: Any) -> None:
    leave_alone()
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")  # there are enough processes

    def wait() -> None:
        pipe.send(_READY)
        pipe.recv()

    pipe.send(measure(case, wait))
