"""Masks and block masks found again by their key, for as long as they live.

A compiled graph knows a mask by its key alone. Text spells most masks; arrays and block masks have
a digest for a key, so they are looked up here.
"""

from typing import Any
from weakref import WeakValueDictionary

_living: WeakValueDictionary[str, Any] = WeakValueDictionary()


def remember(mask: Any) -> None:
    """Make a Mask or BlockMask known under its key."""
    first = _living.setdefault(mask.key, mask)
    if first is not mask:
        object.__setattr__(mask, "_twin", first)  # the entry lives as long as the last equal mask


def living(key: str) -> Any:
    """The Mask or BlockMask with this key that is in memory, or None."""
    return _living.get(key)
