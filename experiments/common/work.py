"""Long work: cores, processes, and how much of it is done."""

import multiprocessing
import os
import signal
from collections.abc import Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from itertools import islice
from typing import TypeVar

from tqdm import tqdm

T = TypeVar("T")


def progress(items: Iterable[T], total: int | None, what: str) -> Iterator[T]:
    """Yield the items; a terminal shows how many went by and the time left, after two seconds.

    The first one, which may wait for processes that start, does not count in the time left.
    """
    left = iter(items)
    yield from islice(left, 1)
    yield from tqdm(left, what, total, delay=2, disable=None, initial=1)


def cores() -> int:
    """Return the number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@contextmanager
def processes(workers: int) -> Iterator[ProcessPoolExecutor]:
    """Give a pool of processes, which Ctrl-C does not reach. An error in the block ends them."""
    context, ignored = multiprocessing.get_context("spawn"), (signal.SIGINT, signal.SIG_IGN)
    with ProcessPoolExecutor(workers, context, signal.signal, ignored) as pool:
        try:
            yield pool
        except BaseException:
            for process in multiprocessing.active_children():
                process.terminate()
            raise
