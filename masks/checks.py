"""Checks of arguments: plain Python values come out, or a ValueError that names the remedy."""

import operator
from typing import Any

FAR = 1 << 60  # more than any number of tokens; sums of a few still fit int64


def integer(name: str, value: Any, *, least: int, most: int = FAR) -> int:
    """`value` as a Python int, least..most; NumPy's will do, bools and floats will not."""
    try:
        if isinstance(value, bool):
            raise TypeError
        number = operator.index(value)
    except TypeError:
        raise ValueError(f"{name} is {value!r}: give an integer >= {least}") from None
    if number < least:
        raise ValueError(f"{name} is {number}: give an integer >= {least}")
    if number > most:
        raise ValueError(f"{name} is {number}: give an integer <= {most}")
    return number


def choice(name: str, value: Any, options: tuple[str, ...]) -> str:
    """`value`, which must be one of `options`."""
    if not isinstance(value, str) or value not in options:
        raise ValueError(f"{name} is {value!r}: choose one of {', '.join(map(repr, options))}")
    return value


def flag(name: str, value: Any) -> bool:
    """`value`, which must be True or False."""
    if not isinstance(value, bool):
        raise ValueError(f"{name} is {value!r}: give True or False")
    return value
