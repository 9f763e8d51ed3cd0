"""Expressions: what a predicate computes, recorded by calling it with symbols for q and k.

A predicate is plain NumPy code. Called with expressions instead of arrays, its operators build a
tree, which can then be asked for bounds over whole rectangles of tokens (`masks.predicate.bounds`).
Integers are kept as sums of coefficients times atoms, so that `q - k` stays exact wherever it goes.
An operator takes expressions and constants, and raises `Unsupported` for what cannot be bounded.
"""

from collections.abc import Callable, Iterator
from contextvars import ContextVar
from functools import partial, reduce
from typing import Any, NoReturn

import numpy as np

INT, REAL, BOOL = "int", "real", "bool"
COMPARISONS = ("less", "less_equal", "greater", "greater_equal", "equal", "not_equal")
_INT64 = 1 << 63
INDEXED = "an array is indexed: wrap it once, as in ids = masks.table(ids)"
# what tensor[index] is for a torch tensor, () for the tensor itself
read_tensor: ContextVar[Callable[[Any, Any], "Expression"]] = ContextVar("read_tensor")


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

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Any, args: tuple = (), options: dict | None = None
    ) -> "Expression":
        name = function.__name__
        if name == "__getitem__":
            return _read(*args)
        known = _named(name)
        if known is None:
            raise Unsupported(f"torch.{name} is not known here")
        return known(*args, **(options or {}))

    def __getattr__(self, name: str) -> Callable[..., "Expression"]:
        """Return the method of a tensor, such as `abs`."""
        known = None if name.startswith("_") else _named(name)
        if known is None:
            raise AttributeError(f"a symbol has no {name}")
        return partial(known, self)

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
    if isinstance(number, float) and not np.isnan(number):
        return Expression("float", REAL, data=float(number))
    if hasattr(value, "__torch_function__"):
        return _read(value, ())
    what = f"an array of shape {np.shape(value)}" if np.ndim(value) else repr(value)
    raise Unsupported(f"{what} is no number that fits: give integers, or masks.table(array)[q]")


def _read(tensor: Any, index: Any) -> Expression:
    read = read_tensor.get(None)
    if read is None:
        raise Unsupported(INDEXED)
    return read(tensor, index)


def walk(node: Expression) -> Iterator[Expression]:
    """Yield every node once, operands first."""
    seen: set[Expression] = set()

    def visit(x: Expression) -> Iterator[Expression]:
        if x not in seen:
            seen.add(x)
            for arg in x.args:
                yield from visit(arg)
            yield x

    return visit(node)


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


def _real(op: str, *args: Expression) -> Expression:
    return Expression(op, REAL, args)


def _arithmetic(*values: Any) -> tuple[bool, list[Expression]]:
    """(whether all are integers, the operands)"""
    operands = [lift(value) for value in values]
    if any(x.kind == BOOL for x in operands):
        raise Unsupported("arithmetic with a truth value: use np.where(condition, 1, 0)")
    return all(x.kind == INT for x in operands), operands


def _linear(op: str, factor: int) -> Callable[[Any, Any], Expression]:
    def function(x: Any, y: Any) -> Expression:
        whole, (x, y) = _arithmetic(x, y)
        return weighted(x, 1, y, factor) if whole else _real(op, x, y)

    return function


add, subtract = _linear("add", 1), _linear("subtract", -1)


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
        given = "an expression" if isinstance(exponent, Expression) else repr(exponent)
        raise Unsupported(f"a power of {given}: exponents are the integers 1 to 8")
    return reduce(multiply, [lift(x)] * int(exponent))


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


def _smooth(op: str) -> Callable[[Any], Expression]:
    return lambda x: _real(op, *_arithmetic(x)[1])


def sigmoid(x: Any) -> Expression:
    return add(multiply(UFUNCS["tanh"](multiply(x, 0.5)), 0.5), 0.5)


def exp2(x: Any) -> Expression:
    return UFUNCS["exp"](multiply(x, float(np.log(2.0))))


def _rounded(op: str) -> Callable[[Any], Expression]:
    def function(x: Any) -> Expression:
        whole, (x,) = _arithmetic(x)
        if whole:
            raise Unsupported(f"np.{op} of an integer, which is one already")
        return _real(op, x)

    return function


def clip(x: Any, min: Any = None, max: Any = None) -> Expression:
    x = x if min is None else maximum(x, min)
    return x if max is None else minimum(x, max)


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


# What NumPy's functions do with expressions, by name; the last ones have no bounds.
_NAMED = (multiply, power, divide, floor_divide, remainder, negative)
_NAMED += (left_shift, right_shift, logical_not, invert, square, exp2)
UFUNCS: dict[str, Callable[..., Expression]] = {f.__name__: f for f in _NAMED} | {
    "add": add, "subtract": subtract,
    "absolute": absolute, "minimum": minimum, "maximum": maximum,
    "logical_and": logical_and, "logical_or": logical_or, "logical_xor": logical_xor,
    "bitwise_and": bitwise_and, "bitwise_or": bitwise_or, "bitwise_xor": bitwise_xor,
    "floor": _rounded("floor"), "ceil": _rounded("ceil"),
    **{name: _compare(name) for name in COMPARISONS},
    **{name: _smooth(name) for name in ("sqrt", "tanh", "exp", "log")},
}  # fmt: skip
FUNCTIONS: dict[str, Callable[..., Expression]] = {"where": where, "isin": isin, "clip": clip}
_OF_TORCH = {
    "abs": "absolute", "clamp": "clip", "mul": "multiply", "sub": "subtract", "div": "divide",
    "true_divide": "divide", "pow": "power", "neg": "negative", "lt": "less", "le": "less_equal",
    "gt": "greater", "ge": "greater_equal", "eq": "equal", "ne": "not_equal",
}  # fmt: skip
_OPERATORS = {name: UFUNCS[_OF_TORCH[name]] for name in ("abs", "neg", "lt", "le", "gt", "ge")}
_OPERATORS |= {"eq": UFUNCS["equal"], "ne": UFUNCS["not_equal"], "invert": invert}
_BINARY = {
    "add": add, "sub": subtract, "mul": multiply, "truediv": divide, "floordiv": floor_divide,
    "mod": remainder, "pow": power, "lshift": left_shift, "rshift": right_shift,
    "and": bitwise_and, "or": bitwise_or, "xor": bitwise_xor,
}  # fmt: skip
_OPERATORS |= {"pos": lambda x: x} | _BINARY
_OPERATORS |= {f"r{name}": lambda x, y, f=f: f(y, x) for name, f in _BINARY.items()}
for _name, _function in _OPERATORS.items():
    setattr(Expression, f"__{_name}__", _function)


def _named(name: str) -> Callable[..., Expression] | None:
    """Return what torch's functions and methods do with expressions."""
    if name == "sigmoid":
        return sigmoid
    name = _OF_TORCH.get(name, name)
    return UFUNCS.get(name) or FUNCTIONS.get(name)
