"""Which blocks are alike: numbers of a block that fix its tile, found by looking at the predicate.

In the block whose first query is Q and first key is K, every integer of the predicate is a `base`,
one number of the block, plus a function of the places inside the block that is the same in every
block with equal `columns`. For q the base is Q; for q - k it is Q - K; for q // W it is Q // W, and
the column Q % W says where inside the block it steps (if it does). Once a number is compared its
base becomes a column too. What is the same everywhere in a block asks for no columns at all, and so
does what another operand has decided.
"""

from typing import NamedTuple

import numpy as np

from masks.predicate.bounds import Bounds
from masks.predicate.expression import BOOL, INT, Expression, constant
from masks.runs import FULL, MIXED, Bools, Ints

_MARK = -(1 << 62)  # a column's value where the block does not depend on it; no base is so small


class Alike(NamedTuple):
    base: Ints  # (T,)
    columns: tuple[Ints, ...]  # each (T,)


class BlockSignature:
    """Columns of blocks, from the bounds in the same blocks.

    Args:
        bounds: over the tokens of each block, (T,).
        origins: first "q" and "k" of each block and its "h" and "b", (T,).
    """

    def __init__(self, bounds: Bounds, origins: dict[str, Ints]):
        self.bounds, self.origins = bounds, origins
        self.shape = origins["q"].shape
        self.known: dict[Expression, Alike] = {}

    def columns(self, node: Expression) -> list[Ints]:
        """For a truth value: blocks with equal columns have equal tiles."""
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
        codes = np.broadcast_to(self.bounds.codes(node), self.shape)
        difference = node.op != "where" and len(node.args) == 3
        columns = self._all(node.args[:1] if difference else node.args)
        open_ = codes == MIXED
        state = np.where(open_, 0, np.where(codes == FULL, 1, 2)).astype(np.int64)
        return Alike(state, (state, *_only(columns, open_)))

    def _number(self, node: Expression) -> Alike:
        if node.kind != INT:  # a real: no base
            return Alike(np.zeros(self.shape, np.int64), self._all(node.args))
        low, high = (np.broadcast_to(bound, self.shape) for bound in self.bounds.range(node))
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
        divisor = constant(node.args[1]) if node.op in ("floor_divide", "remainder") else None
        if divisor is not None and divisor > 0:
            return self._divided(node, divisor)
        if node.op == "absolute":
            return self._absolute(node)
        return Alike(np.zeros(self.shape, np.int64), self._all(node.args))

    def _divided(self, node: Expression, divisor: int) -> Alike:
        base, columns = self._of(node.args[0])
        low, high = self.bounds.range(node.args[0])
        quotient = low // divisor
        steps = np.broadcast_to(quotient != high // divisor, self.shape)
        phase = _only((base % divisor,), steps)
        if node.op == "floor_divide":
            return Alike(np.where(steps, base // divisor, quotient), (*columns, *phase))
        return Alike(np.where(steps, 0, base - quotient * divisor), (*columns, *phase))

    def _absolute(self, node: Expression) -> Alike:
        base, columns = self._of(node.args[0])
        low, high = self.bounds.range(node.args[0])
        sign = np.broadcast_to(np.sign(low) + np.sign(high), self.shape)
        turns = np.broadcast_to((low < 0) & (high > 0), self.shape)
        sign = np.where(turns, 0, np.sign(sign)).astype(np.int64)
        return Alike(base * sign, (*columns, sign, *_only((base,), turns)))


def _only(columns: tuple[Ints, ...], where: Bools) -> tuple[Ints, ...]:
    """Return the columns where they matter."""
    if where.all():
        return columns
    return tuple(np.where(where, column, _MARK) for column in columns) if where.any() else ()


def combine(columns: list[Ints]) -> Ints:
    """(T,) integers that are equal where all of the columns are; T >= 1."""
    joined, count = np.zeros_like(columns[0]), 1
    for column in columns:
        column = np.where(column == _MARK, column[column != _MARK].min(initial=0) - 1, column)
        column = column - column.min()
        extent = int(column.max()) + 1
        if count * extent >= 1 << 62:
            column, extent = _numbered(column)
        if count * extent >= 1 << 62:
            joined, count = _numbered(joined)
        joined, count = joined * extent + column, count * extent
    return joined


def _numbered(column: Ints) -> tuple[Ints, int]:
    values, numbers = np.unique(column, return_inverse=True)
    return numbers.astype(np.int64), len(values)
