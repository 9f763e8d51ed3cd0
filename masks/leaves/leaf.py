"""Leaf: the base of every pattern; and placements that all slices of a mask share."""

import importlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, dataclass_transform

import numpy as np

from masks import runs as rl
from masks.algebra import Mask
from masks.checks import choice
from masks.leaves.geometry import row_numbers
from masks.looks import periodic
from masks.registry import PATTERNS
from masks.runs import Bools, Grid, Ints, Runs, quotient
from masks.types import Changes, Moves, Placed, Repeats


@dataclass_transform(eq_default=False, frozen_default=True)
class Leaf(Mask):
    """A pattern. A subclass is made a frozen dataclass, and has the three methods below.

    All three see a grid with the leaf's own extents: one slice, unless it fixes batch or heads, or
    is per head. A leaf has no key until a function with `@masks.pattern()` returns it.

    Attributes:
        arguments: those of that function, by name.
    """

    arguments: dict[str, Any]

    def __init_subclass__(cls) -> None:
        dataclass(frozen=True, repr=False, eq=False)(cls)
        del cls.__setattr__, cls.__delattr__  # those of Mask do, and a class may be decorated again

    def again(self, **changes: Any) -> Mask:
        """Return the same pattern with some arguments changed."""
        return PATTERNS[self.kind].function(**{**self.arguments, **changes})

    def __reduce__(self):
        return _made, (self.kind, PATTERNS[self.kind].function.__module__, self.arguments)

    def runs(self, grid: Grid) -> Runs:
        """Return the code of every block. MIXED is always safe, and costs a look at the tokens."""
        raise NotImplementedError

    def allowed(self, grid: Grid, s: Ints, q: Ints, k: Ints) -> Bools:
        """Whether key k is allowed for query q in slice s.

        Shapes are (T, 1, 1), (T, block_q, 1) and (T, 1, block_k), or others that broadcast.
        """
        raise NotImplementedError

    def moves(self) -> Moves | None:
        return None

    def repeats(self, grid: Grid) -> Repeats | None:
        moves = self.moves()
        return None if moves is None else periodic(grid, moves)

    def token_kinds(self, side: str, n: int) -> Ints | None:
        """(n,) numbers of the tokens of "q" or "k", equal where they see, or are seen by, the same.

        None where that is not known.
        """
        return None

    def changes(self, grid: Grid) -> tuple[Changes | None, Changes | None]:
        """See `Placed.changes`."""

        def of(numbers: Ints | None) -> Changes | None:
            if numbers is None:
                return None
            begins = np.diff(numbers, prepend=numbers[0] - 1) != 0
            return lambda s, token: begins[token]

        return of(self.token_kinds("q", grid.n_q)), of(self.token_kinds("k", grid.n_k))

    def signature(self, grid: Grid, s: Ints, row: Ints, col: Ints) -> list[Ints]:
        """Return (T,) integers for MIXED blocks: blocks where all are equal have equal tiles.

        Blocks cut by the end of the sequence are separated by the caller. By default blocks are
        alike where the numbers of their tokens are.
        """
        row = _kinds(self.token_kinds("q", grid.n_q), grid.q_token(row), grid.block_q)
        col = _kinds(self.token_kinds("k", grid.n_k), grid.k_token(col), grid.block_k)
        return [s, row, col]

    def place(self, grid: Grid) -> Placed:
        return place_own(self, grid, self._place)

    def _place(self, grid: Grid) -> Placed:
        runs = self.runs(grid)
        signature = by_code(runs, lambda x: self.signature(grid, *grid.split(x)))
        return Placed(
            runs, lambda s, q, k: self.allowed(grid, s, q, k), signature, self.changes(grid)
        )


def _kinds(numbers: Ints | None, token: Ints, size: int) -> Ints:
    """(T,) numbers >= 0, equal where the `size` tokens from `token` on have equal numbers."""
    first, which = np.unique(token, return_inverse=True)
    if numbers is None:
        return which
    tokens = np.clip(first[:, None] + np.arange(size), 0, len(numbers) - 1)
    return row_numbers(numbers[tokens])[which]


def _made(kind: str, module: str, arguments: dict[str, Any]) -> Mask:
    """Return the mask of a registered function; its module registers it in a new process."""
    if kind not in PATTERNS:
        importlib.import_module(module)
    return PATTERNS[kind].function(**arguments)


def place_own(mask: Mask, grid: Grid, place: Callable[[Grid], Placed]) -> Placed:
    """`place` on the grid with the extents of `mask` itself, spread over the slices of `grid`."""
    heads = mask.heads or (grid.heads if mask.per_head else 1)
    own = replace(grid, batch=mask.batch or 1, heads=heads)
    placed = place(own)
    if own == grid:
        return placed
    b, h = quotient(np.arange(grid.slices), grid.heads)
    own_slice = np.minimum(b, own.batch - 1) * own.heads + np.minimum(h, own.heads - 1)

    def allowed(s: Ints, q: Ints, k: Ints) -> Bools:
        return placed.allowed(own_slice[s], q, k)

    def signature(x: Ints) -> list[Ints]:
        s, place = quotient(x, grid.area)
        return placed.signature(own_slice[s] * grid.area + place)

    def own_changes(inner: Changes | None) -> Changes | None:
        return None if inner is None else lambda s, token: inner(own_slice[s], token)

    q, k = map(own_changes, placed.changes)
    runs = rl.stitch([(placed.runs, source) for source in own_slice.tolist()], grid.area)
    return Placed(runs, allowed, signature, (q, k))


def by_code(runs: Runs, alike: Callable[[Ints], list[Ints]]) -> Callable[[Ints], list[Ints]]:
    """Signature of blocks: the code, and the columns `alike` where that is MIXED."""

    def signature(x: Ints) -> list[Ints]:
        codes = runs.at(x)
        columns, mixed = [codes.astype(np.int64)], codes == rl.MIXED
        for column in alike(x[mixed]) if mixed.any() else ():
            columns.append(np.zeros(len(x), np.int64))
            columns[-1][mixed] = column
        return columns

    return signature


class ByLength(Leaf):
    """A pattern that is another leaf at every length: make(grid) has the grid's n_q, n_k, heads."""

    make: Callable[[Grid], Leaf]
    batch: int | None = None

    def repeats(self, grid: Grid) -> Repeats | None:
        return self.make(grid).repeats(grid)

    def _place(self, grid: Grid) -> Placed:
        return self.make(grid)._place(grid)


def aligned(align: str, make: Callable[[int], Leaf]) -> Leaf:
    """Return make(shift), for the distances q + shift - k that an argument `align` counts."""
    if choice("align", align, ("top_left", "bottom_right")) == "top_left":
        return make(0)
    return ByLength(lambda grid: make(grid.n_k - grid.n_q))
