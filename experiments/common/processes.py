"""Processes for work that holds the interpreter's lock."""

import multiprocessing
import signal
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager

CONTEXT = multiprocessing.get_context("spawn")


@contextmanager
def processes(workers: int) -> Iterator[ProcessPoolExecutor]:
    """Give a pool of processes, which Ctrl-C does not reach. An error in the block ends them."""
    with ProcessPoolExecutor(workers, CONTEXT, leave_alone) as pool:
        try:
            yield pool
        except BaseException:
            for process in multiprocessing.active_children():
                process.terminate()
            raise


def leave_alone() -> None:
    """Ignore Ctrl-C in a process: the program that started it ends it."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
