"""Checks of options at the border, each a ValueError that names the value and the remedy."""

from typing import Any


def whole_number(name: str, value: Any, least: int = 1) -> None:
    """ValueError for anything but an int of at least `least`."""
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ValueError(f"{name}={value!r}: give a whole number, at least {least}")
