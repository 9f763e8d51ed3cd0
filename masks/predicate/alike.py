"""What looks alike in a predicate: moves along the diagonal, blocks, and neighbouring tokens."""

from functools import cache
from math import gcd, lcm
from typing import NamedTuple

import numpy as np

from masks.leaves.geometry import row_numbers
from masks.predicate.bounds import Bounds
from masks.predicate.expression import BOOL, COMPARISONS, INT, Expression, constant, inputs
from masks.predicate.table import Table
from masks.runs import FULL, MIXED, Bools, Ints
from masks.types import Moves

LONGEST = 1 << 40  # tokens of a period
BLOCKS_AT_ONCE = 512  # arrays that stay in cache
_MARK = -(1 << 62)  # a column's value where the block does not depend on it; no base is so small


def moves_of(rule: Expression) -> Moves | None:
    """Return how a truth value moves along the diagonal; None for no period."""
    period = _least(rule, 1)
    tokens: dict[str, set[int]] = {"q": {0}, "k": {0}}

    @cache
    def growth(node: Expression) -> int | None:
        """Return what a number grows by when q and k grow by the period; 0 if it stays."""
        if node.op in ("q", "k"):
            return period
        args = inputs(node)
        if node.kind == BOOL and (found := _changes(node, args)):
            tokens[found[0]] |= found[1]
            return 0
        inner = [size for arg in args if (size := growth(arg)) is not None]
        if len(inner) < len(args):
            return None
        if not any(inner):
            return 0
        if node.op == "sum":
            return sum(size * factor for size, factor in zip(inner, node.data[1], strict=True))
        divisor = _divisor(node)
        if divisor and inner[0] % divisor == 0:
            return inner[0] // divisor if node.op == "floor_divide" else 0
        return None

    if period > LONGEST or growth(rule) != 0:
        return None
    return Moves(period, tuple(sorted(tokens["q"])), max(tokens["k"]))


def _divisor(node: Expression) -> int | None:
    return constant(node.args[1]) if node.op in ("floor_divide", "remainder") else None


def _changes(node: Expression, args: tuple[Expression, ...]) -> tuple[str, set[int]] | None:
    """Return (side, tokens at which it may change) of a comparison of q or k alone, or None."""
    x = args[0] if len(args) == 1 else node
    if x.op != "sum" or len(x.args) != 1 or x.args[0].op not in ("q", "k"):
        return None
    if node.op not in ("isin", *COMPARISONS):
        return None
    offset, (factor,) = x.data
    values = node.data.tolist() if node.op == "isin" else [0]
    roots = [(value - offset) // factor for value in values]
    return x.args[0].op, {max(root + i, 0) for root in roots for i in (0, 1)}


def _least(node: Expression, multiple: int) -> int:
    """Return a period that makes the number grow by a multiple, as far as divisors go."""
    args = node.args
    if node.op == "sum":
        both = sum(f for x, f in zip(args, node.data[1], strict=True) if x.op in ("q", "k"))
        least = multiple // gcd(multiple, both)
        return lcm(least, *[_least(x, multiple) for x in args if x.op not in ("q", "k")])
    if divisor := _divisor(node):
        return _least(args[0], abs(divisor) * (multiple if node.op == "floor_divide" else 1))
    return lcm(*[_least(x, 1) for x in inputs(node)])


def tables_of(node: Expression, side: str) -> list[Table] | None:
    """Return the tables through which an expression sees "q" or "k"; None if in other ways too."""
    if node.op == side:
        return None
    if node.op == "entry" and node.args[0].data == (0, (1,)) and node.args[0].args[0].op == side:
        return [node.data]
    found = [tables_of(arg, side) for arg in node.args]
    known = [tables for tables in found if tables is not None]
    return [table for tables in known for table in tables] if len(known) == len(found) else None


class Alike(NamedTuple):
    base: Ints  # (T,)
    columns: tuple[Ints, ...]  # each (T,)


class BlockSignature:
    """Columns of blocks that fix their tiles, from the bounds in the same blocks.

    In the block whose first query is Q and first key is K, every integer of the predicate is a
    `base`, one number of the block, plus a function of the places inside the block that is the same
    in every block with equal `columns`. For q the base is Q; for q - k it is Q - K; for q // W it
    is Q // W, and the column Q % W says where inside the block it steps. Once a number is
    compared its base becomes a column too. What is the same everywhere in a block, or decided by
    another operand, needs no columns.

    Args:
        bounds: over the tokens of each block, (T,).
        origins: first "q" and "k" of each block and its "h" and "b", (T,).
        sizes: tokens of a block, "q" and "k".
    """

    def __init__(self, bounds: Bounds, origins: dict[str, Ints], sizes: dict[str, int]):
        self.bounds, self.origins, self.sizes = bounds, origins, sizes
        self.shape = origins["q"].shape
        self.known: dict[Expression, Alike] = {}

    def columns(self, node: Expression) -> list[Ints]:
        """Return columns of a truth value: blocks with equal columns have equal tiles."""
        columns = {id(column): column for column in self._of(node).columns}
        return list(columns.values())

    def _of(self, node: Expression) -> Alike:
        if node not in self.known:
            self.known[node] = self._truth(node) if node.kind == BOOL else self._number(node)
        return self.known[node]

    def _all(self, nodes: tuple[Expression, ...]) -> tuple[Ints, ...]:
        """Columns that fix the values of all of the nodes: their bases among them."""
        found: list[Ints] = []
        for node in nodes:
            base, columns = self._of(node)
            fixed = node.kind == INT and constant(node) is not None
            found += columns if node.kind == BOOL or fixed else (base, *columns)
        return tuple(found)

    def _truth(self, node: Expression) -> Alike:
        codes = np.broadcast_to(self.bounds.of(node), self.shape)
        open_ = codes == MIXED
        state = np.where(open_, 0, np.where(codes == FULL, 1, 2)).astype(np.int64)
        columns = self._against(node, open_) or _only(self._all(inputs(node)), open_)
        return Alike(state, (state, *columns))

    def _against(self, node: Expression, open_: Bools) -> tuple[Ints, ...]:
        """Columns of entries along one side compared with tokens of the other, or () for others.

        Only entries near those tokens matter, each as far as it lies among them.
        """
        difference = node.args[0] if node.op in COMPARISONS else node
        if difference.op != "sum" or len(difference.args) != 2:
            return ()
        (entry, token), (factor, other) = difference.args, difference.data[1]
        if token.op == "entry":
            entry, token, factor, other = token, entry, other, factor
        side = _walks(entry.args[0]) if entry.op == "entry" and entry.kind == INT else None
        if not side or {side, token.op} != {"q", "k"} or abs(factor) != 1 or factor + other:
            return ()
        at, most = np.flatnonzero(open_), self.sizes[token.op]
        first = self._of(entry.args[0]).base[at]
        begin = self.origins[token.op][at] - factor * difference.data[0]
        content = np.empty((len(at), self.sizes[side]), np.int16)
        for low in range(0, len(at), BLOCKS_AT_ONCE):
            part = slice(low, low + BLOCKS_AT_ONCE)
            places = first[part, None] + np.arange(self.sizes[side])
            entries = entry.data.data[np.clip(places, 0, len(entry.data) - 1)]
            content[part] = np.clip(entries - begin[part, None], -1, most)
        numbers = np.zeros(self.shape, np.int64)
        numbers[at] = row_numbers(content) if len(at) else 0
        return (numbers,)

    def _number(self, node: Expression) -> Alike:
        if node.kind != INT:  # a real: no base
            return Alike(np.zeros(self.shape, np.int64), self._all(node.args))
        low, high = (np.broadcast_to(bound, self.shape) for bound in self.bounds.of(node))
        base, columns = self._integer(node)
        same = low == high
        # A block where the number is the same everywhere has it for its base.
        return Alike(np.where(same, low, base), (same.astype(np.int64), *_only(columns, ~same)))

    def _integer(self, node: Expression) -> Alike:
        if node.op in self.origins:
            return Alike(self.origins[node.op], ())
        if node.op == "sum":
            parts = [self._of(atom) for atom in node.args]
            base = np.full(self.shape, node.data[0], np.int64)
            for part, factor in zip(parts, node.data[1], strict=True):
                base = base + part.base * factor
            return Alike(base, tuple(column for part in parts for column in part.columns))
        divisor = _divisor(node)
        if divisor is not None and divisor > 0:
            return self._divided(node, divisor)
        return Alike(np.zeros(self.shape, np.int64), self._all(node.args))

    def _divided(self, node: Expression, divisor: int) -> Alike:
        base, columns = self._of(node.args[0])
        low, high = self.bounds.of(node.args[0])
        quotient = low // divisor
        steps = np.broadcast_to(quotient != high // divisor, self.shape)
        phase = _only((base % divisor,), steps)
        if node.op == "floor_divide":
            return Alike(np.where(steps, base // divisor, quotient), (*columns, *phase))
        return Alike(np.where(steps, 0, base - quotient * divisor), (*columns, *phase))


def _walks(index: Expression) -> str | None:
    """Return the side of which an index is the token, but for what is constant in a block."""
    factors = dict(zip((x.op for x in index.args), index.data[1], strict=True))
    side = "q" if "q" in factors else "k"
    known = len(factors) == len(index.args) and factors.keys() <= {side, "h", "b"}
    return side if known and factors.get(side) == 1 else None


def _only(columns: tuple[Ints, ...], where: Bools) -> tuple[Ints, ...]:
    """Return the columns where they matter."""
    if where.all():
        return columns
    return tuple(np.where(where, column, _MARK) for column in columns) if where.any() else ()
