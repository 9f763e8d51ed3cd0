"""Cases of a loop, named where one of them fails, and how many random ones there are."""

import os
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def note(*case: object) -> Iterator[None]:
    """Add the case to the error of its block."""
    try:
        yield
    except Exception as error:
        error.add_note(f"case {', '.join(map(str, case))}")
        raise


FUZZ = int(os.environ.get("SPARSEFLASH_FUZZ", "1"))  # times as many random cases


def seeds(count: int, first: int = 0) -> range:
    """Return the seeds of random cases."""
    return range(first, first + count * FUZZ)
