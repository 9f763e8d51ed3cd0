"""Progress of what takes long."""

from collections.abc import Iterable
from typing import TypeVar

from tqdm import tqdm

T = TypeVar("T")


def progress(items: Iterable[T], total: int | None, what: str) -> Iterable[T]:
    """Return the items; a terminal shows how many went by and the time left, after two seconds."""
    return tqdm(items, what, total, delay=2, disable=None)
