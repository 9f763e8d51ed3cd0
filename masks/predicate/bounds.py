"""Bounds of an expression over rectangles of (query, key), many rectangles at a time.

Numbers get the least interval that the rules below can prove, truth values a code of
`masks.runs`: EMPTY (false everywhere), FULL (true everywhere), or MIXED (perhaps both). A bound may
be loose, but never wrong. Bounds of reals hold with their rounding, for every operation here is
monotone and rounded correctly; what may be infinite or no number becomes NaN, which proves nothing.
"""

from collections.abc import Callable
from functools import reduce
from typing import Any

import numpy as np
from numpy.typing import NDArray

from masks.predicate.expression import (
    BOOL,
    COMPARISONS,
    INT,
    REAL,
    Expression,
    Unsupported,
    constant,
    inputs,
    walk,
)
from masks.runs import EMPTY, FULL, MIXED, Bools, Codes

Range = tuple[NDArray, NDArray]  # least and greatest value, both included
LARGEST = 1 << 52  # of any integer on the way: exact as a float, and far from where int64 ends
_NOTHING = np.zeros((), np.int64), np.zeros((), np.int64)


class Bounds:
    """Bounds over rectangles, each node of an expression computed once.

    Args:
        symbols: the range of "q", "k", "h" and "b", int64 (T,) arrays that broadcast.
    """

    def __init__(self, symbols: dict[str, Range]):
        self.symbols = symbols
        self.known: dict[Expression, Any] = {}

    def of(self, node: Expression) -> Any:
        """Return the `Range` of a number, or the `Codes` of a truth value, in each rectangle."""
        found = self.known.get(node)
        if found is None:
            if node.op in self.symbols:
                found = self.symbols[node.op]
            else:
                found = RULES[node.op](node, *map(self.of, inputs(node)))
            if node.kind == REAL:
                found = _finite(*found)
            self.known[node] = found
        return found


def _finite(low: NDArray, high: NDArray) -> Range:
    sure = np.isfinite(low) & np.isfinite(high)
    return np.where(sure, low, np.nan), np.where(sure, high, np.nan)


def _sum(node: Expression, *terms: Range) -> Range:
    low = high = np.int64(node.data[0])
    for factor, (least, most) in zip(node.data[1], terms, strict=True):
        if factor < 0:
            least, most = most, least
        if factor in (1, -1):
            low, high = (low + least, high + most) if factor == 1 else (low - least, high - most)
        else:
            low, high = low + least * factor, high + most * factor
    return np.asarray(low), np.asarray(high)


def _corners(operator: np.ufunc, x: Range, y: Range) -> Range:
    """Of an operator that is monotone in either operand, for any value of the other one."""
    values = [operator(a, b) for a in x for b in y]
    return np.minimum.reduce(values), np.maximum.reduce(values)


def _multiply(node: Expression, x: Range, y: Range) -> Range:
    if node.args[0] is node.args[1]:
        low, high = _absolute(node, x)
        return low * low, high * high
    return _corners(np.multiply, x, y)


def _divide(node: Expression, x: Range, y: Range) -> Range:
    low, high = _corners(np.divide, x, y)
    zero = (y[0] <= 0) & (y[1] >= 0)
    return np.where(zero, np.nan, low), np.where(zero, np.nan, high)


def _floor_divide(node: Expression, x: Range, y: Range) -> Range:
    divisor = constant(node.args[1])
    if divisor is not None and divisor > 0:
        return x[0] // divisor, x[1] // divisor
    zero = (y[0] <= 0) & (y[1] >= 0)
    low, high = _corners(np.floor_divide, x, (np.where(zero, 1, y[0]), np.where(zero, 1, y[1])))
    most = np.maximum(np.abs(x[0]), np.abs(x[1]))  # no quotient is larger; NumPy's x // 0 is 0
    return np.where(zero, -most, low), np.where(zero, most, high)


def _remainder(node: Expression, x: Range, y: Range) -> Range:
    """Return bounds with the divisor's sign; an interval of one quotient stays an interval."""
    low, high = np.minimum(y[0] + 1, 0), np.maximum(y[1] - 1, 0)  # NumPy's x % 0 is 0
    divisor = constant(node.args[1])
    if not divisor:
        return low, high
    quotient = x[0] // divisor
    one = quotient == x[1] // divisor
    return (
        np.where(one, x[0] - quotient * divisor, low),
        np.where(one, x[1] - quotient * divisor, high),
    )


def _absolute(node: Expression, x: Range) -> Range:
    low, high = x
    return np.maximum(np.maximum(low, -high), 0), np.maximum(np.abs(low), np.abs(high))


def _bits(operator: np.ufunc) -> Callable[..., Range]:
    """Bits above the highest one that varies are those of the least values."""

    def rule(node: Expression, x: Range, y: Range) -> Range:
        varies = (x[0] ^ x[1]) | (y[0] ^ y[1])
        any_sign = varies < 0
        size = reduce(np.maximum, map(np.abs, (*x, *y)))
        free = np.frexp(np.where(any_sign, size, varies).astype(np.float64))[1].astype(np.int64)
        low = np.where(any_sign, 0, operator(x[0], y[0])) >> free << free
        high = low + (np.int64(1) << free) - 1
        low = np.where(any_sign, -high - 1, low)
        if operator is np.bitwise_and:  # no greater than either, when that one is not negative
            for least, most in (x, y):
                high = np.where(least >= 0, np.minimum(high, most), high)
                low = np.where(least >= 0, np.maximum(low, 0), low)
        return low, high

    return rule


def _where(node: Expression, condition: Codes, x: Any, y: Any) -> Any:
    yes, no = condition == FULL, condition == EMPTY
    if node.kind == BOOL:
        return np.where(yes, x, np.where(no, y, np.where(x == y, x, np.uint8(MIXED))))
    low, high = np.minimum(x[0], y[0]), np.maximum(x[1], y[1])
    return (
        np.where(yes, x[0], np.where(no, y[0], low)),
        np.where(yes, x[1], np.where(no, y[1], high)),
    )


def _entry(node: Expression, index: Range) -> Any:
    low, high = np.atleast_1d(index[0]), np.atleast_1d(index[1])
    table = node.data
    reached = all(atom.op in ("q", "k", "h", "b") for atom in node.args[0].args)
    if reached:
        table.check(int(low.min()), int(high.max()))
    least, most = table.range(*(np.clip(bound, 0, len(table) - 1) for bound in (low, high)))
    return codes(least == 1, most == 0) if node.kind == BOOL else (least, most)


def codes(true: Bools, false: Bools) -> Codes:
    """FULL where `true`, EMPTY where `false`, MIXED elsewhere."""
    return MIXED + np.asarray(true).astype(np.uint8) - np.asarray(false).astype(np.uint8)


def _compare(node: Expression, x: Range, y: Range = _NOTHING) -> Codes:
    """Of two reals, or of a difference of integers with 0."""
    match node.op:
        case "less":
            return codes(x[1] < y[0], x[0] >= y[1])
        case "less_equal":
            return codes(x[1] <= y[0], x[0] > y[1])
        case "greater":
            return codes(x[0] > y[1], x[1] <= y[0])
        case "greater_equal":
            return codes(x[0] >= y[1], x[1] < y[0])
    same = (x[0] == x[1]) & (y[0] == y[1]) & (x[0] == y[0])
    apart = (x[1] < y[0]) | (x[0] > y[1])
    return codes(same, apart) if node.op == "equal" else codes(apart, same)


def _isin(node: Expression, x: Range) -> Codes:
    count = np.searchsorted(node.data, x[1], "right") - np.searchsorted(node.data, x[0], "left")
    return codes(count == x[1] - x[0] + 1, count == 0)


def _xor(node: Expression, x: Codes, y: Codes) -> Codes:
    unknown = (x == MIXED) | (y == MIXED)
    return np.where(unknown, np.uint8(MIXED), np.where(x == y, np.uint8(EMPTY), np.uint8(FULL)))


def _each(operator: np.ufunc) -> Callable[..., Range]:
    """Of an operator that grows with every operand."""
    return lambda node, *ranges: (
        operator(*[low for low, _ in ranges]),
        operator(*[high for _, high in ranges]),
    )


RULES: dict[str, Callable[..., Any]] = {
    "sum": _sum,
    "float": lambda node: (np.float64(node.data), np.float64(node.data)),
    "truth": lambda node: np.uint8(FULL if node.data else EMPTY),
    "add": _each(np.add),
    "subtract": lambda node, x, y: (x[0] - y[1], x[1] - y[0]),
    "multiply": _multiply,
    "divide": _divide,
    "floor_divide": _floor_divide,
    "remainder": _remainder,
    "absolute": _absolute,
    "minimum": _each(np.minimum),
    "maximum": _each(np.maximum),
    "sqrt": _each(np.sqrt),
    "floor": _each(np.floor),
    "ceil": _each(np.ceil),
    "bit_and": _bits(np.bitwise_and),
    "bit_or": _bits(np.bitwise_or),
    "bit_xor": _bits(np.bitwise_xor),
    "where": _where,
    "entry": _entry,
    "isin": _isin,
    "and": lambda node, x, y: np.minimum(x, y),
    "or": lambda node, x, y: np.maximum(x, y),
    "xor": _xor,
    "not": lambda node, x: FULL - x,
}
RULES |= dict.fromkeys(COMPARISONS, _compare)


def check_known(node: Expression) -> None:
    """Raise Unsupported for operations and numbers that have no bounds."""
    for part in walk(node):
        if part.op not in RULES and part.op not in ("q", "k", "h", "b"):
            raise Unsupported(f"np.{part.op} is not known here")
        if part.op == "float" and not np.isfinite(part.data):
            raise Unsupported(f"{part.data} is no number that fits")


def check_size(node: Expression, symbols: dict[str, int]) -> None:
    """Unsupported if an integer on the way may pass LARGEST, where NumPy's would wrap around.

    Args:
        symbols: the greatest "q", "k", "h" and "b".
    """
    known: dict[Expression, int] = {}

    def largest(x: Expression) -> int:
        if x not in known:
            inner = [largest(arg) for arg in x.args]
            known[x] = symbols[x.op] if x.op in symbols else _largest(x, inner)
            if known[x] > LARGEST:
                raise Unsupported(f"its integers may pass 2**52 (up to {float(known[x]):.1e})")
        return known[x]

    largest(node)


def _largest(x: Expression, inner: list[int]) -> int:
    """Bound of the absolute value of an integer, from those of its operands."""
    if x.kind != INT:
        return 0
    match x.op:
        case "sum":
            weighted = zip(inner, x.data[1], strict=True)
            return abs(x.data[0]) + sum(max(size, 1) * abs(factor) for size, factor in weighted)
        case "multiply":
            return inner[0] * inner[1]
        case "entry":
            return max(abs(int(x.data.data.min())), abs(int(x.data.data.max())))
        case "bit_and" | "bit_or" | "bit_xor":
            return 2 << max(inner).bit_length()
    return max(inner)
