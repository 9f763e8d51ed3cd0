"""Processes for work that holds the interpreter's lock.

Ctrl-C does not reach them: the program that started them tells of it, and ends them.
"""

import multiprocessing
import signal
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from multiprocessing import resource_tracker
from multiprocessing.context import SpawnContext, SpawnProcess


class Process(SpawnProcess):
    """A new interpreter, in which SIGINT is blocked from its first moment on."""

    def start(self) -> None:
        resource_tracker.ensure_running()  # its own start would unblock the signal
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})  # the process inherits that
        try:
            super().start()
        finally:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})


class Context(SpawnContext):
    Process = Process


@contextmanager
def processes(workers: int) -> Iterator[ProcessPoolExecutor]:
    """Gives a pool of processes. An error in the block, or Ctrl-C, ends them at once."""
    with ProcessPoolExecutor(workers, Context()) as pool:
        try:
            yield pool
        except BaseException:
            for process in multiprocessing.active_children():
                process.terminate()
            raise
