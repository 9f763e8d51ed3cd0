"""Rules of scores: what a function of scores computes, its derivatives, and its text.

A rule is an `Expression` of `masks.predicate` over the symbols

    s            the score scale q k^T, a real
    b, h, q, k   the numbers of the batch entry, the query head, the query and the key
    n_q, n_k     how many queries and keys the call has

and over reads of tables: op "load", data the number of the table, args an index for each dimension.
"""

import json
from collections.abc import Callable
from functools import cached_property, lru_cache
from typing import Any, NamedTuple

import torch

from masks.predicate import expression as ops
from masks.predicate.expression import (
    BOOL,
    INT,
    REAL,
    Expression,
    atom,
    constant,
    walk,
    weighted,
    whole,
)

PLACES = ("b", "h", "q", "k")
SYMBOLS = ("s", *PLACES, "n_q", "n_k")
_ALL = {*SYMBOLS, "g", "d", "inverse"}  # with a gradient, a distance, and 1 / scale
_COSTLY = ("tanh", "exp", "log", "sqrt", "divide", "load")  # kept for the derivatives


class Operation(NamedTuple):
    """What an operation is: a function of torch, a text of Triton with places for the operands, and
    g times the derivatives by these, a function of g, the result and the operands. Of equal numbers
    the minimum and the maximum are the first; the derivative of the absolute value at 0 is 0.
    """

    torch: Callable[..., Any]
    triton: str
    slopes: Callable[..., Any] | None = None


def _either(first: Any, g: Any) -> tuple[Expression, Expression]:
    return ops.where(first, g, 0.0), ops.where(first, 0.0, g)


def _sign(a: Any, g: Any) -> tuple[Expression]:
    return (ops.where(a > 0.0, g, ops.where(a < 0.0, -g, 0.0)),)


_BOTH = "{}, {}, tl.PropagateNan.ALL"
_TABLE: dict[str, tuple[Any, ...]] = {
    "add": (torch.add, "{} + {}", lambda g, y, a, b: (g, g)),
    "subtract": (torch.sub, "{} - {}", lambda g, y, a, b: (g, -g)),
    "multiply": (torch.mul, "{} * {}", lambda g, y, a, b: (g * b, g * a)),
    "divide": (torch.div, "{} / {}", lambda g, y, a, b: (each := g / b, -(each * y))),
    "tanh": (torch.tanh, "", lambda g, y, a: (g * (1.0 - y * y),)),
    "exp": (torch.exp, "tl.exp({})", lambda g, y, a: (g * y,)),
    "log": (torch.log, "tl.log({})", lambda g, y, a: (g / a,)),
    "sqrt": (torch.sqrt, "tl.sqrt({})", lambda g, y, a: (g * 0.5 / y,)),
    "absolute": (torch.abs, "tl.abs({})", lambda g, y, a: _sign(a, g)),
    "minimum": (torch.minimum, f"tl.minimum({_BOTH})", lambda g, y, a, b: _either(a <= b, g)),
    "maximum": (torch.maximum, f"tl.maximum({_BOTH})", lambda g, y, a, b: _either(a >= b, g)),
    "where": (torch.where, "tl.where({}, {}, {})", lambda g, y, c, a, b: (None, *_either(c, g))),
    "floor": (torch.floor, "tl.floor({})"), "ceil": (torch.ceil, "tl.ceil({})"),
    "floor_divide": (torch.floor_divide, "floor_divide({}, {})"),
    "remainder": (torch.remainder, "remainder({}, {})"),
    "less": (torch.lt, "{} < {}"), "less_equal": (torch.le, "{} <= {}"),
    "greater": (torch.gt, "{} > {}"), "greater_equal": (torch.ge, "{} >= {}"),
    "equal": (torch.eq, "{} == {}"), "not_equal": (torch.ne, "{} != {}"),
    "and": (torch.logical_and, "{} & {}"), "bit_and": (torch.bitwise_and, "{} & {}"),
    "or": (torch.logical_or, "{} | {}"), "bit_or": (torch.bitwise_or, "{} | {}"),
    "xor": (torch.logical_xor, "{} ^ {}"), "bit_xor": (torch.bitwise_xor, "{} ^ {}"),
    "not": (torch.logical_not, "~{}"),
}  # fmt: skip
OPERATIONS = {name: Operation(*entry) for name, entry in _TABLE.items()}


class Kind(NamedTuple):
    """What a rule knows of a table."""

    ndim: int
    dtype: str  # such as "float32"
    large: bool  # whether it has 2**31 entries or more
    wanted: bool  # whether it may get a gradient

    @property
    def of_entries(self) -> str:
        return BOOL if self.dtype == "bool" else REAL if "float" in self.dtype else INT


class Read(NamedTuple):
    """A place where a rule reads a table that gets a gradient."""

    node: Expression  # op "load"
    reach: str  # see `reach`
    grad: Expression  # g times the derivative of the logit by what is read

    @property
    def table(self) -> int:
        return self.node.data

    @property
    def carried(self) -> bool:
        """Whether its gradient is a number for each query."""
        return self.reach in ("bh", "q")

    @property
    def stored(self) -> bool:
        """Whether each pair of each head has an entry of its own."""
        return sorted(bare(i) or "" for i in self.node.args) == ["b", "h", "k", "q"]

    @property
    def plain(self) -> bool:
        """Whether what it adds is the gradient of the logits, or no larger."""
        factor, parts = factors(self.grad)
        return abs(factor) <= 1 and [part.op for part in parts] == ["g"]


class Rule:
    """What the backends compute: the expression of the logits, and the kinds of its tables.

    text: the key, see `text_of`.
    """

    def __init__(self, text: str):
        self.text = text
        kinds, nodes = json.loads(text)
        self.kinds = tuple(Kind(*kind) for kind in kinds)
        made: list[Expression] = []
        for op, kind, args, data in nodes:
            if op == "sum":
                data = data[0], tuple(data[1])
            made.append(Expression(op, kind, tuple(made[i] for i in args), data))
        self.logits = made[-1]
        self.symbols = {node.op for node in made if node.op in SYMBOLS}
        self.loads = [node for node in made if node.op == "load"]

    @cached_property
    def bare(self) -> tuple[tuple[int, int, int], ...]:
        """(table, dimension, place in "bhqk") of the symbols that are an index."""
        found = [
            (node.data, dim, "bhqk".index(name))
            for node in self.loads
            for dim, index in enumerate(node.args)
            if (name := bare(index)) is not None
        ]
        return tuple(dict.fromkeys(found))

    @cached_property
    def by_pair(self) -> bool:
        """Whether a table has an entry of its own for each query and key."""
        return any(map(is_pair, self.loads))

    @cached_property
    def paired(self) -> bool:
        """Whether a table is read by key or by pair."""
        return any(reach(node) in ("k", "qk") for node in self.loads)

    @cached_property
    def singular(self) -> bool:
        """Whether a logit may be NaN or infinite, whatever the tables are, for a score of 0."""
        unsafe = (node for node in walk(self.logits) if node.op in ("divide", "log", "sqrt"))
        return any("s" in symbols(*node.args[-1:]) for node in unsafe)

    @cached_property
    def _derivatives(self) -> dict[Expression, Expression]:
        """g times the derivatives by s and by each read."""
        sums = {self.logits: Expression("g", REAL)}
        for node in reversed([*walk(self.logits)]):
            slopes = OPERATIONS[node.op].slopes if node.op in OPERATIONS else None
            if node in sums and slopes is not None:
                for arg, part in zip(node.args, slopes(sums[node], node, *node.args), strict=True):
                    if part is not None and arg.kind == REAL:
                        sums[arg] = ops.add(sums[arg], part) if arg in sums else part
        return {node: sums[node] for node in sums if node.op in ("s", "load")}

    @cached_property
    def ds(self) -> Expression:
        """g times the derivative of the logit by s, where g, a real symbol, is its gradient."""
        return next((d for node, d in self._derivatives.items() if node.op == "s"), ops.lift(0.0))

    @cached_property
    def reads(self) -> tuple[Read, ...]:
        """All reads that give gradients to a table."""
        return tuple(
            Read(node, reach(node), grad)
            for node, grad in self._derivatives.items()
            if node.op == "load" and self.kinds[node.data].wanted
        )

    @cached_property
    def terms(self) -> list[tuple[int, Expression]]:
        """Expressions with signs whose sum is the logits."""
        return _terms(self.logits, 1)

    @cached_property
    def kept(self) -> list[Expression]:
        """The nodes of a tile whose values the derivatives take from the logits."""
        of_logits = {*walk(self.logits)}

        def found(node: Expression) -> list[Expression]:
            if node in of_logits and node.op in _COSTLY and is_tile(node):
                return [node]
            return [part for arg in node.args for part in found(arg)]

        parts = self.ds, *(read.grad for read in self.reads)
        return list(dict.fromkeys(node for part in parts for node in found(part)))


@lru_cache(maxsize=4096)
def rule_of(text: str) -> Rule:
    """Return the rule of a key."""
    return Rule(text)


def kinds_of(text: str) -> tuple[Kind, ...]:
    """Return what is known of the tables of a rule; () for "", no rule."""
    return rule_of(text).kinds if text else ()


def text_of(logits: Expression, kinds: tuple[Kind, ...]) -> str:
    """Return the key of a rule: the same for equal formulas, in every process."""
    places: dict[str, int] = {}
    number: dict[Expression, int] = {}
    for node in walk(logits):
        entry = json.dumps([node.op, node.kind, [number[arg] for arg in node.args], node.data])
        number[node] = places.setdefault(entry, len(places))
    return f"[{json.dumps(kinds)}, [{', '.join(places)}]]"


def node_of(op: str, kind: str, args: tuple[Expression, ...] = (), data: Any = None) -> Expression:
    """Return a node; an integer as the sum that it is."""
    return atom(op, *args, data=data) if kind == INT else Expression(op, kind, args, data)


def symbol(name: str) -> Expression:
    return node_of(name, REAL if name == "s" else INT)


def operands(node: Expression) -> tuple[Expression, ...]:
    """Return what an operation takes; an integer that is compared has the difference before."""
    compared = node.kind == BOOL and len(node.args) == 3 and node.op != "where"
    return node.args[1:] if compared else node.args


def bare(index: Expression) -> str | None:
    """Return the symbol of bhqk that an index is, or None."""
    if index.op == "sum" and index.data == (0, (1,)) and index.args[0].op in PLACES:
        return index.args[0].op
    return None


def is_pair(load: Expression) -> bool:
    """Whether a read has an entry of its own for each query and key."""
    return {"q", "k"} <= {*map(bare, load.args)}


def symbols(*nodes: Expression) -> set[str]:
    return {part.op for node in nodes for part in walk(node)} & _ALL


def reach(node: Expression) -> str:
    """Return what an expression depends on: "bh" on nothing but batch entry and head, "q" or "k" on
    the query or the key, "d" on the distance k - q alone, "qk" on both.
    """
    found = symbols(node) & {"q", "k"}
    if len(found) == 2 and not found & symbols(distance_form(node)):
        return "d"
    return "".join(sorted(found, reverse=True)) or "bh"


def distance_form(node: Expression) -> Expression:
    """Return the expression with q + d in the place of k: without q, where the distance d = k - q
    is all that matters.
    """
    parts = {part.op: part for part in walk(node)}
    if "q" not in parts or "k" not in parts:
        return node
    return substituted(node, {parts["k"]: ops.add(whole(0, {parts["q"]: 1}), atom("d"))})


def substituted(node: Expression, known: dict[Expression, Expression]) -> Expression:
    """Return the expression with others in the place of those that `known` has; it gets more."""
    if node not in known:
        args = tuple(substituted(arg, known) for arg in node.args)
        if node.op == "sum":
            made = whole(node.data[0], {})
            for arg, factor in zip(args, node.data[1], strict=True):
                made = weighted(made, 1, arg, factor)
        elif args:
            made = node_of(node.op, node.kind, args, node.data)
        else:
            made = whole(0, {node: 1}) if node.kind == INT else node
        known[node] = made
    return known[node]


def is_tile(node: Expression) -> bool:
    """Whether each pair has a value of its own."""
    found = symbols(node)
    return "s" in found or "g" in found or {"q", "k"} <= found


def has_ends(node: Expression) -> bool:
    """Whether a read goes by distance alone, and not by what another table has for it."""
    if node.kind != REAL or reach(node) != "d":
        return False
    dims = [symbols(i) for i in map(distance_form, node.args)]
    inner = any(part.op == "load" for i in node.args for part in walk(i))
    return not inner and not any("d" in names and names & {"b", "h"} for names in dims)


def factors(node: Expression) -> tuple[float, list[Expression]]:
    """Return a number and expressions whose product is the node: itself if there is no number."""
    parts = [node]
    if node.op == "float":
        factor, parts = node.data, []
    elif (value := constant(node)) is not None:
        factor, parts = float(value), []
    elif node.op == "multiply":
        (a, left), (b, right) = map(factors, node.args)
        factor = a * b
        parts = left + right if a != 1 or b != 1 else parts
    elif node.op == "divide" and (by := factors(node.args[1]))[0] and not by[1]:
        factor, parts = factors(node.args[0])
        factor /= by[0]
    else:
        factor = 1.0
    return (factor, parts) if 1e-30 <= abs(factor) <= 1e30 else (1.0, [node])


def _terms(node: Expression, sign: int) -> list[tuple[int, Expression]]:
    if node.op not in ("add", "subtract"):
        return [(sign, node)]
    left, right = node.args
    return _terms(left, sign) + _terms(right, sign if node.op == "add" else -sign)
