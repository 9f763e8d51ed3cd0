"""Threads for work that releases the interpreter's lock."""

import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager


def cores() -> int:
    """Return the number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@contextmanager
def threads(workers: int | None = None) -> Iterator[ThreadPoolExecutor]:
    """Give a pool of threads, one a core by default. What has not begun when the block ends, by an
    error or Ctrl-C too, is dropped.
    """
    with ThreadPoolExecutor(workers or cores()) as pool:
        try:
            yield pool
        finally:
            pool.shutdown(cancel_futures=True)
