"""Progress of what takes long."""

import sys
import time
from collections.abc import Iterable, Iterator
from typing import TypeVar

T = TypeVar("T")


def progress(items: Iterable[T], total: int | None, what: str) -> Iterator[T]:
    """The items; from the third second on, stderr tells how many went by and the time left."""
    start = last = time.monotonic()
    live = sys.stderr.isatty()
    period, end = (0.5, "\r") if live else (10.0, "\n")
    told, count = False, 0
    for count, item in enumerate(items):
        now = time.monotonic()
        if count and now - start > 2 and (not told or now - last > period):
            left = (now - start) / count * ((total or 0) - count)
            text = f"{count} of {total}, {left:.0f} s left" if total else f"{count}"
            print(f"{what}: {text:<60}", end=end, file=sys.stderr, flush=True)
            last, told = now, True
        yield item
    if told:
        text = f"{total or count + 1} in {time.monotonic() - start:.0f} s"
        print(f"{what}: {text:<60}", file=sys.stderr, flush=True)
