"""Other orders of the sequence: tiles and space-filling curves make the blocks of images dense."""

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from masks.algebra import And, Mask, Not, Or
from masks.checks import choice
from masks.leaves.canvas import OnCanvas, canvas_extents, per_axis, shortest
from masks.leaves.geometry import row_numbers
from masks.leaves.leaf import by_code, place_own
from masks.registry import canonical, transform
from masks.runs import Bools, Grid, Ints, Runs
from masks.transforms.base import Placing
from masks.transforms.curves import given_order, hilbert_order, morton_order, tiled_order
from masks.transforms.regroup import Side, regroup
from masks.types import Moves, Placed

__all__ = ["hilbert", "morton", "permuted", "tiled"]

SIDES = ("both", "queries", "keys")


@transform(
    "neighborhood((16, 16), 5) >> tiled((16, 16), 4)",
    "tiles of the image in turn: fewer blocks",
    "N*25",
)
def tiled(canvas: tuple[int, ...], tile: int | tuple[int, ...], *, side: str = "both") -> "Reorder":
    """Put the tokens of a canvas tile by tile, and row by row within a tile.

    Place i of the new sequence holds token order(n)[i] of the old: attend with x[..., order, :] for
    q, k and v, and the output at inverse(n) is in the old order. `mask >> tiled(...)` allows
    (q, k) when `mask` allows (order[q], order[k]).

    Args:
        canvas: one to three extents, slowest first: (height, width). The mask then builds for
            prod(canvas) tokens.
        tile: tokens of a tile along an axis; one value, or one for every axis. The last tile is
            smaller where they do not divide the canvas.
        side: "both"; "queries" or "keys" leaves the other side in its old order.
    """
    canvas = canvas_extents(canvas)
    tiles = per_axis("tile", tile, canvas, min=1)
    mask = Reorder(choice("side", side, SIDES), tiled_order, (canvas, tiles))
    return canonical(mask, tile=shortest(tiles))


@transform("neighborhood((16, 16), 5) >> morton((16, 16))", "the image along a Z curve", "N*25")
def morton(canvas: tuple[int, ...], *, side: str = "both") -> "Reorder":
    """Put the tokens of a canvas along a Z-order curve; arguments and use as in `tiled`.

    The curve is that of the next power of two, without the places outside the canvas. Aligned
    squares (cubes) of side 2**m are consecutive in it.
    """
    canvas = canvas_extents(canvas)
    return Reorder(choice("side", side, SIDES), morton_order, (canvas,))


@transform(
    "neighborhood((16, 16), 5) >> hilbert((16, 16))", "the image along a Hilbert curve", "N*25"
)
def hilbert(canvas: tuple[int, int], *, side: str = "both") -> "Reorder":
    """Put the tokens of an image along a Hilbert curve; arguments and use as in `tiled`.

    The curve is generalised to any rectangle, and consecutive places are always neighbours in the
    image. Where height and width are the same power of two, it is Hilbert's, and aligned squares
    of side 2**m are consecutive.
    """
    extents = canvas_extents(canvas)
    if len(extents) != 2:
        raise ValueError(f"canvas is {extents}: give (height, width), or use morton or tiled")
    return Reorder(choice("side", side, SIDES), hilbert_order, (extents,))


@transform(
    "causal() >> permuted(tuple(range(255, -1, -1)))",
    "any order of the tokens",
    "N*(N + 1)/2",
    digest=True,
)
def permuted(order: ArrayLike, *, side: str = "both") -> "Reorder":
    """Put the tokens into any order: place i of the new sequence holds token order[i] of the old.

    Args:
        order: integers (n,), each of 0..n-1 once. It is copied. Beyond 64 tokens the text shows a
            digest only, which `parse` cannot read.
        side: as in `tiled`, which also explains the use.
    """
    data = np.array(order)
    if data.ndim != 1 or not len(data) or data.dtype.kind not in "iu":
        raise ValueError(
            f"order has shape {data.shape} and is {data.dtype}: give integers (n,), n >= 1"
        )
    data = data.astype(np.int64)
    if not np.array_equal(np.sort(data), np.arange(len(data))):
        raise ValueError(f"order must hold each of 0..{len(data) - 1} once")
    data.flags.writeable = False
    return Reorder(choice("side", side, SIDES), given_order, (data,))


class Reorder(Placing):
    """Token order(n)[i] of the old sequence comes to place i of the new one.

    Attributes:
        curve, shape: the function of `masks.transforms.curves` that gives the order, and its
            arguments.
    """

    side: str
    curve: Callable[..., Ints]
    shape: tuple[Any, ...]

    def order(self, n: int) -> Ints:
        """int64 (n,), read-only: the token of the old sequence at every place of the new one."""
        order = self.curve(*self.shape)
        if n != len(order):
            raise ValueError(
                f"{self} reorders {len(order)} tokens, not {n}: build it for those; with m tokens "
                f"in front write mask >> {self} >> shift(m)"
            )
        return order

    def inverse(self, n: int) -> Ints:
        """int64 (n,): the place in the new sequence of every token of the old one."""
        order = self.order(n)
        inverse = np.empty_like(order)
        inverse[order] = np.arange(n)
        return inverse

    def place(self, part: Mask, grid: Grid) -> Placed:
        """Place the mask that allows (q, k) when `part` allows (order[q], order[k])."""
        match part:  # the operators look at one pair of tokens at a time, so order is free
            case Or() | And():
                return type(part).of(*[p >> self for p in part.parts]).place(grid)
            case Not():
                return (~(part.part >> self)).place(grid)
        q = np.arange(grid.n_q) if self.side == "keys" else self.order(grid.n_q)
        k = np.arange(grid.n_k) if self.side == "queries" else self.order(grid.n_k)
        if isinstance(part, OnCanvas):
            return _place_canvas(part, grid, q, k)
        rows = Side.of(q, grid.q_origin, grid.block_q, grid.rows)
        cols = Side.of(k, grid.k_origin, grid.block_k, grid.cols)
        fine = Grid(grid.n_q, grid.n_k, rows.grain, cols.grain, grid.batch, grid.heads)
        inner = part.place(fine)
        runs = regroup(inner.runs, grid, rows, cols)
        moves = part.moves()
        signature = by_code(runs, lambda x: x) if moves is None else _alike(runs, grid, q, k, moves)
        return Placed(runs, lambda s, i, j: inner.allowed(s, q[i], k[j]), signature)


def _alike(runs: Runs, grid: Grid, q: Ints, k: Ints, moves: Moves) -> Callable[[Ints], list[Ints]]:
    """Signature of a mask that repeats as `Mask.moves` says, in another order of the tokens.

    A tile follows from where the tokens of each side lie relative to the first one, from how far
    apart the first ones are, and from their place in the period.
    """

    def side(order: Ints, token: Ints, size: int, first: int) -> tuple[Ints, Ints, Bools]:
        tokens, which = np.unique(token, return_inverse=True)
        at = order[np.clip(tokens[:, None] + np.arange(size), 0, len(order) - 1)]
        kinds = row_numbers((at - at[:, :1]).astype(np.int32))
        repeats = np.all(at >= first, axis=1)
        return at[which, 0], kinds[which], repeats[which]

    def signature(x: Ints) -> list[Ints]:
        s, row, col = grid.split(x)
        at_q, kind_q, q_repeats = side(q, grid.q_token(row), grid.block_q, moves.cuts[-1])
        at_k, kind_k, k_repeats = side(k, grid.k_token(col), grid.block_k, moves.first_k)
        known = np.where(q_repeats & k_repeats, -1, x)
        codes = runs.at(x).astype(np.int64)
        return [codes, s, known, kind_q, kind_k, at_q - at_k, at_q % moves.period]

    return signature


def _place_canvas(leaf: OnCanvas, grid: Grid, q: Ints, k: Ints) -> Placed:
    """Return a canvas knows its blocks in any order, and which of them look alike."""

    def place(own: Grid) -> Placed:
        runs = leaf.runs_in_order(own, q, k)
        return Placed(
            runs,
            lambda s, i, j: leaf.allowed(own, s, q[i], k[j]),
            by_code(runs, lambda x: leaf.alike(own, q, k, *own.split(x)[1:])),
        )

    return place_own(leaf, grid, place)
