"""Leaf: the base of every pattern, which classifies blocks and looks at tokens."""

from dataclasses import fields, replace
from typing import Any

import numpy as np

from masks import runs as rl
from masks.algebra import Mask
from masks.registry import PATTERNS, name
from masks.runs import Bools, Grid, Ints, Runs
from masks.types import Placed


class Leaf(Mask):
    """A pattern. A subclass is a frozen dataclass with the three methods below.

    All three see a grid with the leaf's own extents: one slice, unless it fixes batch or heads, or
    is per head. A leaf has no key until a function with `@masks.pattern()` returns it.

    Attributes:
        arguments: those of that function, by name.
    """

    arguments: dict[str, Any]

    def again(self, **changes: Any) -> Mask:
        """The same pattern with some arguments changed."""
        return PATTERNS[self.kind].function(**{**self.arguments, **changes})

    def __reduce__(self):
        values = tuple(getattr(self, f.name) for f in fields(self))  # type: ignore[arg-type]
        return _restored, (type(self), values, self.key, self.kind, self.arguments, self.spelled)

    def runs(self, grid: Grid) -> Runs:
        """The code of every block. MIXED is always safe, and costs a look at the tokens."""
        raise NotImplementedError

    def allowed(self, grid: Grid, s: Ints, q: Ints, k: Ints) -> Bools:
        """Whether key k is allowed for query q in slice s.

        Shapes are (T, 1, 1), (T, block_q, 1) and (T, 1, block_k), or others that broadcast.
        """
        raise NotImplementedError

    def signature(self, grid: Grid, s: Ints, row: Ints, col: Ints) -> Ints:
        """(T,) integers for MIXED blocks: equal ones have equal tiles.

        Blocks cut by the end of the sequence are told apart elsewhere. Unless a pattern knows
        better, all are told apart.
        """
        return (s * grid.rows + row) * grid.cols + col

    def place(self, grid: Grid) -> Placed:
        heads = self.heads or (grid.heads if self.per_head else 1)
        own = replace(grid, batch=self.batch or 1, heads=heads)
        b, h = np.divmod(np.arange(grid.slices), grid.heads)
        own_slice = np.minimum(b, own.batch - 1) * own.heads + np.minimum(h, own.heads - 1)
        runs = self.runs(own)
        if own != grid:
            runs = rl.spread(runs, grid.area, own_slice)

        def allowed(s: Ints, q: Ints, k: Ints) -> Bools:
            return self.allowed(own, own_slice[s], q, k)

        def signature(x: Ints) -> list[Ints]:
            codes = runs.at(x)
            inner = np.zeros(len(x), np.int64)
            mixed = codes == rl.MIXED  # the code tells all of the others
            if mixed.any():
                s, row, col = grid.split(x[mixed])
                inner[mixed] = self.signature(own, own_slice[s], row, col)
            return [codes.astype(np.int64), inner]

        return Placed(runs, allowed, signature)


def _restored(leaf: type[Leaf], values: tuple[Any, ...], *named: Any) -> Leaf:
    return name(leaf(*values), *named)


class ByLength(Leaf):
    """A pattern that is another leaf at every length."""

    def at(self, grid: Grid) -> Leaf:
        """The leaf of the grid's n_q, n_k and heads; called often."""
        raise NotImplementedError

    def runs(self, grid: Grid) -> Runs:
        return self.at(grid).runs(grid)

    def allowed(self, grid: Grid, s: Ints, q: Ints, k: Ints) -> Bools:
        return self.at(grid).allowed(grid, s, q, k)

    def signature(self, grid: Grid, s: Ints, row: Ints, col: Ints) -> Ints:
        return self.at(grid).signature(grid, s, row, col)
