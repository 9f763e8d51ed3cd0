"""Checks of values, each a ValueError that names the option, its value and the remedy."""

import difflib
from collections.abc import Iterable
from typing import Any


def whole_number(name: str, value: Any, least: int = 1) -> None:
    """Raise ValueError unless the value is an int of at least `least`."""
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ValueError(f"{name}={value!r}: give a whole number, at least {least}")


def choose(name: str, value: Any, choices: Iterable[Any]) -> None:
    """Raise ValueError with the choices, and the nearest, unless the value is one of them."""
    choices = [str(choice) for choice in choices]
    if str(value) not in choices:
        close = difflib.get_close_matches(str(value), choices, 1)
        hint = f" (did you mean {close[0]}?)" if close else ""
        raise ValueError(f"{name}={value!r}: choose from {', '.join(choices)}{hint}")


def as_list(value: Any) -> list[Any]:
    """Return the values of an option that takes one or a list: [] for None."""
    if value is None:
        return []
    return list(value) if isinstance(value, list | tuple) else [value]
