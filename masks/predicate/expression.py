"""Expressions: what a predicate computes, recorded by calling it with symbols for q and k.

A predicate is plain NumPy code. Called with expressions instead of arrays, its operators build a
tree, which can then be asked for bounds over whole rectangles of tokens (`masks.predicate.bounds`).
Integers are kept as sums of coefficients times atoms, so that `q - k` stays exact wherever it goes.
"""

from collections.abc import Callable
from typing import Any, NoReturn

import numpy as np

INT, REAL, BOOL = "int", "real", "bool"
COMPARISONS = ("less", "less_equal", "greater", "greater_equal", "equal", "not_equal")
_INT64 = 1 << 63
INDEXED = "an array is indexed: wrap it once, as in ids = masks.table(ids)"

# What NumPy's functions do with expressions; `masks.predicate.operators` fills them in.
UFUNCS: "dict[str, Callable[..., Expression]]" = {}
FUNCTIONS: "dict[str, Callable[..., Expression]]" = {}


class Unsupported(Exception):
    """The predicate does something that only arrays can do; the message says what, and a remedy."""


class Expression:
    """A node. `op` is a name that the interpreters know, `data` its constants.

    An integer is op "sum": data = (constant, coefficients), one coefficient for each of `args`.
    """

    __slots__ = ("args", "data", "kind", "op")

    def __init__(self, op: str, kind: str, args: "tuple[Expression, ...]" = (), data: Any = None):
        self.op, self.kind, self.args, self.data = op, kind, args, data

    def __array_ufunc__(self, ufunc: np.ufunc, method: str, *inputs: Any, **options: Any) -> Any:
        function = UFUNCS.get(ufunc.__name__)
        if function is None or method != "__call__" or options:
            raise Unsupported(f"np.{ufunc.__name__} is not known here")
        return function(*inputs)

    def __array_function__(self, function: Any, types: Any, args: tuple, options: dict) -> Any:
        known = FUNCTIONS.get(function.__name__)
        if known is None:
            raise Unsupported(f"np.{function.__name__} is not known here")
        return known(*args, **options)

    def __bool__(self) -> NoReturn:
        raise Unsupported(
            "`and`, `or`, `not`, `if`, `a < b < c`, min() and max() need one truth value: write "
            "& | ~, np.where, np.minimum and np.maximum"
        )

    def __index__(self) -> NoReturn:
        raise Unsupported(INDEXED)

    def __iter__(self) -> NoReturn:
        raise Unsupported("q and k are numbers here: they have no elements to go through")

    __hash__ = object.__hash__  # by identity: == makes an expression


def lift(value: Any) -> Expression:
    """Return an expression, or a constant as one."""
    if isinstance(value, Expression):
        return value
    number = value
    if isinstance(value, np.ndarray | np.generic) and value.ndim == 0:
        number = None if value.dtype == np.uint64 else value.item()  # which makes int64 a float
    if isinstance(number, bool):
        return Expression("truth", BOOL, data=number)
    if isinstance(number, int) and -_INT64 <= number < _INT64:
        return whole(number, {})
    if isinstance(number, float) and np.isfinite(number):
        return Expression("float", REAL, data=float(number))
    what = f"an array of shape {np.shape(value)}" if np.ndim(value) else repr(value)
    raise Unsupported(f"{what} is no number that fits: give integers, or masks.table(array)[q]")


def constant(x: Expression) -> int | None:
    """Return the value of an integer that is the same for all q and k."""
    return x.data[0] if x.op == "sum" and not x.args else None


def inputs(node: Expression) -> tuple[Expression, ...]:
    """Return the operands; of integers that are compared only the difference."""
    difference = node.kind == BOOL and len(node.args) == 3 and node.op != "where"
    return node.args[:1] if difference else node.args


def whole(offset: int, terms: dict[Expression, int]) -> Expression:
    """offset + the sum of factor * atom"""
    terms = {atom: factor for atom, factor in terms.items() if factor}
    return Expression("sum", INT, tuple(terms), (offset, tuple(terms.values())))


def atom(op: str, *args: Expression, data: Any = None) -> Expression:
    """Return an integer that is no sum; "q", "k", "h" and "b" are token, head and batch numbers."""
    return whole(0, {Expression(op, INT, args, data): 1})


def weighted(x: Expression, a: int, y: Expression, b: int) -> Expression:
    """Return a * x + b * y."""
    terms: dict[Expression, int] = {}
    for part, weight in ((x, a), (y, b)):
        for atom, factor in zip(part.args, part.data[1], strict=True):
            terms[atom] = terms.get(atom, 0) + weight * factor
    return whole(a * x.data[0] + b * y.data[0], terms)
