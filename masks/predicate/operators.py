"""The operators of expressions, and the NumPy functions that know them.

Every function takes expressions and constants, and raises `Unsupported` for what cannot be bounded.
"""

from collections.abc import Callable
from functools import reduce
from typing import Any

import numpy as np

from masks.predicate.expression import (
    BOOL,
    COMPARISONS,
    FUNCTIONS,
    INT,
    REAL,
    UFUNCS,
    Expression,
    Unsupported,
    atom,
    constant,
    lift,
    weighted,
)


def _real(op: str, *args: Expression) -> Expression:
    return Expression(op, REAL, args)


def _arithmetic(*values: Any) -> tuple[bool, list[Expression]]:
    """(whether all are integers, the operands)"""
    operands = [lift(value) for value in values]
    if any(x.kind == BOOL for x in operands):
        raise Unsupported("arithmetic with a truth value: use np.where(condition, 1, 0)")
    return all(x.kind == INT for x in operands), operands


def add(x: Any, y: Any) -> Expression:
    whole, (x, y) = _arithmetic(x, y)
    return weighted(x, 1, y, 1) if whole else _real("add", x, y)


def subtract(x: Any, y: Any) -> Expression:
    whole, (x, y) = _arithmetic(x, y)
    return weighted(x, 1, y, -1) if whole else _real("subtract", x, y)


def multiply(x: Any, y: Any) -> Expression:
    whole, (x, y) = _arithmetic(x, y)
    if not whole:
        return _real("multiply", x, y)
    for a, b in ((x, y), (y, x)):
        factor = constant(a)
        if factor is not None:
            return weighted(b, factor, b, 0)
    return atom("multiply", x, y)


def power(x: Any, exponent: Any) -> Expression:
    if not isinstance(exponent, (int, np.integer)) or not 1 <= exponent <= 8:
        raise Unsupported(f"a power of {exponent!r}: exponents are the integers 1 to 8")
    return reduce(multiply, _integers("a power", x) * int(exponent))


def divide(x: Any, y: Any) -> Expression:
    _, (x, y) = _arithmetic(x, y)
    return _real("divide", x, y)


def _integers(name: str, *values: Any) -> list[Expression]:
    operands = [lift(value) for value in values]
    if any(x.kind != INT for x in operands):
        raise Unsupported(f"{name} of numbers that are not integers")
    return operands


def floor_divide(x: Any, y: Any) -> Expression:
    return atom("floor_divide", *_integers("//", x, y))


def remainder(x: Any, y: Any) -> Expression:
    return atom("remainder", *_integers("%", x, y))


def negative(x: Any) -> Expression:
    return subtract(0, x) if lift(x).kind == INT else multiply(x, -1.0)


def _shift(name: str, bits: Any) -> int:
    if not isinstance(bits, (int, np.integer)) or not 0 <= bits < 62:
        raise Unsupported(f"{name} by {bits!r}: shifts are by constants from 0 to 61")
    return 1 << int(bits)


def left_shift(x: Any, bits: Any) -> Expression:
    (x,) = _integers("<<", x)
    return multiply(x, _shift("<<", bits))


def right_shift(x: Any, bits: Any) -> Expression:
    return floor_divide(x, _shift(">>", bits))


def _by_kind(op: str) -> Callable[..., Expression]:
    def function(*values: Any) -> Expression:
        whole, operands = _arithmetic(*values)
        return atom(op, *operands) if whole else _real(op, *operands)

    return function


absolute, minimum, maximum = map(_by_kind, ("absolute", "minimum", "maximum"))


def square(x: Any) -> Expression:
    x = lift(x)
    return multiply(x, x)


def sqrt(x: Any) -> Expression:
    return _real("sqrt", *_arithmetic(x)[1])


def _rounded(op: str) -> Callable[[Any], Expression]:
    def function(x: Any) -> Expression:
        whole, (x,) = _arithmetic(x)
        if whole:
            raise Unsupported(f"np.{op} of an integer, which is one already")
        return _real(op, x)

    return function


def clip(x: Any, low: Any = None, high: Any = None) -> Expression:
    x = x if low is None else maximum(x, low)
    return x if high is None else minimum(x, high)


# Truth values


def _compare(op: str) -> Callable[[Any, Any], Expression]:
    def function(x: Any, y: Any) -> Expression:
        x, y = lift(x), lift(y)
        if x.kind == y.kind == BOOL and op in ("equal", "not_equal"):
            different = Expression("xor", BOOL, (x, y))
            return different if op == "not_equal" else logical_not(different)
        whole, (x, y) = _arithmetic(x, y)
        args = (weighted(x, 1, y, -1), x, y) if whole else (x, y)
        return Expression(op, BOOL, args)

    return function


def _truths(name: str, *values: Any) -> tuple[Expression, ...]:
    operands = tuple(lift(value) for value in values)
    if any(x.kind != BOOL for x in operands):
        raise Unsupported(f"{name} of a truth value and a number")
    return operands


def _logical(op: str) -> Callable[[Any, Any], Expression]:
    return lambda x, y: Expression(op, BOOL, _truths(f"logical {op}", x, y))


logical_and, logical_or, logical_xor = map(_logical, ("and", "or", "xor"))


def logical_not(x: Any) -> Expression:
    return Expression("not", BOOL, _truths("logical not", x))


def _bitwise(op: str) -> Callable[[Any, Any], Expression]:
    def function(x: Any, y: Any) -> Expression:
        x, y = lift(x), lift(y)
        if x.kind == BOOL or y.kind == BOOL:
            return Expression(op, BOOL, _truths(f"{op} (& | ^)", x, y))
        x, y = _integers("& | ^", x, y)
        for a, b in ((x, y), (y, x)):
            bits = constant(a)
            if op == "and" and bits is not None and bits > 0 and bits & (bits + 1) == 0:
                return remainder(b, bits + 1)  # the low bits
        return atom(f"bit_{op}", x, y)

    return function


bitwise_and, bitwise_or, bitwise_xor = map(_bitwise, ("and", "or", "xor"))


def invert(x: Any) -> Expression:
    return logical_not(x) if lift(x).kind == BOOL else subtract(-1, *_integers("~", x))


def where(condition: Any, x: Any, y: Any) -> Expression:
    (condition,) = _truths("np.where: the condition", condition)
    x, y = lift(x), lift(y)
    if x.kind == y.kind == BOOL:
        return Expression("where", BOOL, (condition, x, y))
    whole, (x, y) = _arithmetic(x, y)
    return atom("where", condition, x, y) if whole else _real("where", condition, x, y)


def isin(x: Any, values: Any, *, invert: bool = False) -> Expression:
    (x,) = _integers("np.isin", x)
    chosen = np.unique(np.asarray(values))
    if chosen.dtype.kind != "i" and len(chosen):
        raise Unsupported("np.isin with values that are no signed integers")
    found = Expression("isin", BOOL, (x,), chosen.astype(np.int64))
    return logical_not(found) if invert else found


def entry(table: Any, index: Any) -> Expression:
    """table[index], for a `masks.predicate.table.Table`."""
    (index,) = _integers("a table's index", index)
    if table.kind == INT:
        return atom("entry", index, data=table)
    return Expression("entry", table.kind, (index,), table)


_BINARY = {
    "add": add,
    "sub": subtract,
    "mul": multiply,
    "truediv": divide,
    "floordiv": floor_divide,
    "mod": remainder,
    "pow": power,
    "lshift": left_shift,
    "rshift": right_shift,
    "and": bitwise_and,
    "or": bitwise_or,
    "xor": bitwise_xor,
}
for _name, _function in _BINARY.items():
    setattr(Expression, f"__{_name}__", _function)
    setattr(Expression, f"__r{_name}__", lambda x, y, _function=_function: _function(y, x))
_OTHERS = {"neg": negative, "abs": absolute, "invert": invert, "pos": lambda x: x}
_COMPARISONS = [_compare(name) for name in COMPARISONS]
_OTHERS |= zip(("lt", "le", "gt", "ge", "eq", "ne"), _COMPARISONS, strict=True)
for _name, _function in _OTHERS.items():
    setattr(Expression, f"__{_name}__", _function)

_NAMED = (add, subtract, multiply, power, divide, floor_divide, remainder, negative)
_NAMED += (left_shift, right_shift, logical_not, invert, square, sqrt)
UFUNCS |= {f.__name__: f for f in _NAMED} | {
    "absolute": absolute,
    "minimum": minimum,
    "maximum": maximum,
    "logical_and": logical_and,
    "logical_or": logical_or,
    "logical_xor": logical_xor,
    "bitwise_and": bitwise_and,
    "bitwise_or": bitwise_or,
    "bitwise_xor": bitwise_xor,
    "floor": _rounded("floor"),
    "ceil": _rounded("ceil"),
}
UFUNCS |= zip(COMPARISONS, _COMPARISONS, strict=True)
FUNCTIONS |= {"where": where, "isin": isin, "clip": clip}
