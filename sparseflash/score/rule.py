"""Rules of scores: what a function of scores computes, its derivatives, and its text.

A rule is an `Expression` of `masks.predicate` over the symbols

    s            the score scale q k^T, a real
    b, h, q, k   the numbers of the batch entry, the query head, the query and the key
    n_q, n_k     how many queries and keys the call has

and over reads of tables: op "load", data the number of the table, args an index for each dimension.
"""

import json
from functools import cached_property, lru_cache
from typing import Any, NamedTuple

from masks.predicate import expression as ops
from masks.predicate.expression import BOOL, INT, REAL, Expression, atom, lift, walk, whole

SYMBOLS = ("s", "b", "h", "q", "k", "n_q", "n_k")
_BY_NAME = ops.UFUNCS | ops.FUNCTIONS
_BY_NAME |= {name: _BY_NAME[f"logical_{name}"] for name in ("and", "or", "xor", "not")}
_BY_NAME |= {f"bit_{name}": _BY_NAME[f"bitwise_{name}"] for name in ("and", "or", "xor")}


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
    def index(self) -> tuple[Expression, ...]:
        return self.node.args


class Rule:
    """What the backends compute.

    Attributes:
        text: the key of the rule.
        kinds: of the tables.
        logits: the expression.
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

    @cached_property
    def bare(self) -> tuple[tuple[int, int, int], ...]:
        """(table, dimension, place in "bhqk") of the symbols that are an index."""
        found = [
            (node.data, dim, "bhqk".index(name))
            for node in walk(self.logits)
            if node.op == "load"
            for dim, index in enumerate(node.args)
            if (name := bare(index)) is not None and name in "bhqk"
        ]
        return tuple(dict.fromkeys(found))

    @cached_property
    def _derivatives(self) -> dict[Expression, Expression]:
        return derivatives(self.logits, Expression("g", REAL))

    @cached_property
    def ds(self) -> Expression:
        """g times the derivative of the logit by s, where g, a real symbol, is its gradient."""
        return next((d for node, d in self._derivatives.items() if node.op == "s"), lift(0.0))

    @cached_property
    def reads(self) -> tuple[Read, ...]:
        """All reads that give gradients to a table."""
        return tuple(
            Read(node, reach(node.args), grad)
            for node, grad in self._derivatives.items()
            if node.op == "load" and self.kinds[node.data].wanted
        )


@lru_cache(maxsize=4096)
def rule_of(text: str) -> Rule:
    """Return the rule of a key."""
    return Rule(text)


@lru_cache(maxsize=4096)
def is_paired(text: str) -> bool:
    """Return whether a table is read by key or by pair."""
    loads = (node for node in walk(rule_of(text).logits) if node.op == "load")
    return any(reach(node.args) in ("k", "qk") for node in loads)


def is_singular(text: str) -> bool:
    """Return whether a logit may be NaN or infinite, whatever the tables are, for a score of 0."""
    return any(
        "s" in symbols(*node.args[-1:])
        for node in walk(rule_of(text).logits)
        if node.op in ("divide", "log", "sqrt")
    )


def text_of(logits: Expression, kinds: tuple[Kind, ...]) -> str:
    """Return the key of a rule: the same for equal formulas, in every process."""
    places: dict[str, int] = {}
    number: dict[Expression, int] = {}
    for node in walk(logits):
        entry = json.dumps([node.op, node.kind, [number[arg] for arg in node.args], node.data])
        number[node] = places.setdefault(entry, len(places))
    return f"[{json.dumps(kinds)}, [{', '.join(places)}]]"


def load(table: int, kind: str, *index: Expression) -> Expression:
    if kind == INT:
        return atom("load", *index, data=table)
    return Expression("load", kind, index, table)


def bare(index: Expression) -> str | None:
    """Return the symbol that an index is, or None."""
    if index.op == "sum" and index.data == (0, (1,)) and index.args[0].op in SYMBOLS:
        return index.args[0].op
    return None


def symbols(*nodes: Expression) -> set[str]:
    return {part.op for node in nodes for part in walk(node) if part.op in SYMBOLS}


def reach(index: tuple[Expression, ...]) -> str:
    """Return what an index depends on: "bh" on nothing but batch entry and head, "q" or "k" on the
    query or the key, "d" on the distance k - q alone, "qk" on both.
    """
    found = symbols(*index) & {"q", "k"}
    if found == {"q", "k"} and "q" not in symbols(*map(distance_form, index)):
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
        args = [substituted(arg, known) for arg in node.args]
        if node.op == "sum":
            made = whole(node.data[0], {})
            for arg, factor in zip(args, node.data[1], strict=True):
                made = ops.weighted(made, 1, arg, factor)
        elif not args:
            made = whole(0, {node: 1}) if node.kind == INT else node
        elif node.op == "load":
            made = load(node.data, node.kind, *args)
        else:  # integers that are compared are the last two of three
            compared = node.kind == BOOL and len(args) == 3 and node.op != "where"
            made = _BY_NAME[node.op](*args[1 if compared else 0 :])
        known[node] = made
    return known[node]


def derivatives(logits: Expression, g: Expression) -> dict[Expression, Expression]:
    """Return g times the derivative by s and by each read."""
    sums: dict[Expression, Expression] = {logits: g}
    for node in reversed([n for n in walk(logits) if n.kind == REAL]):
        if node in sums and node.op != "load":
            for arg, part in zip(node.args, _parts(node, sums[node]), strict=True):
                if part is not None and arg.kind == REAL:
                    sums[arg] = ops.add(sums[arg], part) if arg in sums else part
    return {node: sums[node] for node in sums if node.op in ("s", "load")}


def _parts(node: Any, g: Any) -> list[Expression | None]:
    """Return g times the derivatives by the operands. Of equal numbers the minimum and the maximum
    are the first; the derivative of the absolute value at 0 is 0.
    """
    a = node.args
    match node.op:
        case "add":
            return [g, g]
        case "subtract":
            return [g, -g]
        case "multiply":
            return [g * a[1], g * a[0]]
        case "divide":
            each = g / a[1]
            return [each, -(each * node)]
        case "tanh":
            return [g * (1.0 - node * node)]
        case "exp":
            return [g * node]
        case "log":
            return [g / a[0]]
        case "sqrt":
            return [g * 0.5 / node]
        case "absolute":
            return [ops.where(a[0] > 0.0, g, ops.where(a[0] < 0.0, -g, 0.0))]
        case "minimum":
            return [ops.where(a[0] <= a[1], g, 0.0), ops.where(a[0] <= a[1], 0.0, g)]
        case "maximum":
            return [ops.where(a[0] >= a[1], g, 0.0), ops.where(a[0] >= a[1], 0.0, g)]
        case "where":
            return [None, ops.where(a[0], g, 0.0), ops.where(a[0], 0.0, g)]
    return [None] * len(a)  # rounded
