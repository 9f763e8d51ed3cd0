"""The register of patterns and transforms, and of the masks in memory.

Every pattern and transform has its names, canonical text and gallery entries from here. A compiled
graph knows a mask by its key alone. Text spells most masks; arrays and block masks have a digest
for a key, so they are looked up here.
"""

import functools
import hashlib
import importlib
import inspect
import operator
import os
from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple, TypeVar
from weakref import WeakValueDictionary

Factory = TypeVar("Factory", bound=Callable[..., Any])
Made = TypeVar("Made")

BLOCKS = {"n": 16, "L": 4, "B": 16}  # of examples: n = 2**L token blocks of B tokens
OWN = "SPARSEFLASH_PATTERNS"  # environment variable: modules with patterns of the user's own
WRITTEN_OUT = 64  # numbers of an argument; with `digest`, more of them become a digest


class Example(NamedTuple):
    """A row of the gallery.

    Attributes:
        code: a Python expression of `masks`, for N = 256 tokens.
        use: what the pattern is good for, in a line.
        count: the allowed pairs as an expression of N and of the names in `given`, or "" where
            there is no closed form. The tests compare it with the mask.
        source: a number of arXiv, or a library.
        given: the values of the other names in `count`, by default those of `BLOCKS`.
        head: which of two heads is drawn and counted, where they differ.
    """

    code: str
    use: str
    count: str = ""
    source: str = ""
    given: dict[str, int] = BLOCKS
    head: int = 0


class Entry(NamedTuple):
    """A registered function."""

    function: Callable[..., Any]
    section: str
    examples: tuple[Example, ...]


PATTERNS: dict[str, Entry] = {}  # by every name, long and short
TRANSFORMS: dict[str, Entry] = {}
_living: WeakValueDictionary[str, Any] = WeakValueDictionary()  # masks and block masks, by key
_caches: list[Callable[[], None]] = []  # what forgets all that was made from texts of masks


def pattern(
    code: str = "",
    use: str = "",
    count: str = "",
    source: str = "",
    given: dict[str, int] = BLOCKS,
    *,
    head: int = 0,
    also: tuple[Example, ...] = (),
    short: str | None = None,
    written: int | None = None,
    digest: bool = False,
    names: dict[str, Entry] = PATTERNS,
) -> Callable[[Factory], Factory]:
    """Return a decorator of a function that makes a mask.

    `masks.parse` knows the function by its name, and by `short`. A leaf that it returns gets its
    canonical text, which follows from the arguments of the call. So does `masks.where(rule)`; any
    other mask keeps its own text. Where the same function is defined again, as a notebook does,
    what was built from its texts is forgotten.

    Args:
        code, use, count, source, given, head: a row of the gallery, see `Example`. It stands in the
            section that the module names in `SECTION`, and the tests check it.
        also: more rows.
        written: how many leading arguments the text always has, by position. By default these are
            the ones without a default value. The others are written as name=value, and left out
            where they have their default.
        digest: whether an argument of more than 64 numbers is written as a digest.
        names: where the function is registered.

    Raises:
        ValueError: the name belongs to another function, or no text can hold it. So does a call
            of the function where it returns no mask.
    """
    if callable(code):
        raise ValueError("the decorator is missing its parentheses: write @masks.pattern()")
    examples = (Example(code, use, count, source, given, head), *also) if code else ()

    def register(function: Factory) -> Factory:
        kind = function.__name__
        if not kind.isidentifier():
            raise ValueError(f"{kind!r} is no name for a text: define the function with def")
        parameters = inspect.signature(function).parameters.values()
        defaults = {parameter.name: parameter.default for parameter in parameters}
        required = sum(default is inspect.Parameter.empty for default in defaults.values())
        leading = list(defaults)[: required if written is None else written]

        @functools.wraps(function)
        def make(*args: Any, **keywords: Any) -> Any:
            made = function(*args, **keywords)
            if not issubclass(type(made), Keyed):
                raise ValueError(f"{kind} gives {made!r}: return a mask")
            known, anonymous = hasattr(made, "key"), getattr(made, "anonymous", False)
            if known and not anonymous:
                return made
            given = {**dict(zip(defaults, args, strict=False)), **keywords}
            given |= getattr(made, "_canonical", {})  # Dynamo of torch 2.11 knows no __dict__.pop
            arguments = {key: plain(given.get(key, defaults[key])) for key in defaults}
            shown = {key: _shown(value, digest) for key, value in arguments.items()}
            parts = [repr(shown[key]) for key in leading if shown[key] is not None]
            others = [key for key in defaults if key not in leading and shown[key] != defaults[key]]
            parts += [f"{key}={shown[key]!r}" for key in others]
            spelled = shown == arguments and (known or made.spelled)
            made = replace(made, anonymous=False) if known else made
            return named(made, f"{kind}({', '.join(parts)})", kind, arguments, spelled)

        section = getattr(function, "__globals__", {}).get("SECTION", "Other")
        again, words = False, list(filter(None, (kind, short)))
        for word in words:
            taken = PATTERNS.get(word) or TRANSFORMS.get(word)
            again |= taken is not None
            if taken and _origin(taken.function) != _origin(function):  # else it is redefined
                raise ValueError(
                    f"{word!r} is the name of {'.'.join(_origin(taken.function))}: take another"
                )
        names.update(dict.fromkeys(words, Entry(make, section, examples)))
        for forget in _caches if again else ():
            forget()
        return make  # type: ignore[return-value]

    return register


def transform(*example: Any, **options: Any) -> Callable[[Factory], Factory]:
    """Return a decorator of a function that makes the right side of `>>`; see `pattern`."""
    return pattern(*example, names=TRANSFORMS, **options)


def own_modules() -> list[str]:
    """Return the modules that the environment names, separated by commas."""
    return [name for word in os.environ.get(OWN, "").split(",") if (name := word.strip())]


def import_own() -> None:
    """Import these modules, which register their patterns. Raises ValueError if one cannot be."""
    for name in own_modules():
        try:
            importlib.import_module(name)
        except Exception as error:
            raise ValueError(
                f"{OWN}={name} cannot be imported ({type(error).__name__}: {error}): give the name "
                "of a module, and its folder in PYTHONPATH"
            ) from error


def by_text(forget: Callable[[], None]) -> Callable[[], None]:
    """Return a decorator of what empties a cache whose keys have texts of masks."""
    _caches.append(forget)
    return forget


def canonical(made: Made, **arguments: Any) -> Made:
    """`made`, with arguments for its text that mean the same as those of the call."""
    object.__setattr__(made, "_canonical", arguments)
    return made


def named(made: Made, key: str, kind: str, arguments: dict[str, Any], spelled: bool) -> Made:
    """`made` with its canonical text, its kind and the arguments that it was made with."""
    values = {"key": key, "kind": kind, "arguments": arguments, "spelled": spelled}
    values["_canonical"] = {}  # used up: another pattern may name the same object again
    for attribute, value in values.items():
        object.__setattr__(made, attribute, value)
    if not spelled:
        remember(made)
    return made


def _origin(function: Callable[..., Any]) -> tuple[str, str]:
    return function.__module__, function.__qualname__


def plain(value: Any) -> Any:
    """Plain Python numbers and tuples, from arrays, tensors and lists."""
    if type(value) is int:
        return operator.index(value)  # the number of what torch.compile traces as a symbol
    if hasattr(value, "tolist"):
        value = value.tolist()
    return tuple(map(plain, value)) if isinstance(value, tuple | list) else value


def _shown(value: Any, digest: bool) -> Any:
    """Return the value as it stands in a text."""
    if not digest or not isinstance(value, tuple) or _count(value) <= WRITTEN_OUT:
        return value
    return f"sha256:{hashlib.sha256(repr(value).encode()).hexdigest()}"


def _count(value: Any) -> int:
    return sum(map(_count, value)) if isinstance(value, tuple) else 1


class Keyed:
    """Base of what is equal, and hashed, by its `key`."""

    key: str

    def __eq__(self, other: object) -> bool:
        return self.key == other.key if isinstance(other, Keyed) else NotImplemented

    def __hash__(self) -> int:
        return hash(self.key)

    def __repr__(self) -> str:
        return self.key


def remember(mask: Any) -> None:
    """Make a Mask or BlockMask known under its key."""
    first = _living.setdefault(mask.key, mask)
    if first is not mask:
        object.__setattr__(mask, "_twin", first)  # the entry lives as long as the last equal mask


def living(key: str) -> Any:
    """Return the Mask or BlockMask with this key that is in memory, or None."""
    return _living.get(key)
