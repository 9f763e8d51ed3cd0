"""Checks of options, each a ValueError that names the option, its value and the remedy."""

import difflib
import math
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from types import MappingProxyType
from typing import Any


def is_number(value: Any) -> bool:
    """Whether the value is a number, which true and false are not."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def whole_number(name: str, value: Any, least: int = 1) -> None:
    """Raise ValueError unless the value is an int of at least `least`."""
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ValueError(f"{name}={value!r}: give a whole number, at least {least}")


def positive_number(name: str, value: Any) -> None:
    """Raise ValueError unless the value is a finite number above 0."""
    if not is_number(value) or not 0 < value < math.inf:
        raise ValueError(f"{name}={value!r}: give a number above 0")


def share(name: str, value: Any) -> None:
    """Raise ValueError unless the value is a number from 0 to below 1."""
    if not is_number(value) or not 0 <= value < 1:
        raise ValueError(f"{name}={value!r}: give a number from 0 to below 1")


def at_least_one(options: dict[str, Any], names: str) -> None:
    """Raise ValueError unless each of the options is a value or a list of some."""
    for name in names.split():
        if options[name] is None or options[name] == []:
            raise ValueError(f"{name}={options[name]!r}: give at least one")


def path_text(name: str, value: Any) -> None:
    """Raise ValueError unless the value is the text of a path; Hydra reads rows=0 as a number."""
    if not isinstance(value, str) or not value:
        hint = f", and write {name}=./{value} for that name" if is_number(value) else ""
        raise ValueError(f"{name}={value!r}: give a path{hint}")


def choose(name: str, value: Any, choices: Iterable[Any]) -> None:
    """Raise ValueError with the choices, and the nearest, unless the value is one of them."""
    choices = [str(choice) for choice in choices]
    if str(value) not in choices:
        close = difflib.get_close_matches(str(value), choices, 1)
        hint = f" (did you mean {close[0]}?)" if close else ""
        raise ValueError(f"{name}={value!r}: choose from {', '.join(choices)}{hint}")


def check_options(
    options: dict[str, Any],
    *,
    lists: str = "",
    optional: str = "",
    whole: str = "",
    least: Mapping[str, int] = MappingProxyType({}),
    positive: str = "",
    paths: str = "",
    choices: Mapping[str, Iterable[Any]] = MappingProxyType({}),
) -> None:
    """Raise ValueError for options that are out of range.

    Args:
        lists: names of options that take one value or a list, which become lists of such values:
            of one at least, or of none for one that is `optional` and None.
        optional: names of options that may be None.
        whole: names of whole numbers, at least 1; `least` has those with another minimum.
        positive: names of numbers above 0.
        paths: names of files and folders.
        choices: what to choose from, by the name of the option.
    """
    several, maybe = lists.split(), optional.split()
    for name in several:
        if options[name] is not None or name not in maybe:
            at_least_one(options, name)
        options[name] = as_list(options[name])
    checks: list[tuple[str, Callable[[str, Any], None]]] = []
    checks += [(name, whole_number) for name in whole.split()]
    checks += [(name, partial(whole_number, least=n)) for name, n in least.items()]
    checks += [(name, positive_number) for name in positive.split()]
    checks += [(name, path_text) for name in paths.split()]
    checks += [(name, partial(choose, choices=known)) for name, known in choices.items()]
    for name, check in checks:
        value = options[name]
        for each in value if name in several else [value]:
            if each is not None or name not in maybe:
                check(name, each)


def as_list(value: Any) -> list[Any]:
    """Return the values of an option that takes one or a list: [] for None."""
    if value is None:
        return []
    return list(value) if isinstance(value, list | tuple) else [value]
