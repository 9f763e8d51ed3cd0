"""The registry of attentions: each file of this folder registers what it defines."""

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, TypeVar, get_args, get_origin

from experiments.lra.models.attention.base import Attention

A = TypeVar("A", bound=type[Attention])
SHARED = inspect.signature(Attention).parameters.keys()  # what every attention takes


@dataclass(frozen=True)
class Kind:
    """An attention of the comparison."""

    name: str  # on the command line, as conf/attention/NAME.yaml
    label: str  # in tables and figures
    style: tuple[str, str, str]  # colour, marker and line of its curve
    cls: type[Attention]

    @property
    def options(self) -> dict[str, inspect.Parameter]:
        """The keyword arguments of the class and its bases but for those of every attention."""
        bases = self.cls.__mro__[: self.cls.__mro__.index(Attention)]
        found = [p for base in bases for p in inspect.signature(base).parameters.values()]
        own = (p for p in found if p.kind is p.KEYWORD_ONLY and p.name not in SHARED)
        return {p.name: p for p in own}


KINDS: dict[str, Kind] = {}


def register(name: str, *, label: str, style: tuple[str, str, str]) -> Callable[[A], A]:
    """Decorate the class of an attention. Its keyword arguments are its options, checked against
    their annotations: positive integers, numbers, True or False, or one of a Literal.
    """

    def add(cls: A) -> A:
        KINDS[name] = Kind(name, label, style, cls)
        return cls

    return add


def options_of(name: str) -> dict[str, Any]:
    """Return the options of an attention beyond the sizes, with their defaults (None: by the
    length).
    """
    return {key: option.default for key, option in _kind(name).options.items()}


def make_attention(name: str, **options: Any) -> Attention:
    """Return the attention of one layer: the sizes of `Attention`, and options of its own.

    An option that is None keeps its default. Raises ValueError for a name, an option or a value
    that does not exist.
    """
    kind = _kind(name)
    options = {key: value for key, value in options.items() if value is not None}
    if unknown := sorted(options.keys() - SHARED - kind.options.keys()):
        raise ValueError(
            f"{name} attention has no option {', '.join(unknown)};"
            f" it has {', '.join(kind.options) or 'none'}"
        )
    for key in options.keys() & kind.options.keys():
        _check(key, options[key], kind.options[key].annotation)
    return kind.cls(**options)


def _kind(name: str) -> Kind:
    if name not in KINDS:
        raise ValueError(f"there is no attention {name!r}; choose one of {', '.join(KINDS)}")
    return KINDS[name]


def _check(name: str, value: Any, annotation: Any) -> None:
    kinds = {annotation, *get_args(annotation)}
    flag = isinstance(value, bool)
    if get_origin(annotation) is Literal:
        if value not in get_args(annotation):
            choices = ", ".join(get_args(annotation))
            raise ValueError(f"{name} is {value!r}; choose from {choices}")
    elif bool in kinds and not flag:
        raise ValueError(f"{name} is {value!r}; it must be True or False")
    elif int in kinds and (flag or not isinstance(value, int) or value < 1):
        raise ValueError(f"{name} is {value!r}; it must be a positive integer")
    elif float in kinds and (flag or not isinstance(value, int | float) or not 0 <= value < 1e30):
        raise ValueError(f"{name} is {value!r}; it must be a number of at least 0")
