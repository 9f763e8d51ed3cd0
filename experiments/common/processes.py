"""Processes for work that holds the interpreter's lock.

Ctrl-C does not reach them: the program that started them tells of it, and ends them.
"""

import multiprocessing
import signal
import threading
from collections.abc import Iterator
from concurrent.futures import InvalidStateError, ProcessPoolExecutor
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
            threading.excepthook = _without_cancelled  # from now on: a second Ctrl-C does not wait
            for process in multiprocessing.active_children():
                process.terminate()
            raise


def _without_cancelled(fault: threading.ExceptHookArgs) -> None:
    """Prints the fault of a thread. A pool whose processes end may fail on its cancelled calls."""
    if fault.exc_type is not InvalidStateError:
        threading.__excepthook__(fault)
