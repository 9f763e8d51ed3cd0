"""Checks of arguments: plain Python values come out, or a ValueError that names the remedy."""

import hashlib
import inspect
import operator
import os
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

_NAMES = {"batch": "b", "head": "h", "query": "q", "key": "k", "kv": "k"}  # of one letter, and
_NUMBER = re.compile(r"(batch|head|query|key|kv|b|h|q|k)_?(i|id|idx|index|pos|position|token)?s?")
FAR = 1 << 60  # more than any number of tokens; sums of a few still fit int64


def integer(name: str, value: Any, *, min: int, max: int = FAR) -> int:
    """`value` as a Python int in min..max. Accepts NumPy integers, refuses bools and floats."""
    try:
        if isinstance(value, bool):
            raise TypeError
        number = operator.index(value)
    except TypeError:
        raise ValueError(f"{name} is {value!r}: give an integer >= {min}") from None
    if number < min:
        raise ValueError(f"{name} is {number}: give an integer >= {min}")
    if number > max:
        raise ValueError(f"{name} is {number}: give an integer <= {max}")
    return number


def ascending(name: str, values: Any, *, min: int | None = 0) -> tuple[int, ...]:
    """Return `values`, different integers >= min (any where that is None), in ascending order."""
    try:
        values = tuple(values)
    except TypeError:
        raise ValueError(f"{name} is {values!r}: give a tuple of integers") from None
    least = -FAR if min is None else min
    numbers = sorted(integer(f"a number in {name}", value, min=least) for value in values)
    for number, following in pairwise(numbers):
        if number == following:
            raise ValueError(f"{name} has {number} twice: give every number once")
    return tuple(numbers)


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


def file_path(value: Any, example: str, *, opened: bool = False) -> Any:
    """`value`, which must be a path: a number would be the descriptor of an open file.

    opened: whether it may be a file that is open for writing.
    """
    if not isinstance(value, str | os.PathLike) and not (opened and hasattr(value, "write")):
        raise ValueError(f"path is {value!r}: give the path of a file, such as {example!r}")
    return value


def block_sizes(block_size: Any) -> tuple[int, int]:
    """(block_q, block_k) from one size or a pair."""
    if isinstance(block_size, tuple | list):
        if len(block_size) != 2:
            raise ValueError(f"block_size is {block_size!r}: give one size or (block_q, block_k)")
        sizes = block_size
    else:
        sizes = (block_size, block_size)
    block_q, block_k = (integer("block_size", size, min=1) for size in sizes)
    for size in (block_q, block_k):
        if size % 16 or not 16 <= size <= 256:
            raise ValueError(f"block_size is {size}: give multiples of 16 between 16 and 256")
    return block_q, block_k


def to_numpy(array: Any) -> NDArray:
    """Return a NumPy array of an array or of a tensor on any device."""
    return np.asarray(array.detach().cpu() if hasattr(array, "detach") else array)


def read_array(array: Any) -> tuple[NDArray[np.bool_], str]:
    """Return (a read-only copy (batch, heads, n_q, n_k), its text) of what `mask_from` takes."""
    data = np.array(to_numpy(array))
    if data.dtype != bool:
        kind = type(array).__name__ if data.dtype == object else data.dtype
        raise ValueError(f"array is {kind}: give booleans, True where allowed")
    if data.ndim not in (2, 3, 4) or data.size == 0:
        raise ValueError(
            f"array has shape {data.shape}: give (n_q, n_k), (heads, n_q, n_k) "
            "or (batch, heads, n_q, n_k), none of them 0"
        )
    digest = hashlib.sha256(np.packbits(data).data).hexdigest()
    data = np.ascontiguousarray(data.reshape((1,) * (4 - data.ndim) + data.shape))
    data.flags.writeable = False
    return data, f"mask_from({data.shape}, sha256='{digest}')"


def layout_extents(
    shape: tuple[int, ...], block_size: int | tuple[int, int], n_q: int | None, n_k: int | None
) -> tuple[int, int, int, int, int, int]:
    """Return batch, heads, n_q, n_k, block_q and block_k of a layout with this shape.

    Raises ValueError for a shape that is not (rows, cols), (heads, rows, cols) or (batch, heads,
    rows, cols), and for tokens that have another number of blocks.
    """
    if len(shape) not in (2, 3, 4):
        raise ValueError(
            f"layout has shape {tuple(shape)}: give (rows, cols), (heads, rows, cols) or"
            " (batch, heads, rows, cols)"
        )
    batch, heads, rows, cols = (1,) * (4 - len(shape)) + tuple(shape)
    sizes, tokens = block_sizes(block_size), []
    for name, n, block, count in zip(("n_q", "n_k"), (n_q, n_k), sizes, (rows, cols), strict=True):
        n = count * block if n is None else integer(name, n, min=0)
        if -(-n // block) != count:
            raise ValueError(
                f"{name} is {n}, {-(-n // block)} blocks of {block} tokens, and layout has {count}:"
                f" give {name} between {(count - 1) * block + 1} and {count * block}"
            )
        tokens.append(n)
    return batch, heads, tokens[0], tokens[1], *sizes


@contextmanager
def installed(what: str, package: str, extra: str) -> Iterator[None]:
    """Context of the imports of an optional package: an ImportError names what to install."""
    try:
        yield
    except ImportError as error:
        remedy = f"pip install '{package}', or the extra '{extra}' of sparseflash"
        raise type(error)(f"{what} ({error}): {remedy}", name=error.name) from None


def argument_places(
    fn: Callable[..., Any], name: str, places: tuple[str, ...], remedy: str
) -> tuple[str, ...]:
    """Return what fn takes by position: `places` (of "b", "h", "q", "k") in the order of its names.

    Raises:
        ValueError: fn cannot be called with so many numbers, or a name contradicts its place.
    """
    try:
        signature = inspect.signature(fn)
    except (TypeError, ValueError):  # of a ufunc or builtin
        return places
    wanted = f"{name}{signature} cannot be called as fn({', '.join(places)})"
    try:
        bound = signature.bind(*places).arguments
    except TypeError:
        raise ValueError(f"{wanted}: {remedy}") from None
    order = [_meaning(word) for word, value in bound.items() if isinstance(value, str)]
    if sorted(map(str, order)) == sorted(places):
        return tuple(map(str, order))
    for word, place in bound.items():
        if _meaning(word) not in (None, place):
            raise ValueError(f"{wanted}: parameter {word} would get the number {place}; {remedy}")
    return places


def _meaning(parameter: str) -> str | None:
    """Return the letter that a parameter's name stands for: b, h, q, k, or None."""
    found = _NUMBER.fullmatch(parameter.lower())
    return _NAMES.get(found[1], found[1]) if found else None
