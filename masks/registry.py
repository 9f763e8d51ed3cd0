"""Masks found again by their key.

A compiled graph knows a mask by its key alone. Text names most masks; arrays and block masks are
remembered here for as long as they live.
"""

from typing import Any
from weakref import WeakValueDictionary

_living: WeakValueDictionary[str, Any] = WeakValueDictionary()


def remember(mask: Any) -> None:
    """Make a Mask or BlockMask known under its key."""
    first = _living.setdefault(mask.key, mask)
    if first is not mask:
        object.__setattr__(mask, "_twin", first)  # the entry lives as long as the last equal mask


def find(key: str) -> Any:
    """The living mask of this key, or the one that the key spells. ValueError where neither is."""
    from masks.spec import parse

    found = _living.get(key)
    return parse(key) if found is None else found
