"""Cases of a loop, named where one of them fails."""

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
