"""Other orders of the sequence: tiles and space-filling curves make the blocks of images dense."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from math import prod
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from masks import runs as rl
from masks.algebra import And, Mask, Not, Or
from masks.checks import choice
from masks.leaves.canvas import OnCanvas, canvas_extents, per_axis, shortest
from masks.leaves.geometry import row_numbers
from masks.leaves.leaf import by_code, place_own
from masks.registry import canonical, transform
from masks.runs import Bools, Grid, Ints, Runs, distinct, expand, quotient
from masks.transforms.base import Transform
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
    return Reorder(choice("side", side, SIDES), np.asarray, (data,))


class Reorder(Transform):
    """Token order(n)[i] of the old sequence comes to place i of the new one.

    Attributes:
        curve, shape: the function of `masks.transforms.reorder` that gives the order, and its
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
        signature = (
            by_code(runs, lambda x: [x]) if moves is None else _alike(runs, grid, q, k, moves)
        )
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


GRAINS = (64, 32, 16, 8, 4)  # tokens of a segment: the first one that no block cuts
CUT = 8  # where all of them are cut
CELLS_AT_ONCE = 1 << 22


@dataclass(frozen=True)
class Side:
    """The segments that the blocks touch along one side."""

    grain: int  # tokens of a segment
    segments: int  # in the whole sequence
    block: Ints  # (P,) the pairs of a block and a segment, ascending
    segment: Ints  # (P,)
    count: Ints  # (blocks,) segments of every block

    @classmethod
    def of(cls, order: Ints, origin: int, size: int, blocks: int) -> "Side":
        """For blocks of `size`, of which number 0 begins at place `origin` of the new order."""
        block = (np.arange(len(order)) - origin) // size  # outside 0..blocks - 1 for other tokens
        of_token = np.empty(len(order), np.int64)
        of_token[order] = block
        whole = (g for g in GRAINS if _constant(of_token, g))
        grain = next(whole, CUT)
        segments = -(-len(order) // grain)
        pair = distinct((block * segments + order // grain)[(block >= 0) & (block < blocks)])
        block, segment = quotient(pair, segments)
        return cls(grain, segments, block, segment, np.bincount(block, minlength=blocks))


def _constant(values: Ints, size: int) -> bool:
    """Whether all stretches of `size` values hold one value each."""
    first = np.repeat(values[::size], size)[: len(values)]
    return bool(np.array_equal(values, first))


def regroup(fine: Runs, grid: Grid, rows: Side, cols: Side) -> Runs:
    """Codes on `grid` from those of the fine grid, rows.segments x cols.segments cells a slice."""
    order = np.argsort(cols.segment, kind="stable")  # segment -> its blocks
    block = cols.block[order]
    ptr = np.searchsorted(cols.segment[order], np.arange(cols.segments + 1))
    step = max(1, CELLS_AT_ONCE // max(cols.segments, grid.cols))
    bounds = np.searchsorted(rows.block, np.arange(0, grid.rows + step, step))
    ends = np.append(fine.starts[1:], grid.slices * rows.segments * cols.segments)
    segments = []
    for s in range(grid.slices):
        for number, begin in enumerate(range(0, grid.rows, step)):
            part = slice(bounds[number], bounds[number + 1])
            local, line = rows.block[part] - begin, rows.segment[part] + s * rows.segments
            at, full = _cells(fine, ends, local, line, cols.segments)
            local, segment = quotient(at, cols.segments)
            of, entry = expand(ptr[segment], ptr[segment + 1])
            x, filled = _sums(local[of] * grid.cols + block[entry], full[of])
            row, col = quotient(x, grid.cols)
            area = rows.count[begin + row] * cols.count[col]
            code = np.where(filled == area, rl.FULL, rl.MIXED).astype(np.uint8)
            new = np.append(True, (np.diff(x) != 1) | (code[1:] != code[:-1]))[: len(x)]
            last = np.append(new[1:], True)[: len(x)]
            x += (s * grid.rows + begin) * grid.cols
            segments.append((x[new], x[last] + 1, code[new]))
    return rl.from_segments(grid, *map(np.concatenate, zip(*segments, strict=True)))


def _sums(place: Ints, weight: Ints) -> tuple[Ints, Ints]:
    """(x, sum): the different places, ascending, and the weight at each."""
    order = np.argsort(place, kind="stable")
    place = place[order]
    heads = np.flatnonzero(np.diff(place, prepend=-1))
    return place[heads], np.add.reduceat(weight[order], heads) if len(heads) else weight


def _cells(fine: Runs, ends: Ints, local: Ints, line: Ints, width: int) -> tuple[Ints, Ints]:
    """Fine lines laid over each other: line line[i] counts for block row local[i].

    Returns:
        (at, full): places local * width + column where any of the lines is not empty, ascending,
        and how many of them are full there.
    """
    low = np.searchsorted(fine.starts, line * width, "right") - 1
    high = np.searchsorted(fine.starts, (line + 1) * width, "left")
    of, run = expand(low, high)
    shift = (local - line) * width
    begin = np.maximum(fine.starts[run], (line * width)[of]) + shift[of]
    end = np.minimum(ends[run], ((line + 1) * width)[of]) + shift[of]
    kept = fine.codes[run] != rl.EMPTY
    is_full = (fine.codes[run] == rl.FULL)[kept].astype(np.int64)

    x = np.concatenate([begin[kept], end[kept]])
    order = np.argsort(x, kind="stable")
    x = x[order]
    some = np.cumsum(np.where(order < len(is_full), 1, -1))
    full = np.cumsum(np.concatenate([is_full, -is_full])[order])
    inside = some[:-1] > 0
    of, at = expand(x[:-1][inside], x[1:][inside])
    return at, full[:-1][inside][of]


@lru_cache(maxsize=8)
def tiled_order(canvas: tuple[int, ...], tile: tuple[int, ...]) -> Ints:
    """Tile by tile, and row by row within a tile and among the tiles; border tiles are cut."""
    places = np.indices(canvas, sparse=True)
    number: Ints = np.zeros(1, np.int64)
    for place, size, extent in zip(places, tile, canvas, strict=True):  # of the tile
        number = number * -(-extent // size) + place // size
    for place, size in zip(places, tile, strict=True):  # of the token in it
        number = number * size + place % size
    return _sorted_by(number)


@lru_cache(maxsize=8)
def morton_order(canvas: tuple[int, ...]) -> Ints:
    """By the interleaved bits of the places along the axes, the last axis lowest (Morton, 1966)."""
    bits = max(canvas).bit_length()
    number: Ints = np.zeros(1, np.int64)
    for axis, place in enumerate(np.indices(canvas, sparse=True)):
        for bit in range(bits):
            at = bit * len(canvas) + len(canvas) - 1 - axis
            number = number | (place >> bit & 1) << at
    return _sorted_by(number)


def _sorted_by(number: Ints) -> Ints:
    return _frozen(np.argsort(number.ravel(), kind="stable"))


def _frozen(order: Ints) -> Ints:
    order.flags.writeable = False
    return order


@lru_cache(maxsize=8)
def hilbert_order(canvas: tuple[int, ...]) -> Ints:
    """Along a Hilbert curve (1891), generalised to any rectangle.

    The curve crosses a box from a corner to the far end of its major side. A box that is long is
    two boxes one after the other; any other one is three: half of the near edge crossed sideways,
    the other half along the major side, and the rest of the near half sideways back. Halves are
    rounded to even lengths, for then no step of the curve is diagonal. All boxes of one depth are
    cut together.
    """
    height, width = canvas
    order = np.empty(prod(canvas), np.int64)
    # One row a box: place in the order, corner (y, x), major and minor side as vectors (y, x).
    across, down = (0, width), (height, 0)
    first = max(across, down, key=lambda side: (sum(side) % 2 == 0, sum(side)))
    boxes = np.array([[0, 0, 0, *first, *(down if first is across else across)]])
    while len(boxes):
        major, minor = abs(boxes[:, 3:5]).sum(1), abs(boxes[:, 5:7]).sum(1)
        thin = (major == 1) | (minor == 1)
        _walk(boxes[thin], width, order)
        boxes, major, minor = boxes[~thin], major[~thin], minor[~thin]
        long_box = 2 * major > 3 * minor
        boxes = np.concatenate(
            [
                _in_two(boxes[long_box], major[long_box]),
                _in_three(boxes[~long_box], major[~long_box], minor[~long_box]),
            ]
        )
    return _frozen(order)


def _walk(boxes: Ints, width: int, order: Ints) -> None:
    """Write the tokens of boxes that are one token wide."""
    length = abs(boxes[:, 3:7]).max(1)
    along = np.where(abs(boxes[:, 3:5]).sum(1) == length, 0, 2)  # the major side, or the minor
    unit = np.sign(np.take_along_axis(boxes[:, 3:7], along[:, None] + np.arange(2), axis=1))
    box, step = expand(np.zeros_like(length), length)
    place = boxes[box, 1:3] + unit[box] * step[:, None]
    order[boxes[box, 0] + step] = place[:, 0] * width + place[:, 1]


def _half(length: Ints) -> Ints:
    """About one half, and even where that leaves something."""
    half = length // 2
    return half + ((half % 2 == 1) & (length > 2))


def _in_two(boxes: Ints, major: Ints) -> Ints:
    begin, corner, a, b = boxes[:, :1], boxes[:, 1:3], boxes[:, 3:5], boxes[:, 5:7]
    near = np.sign(a) * _half(major)[:, None]
    area = (abs(near).sum(1) * abs(b).sum(1))[:, None]
    return _rows((begin, corner, near, b), (begin + area, corner + near, a - near, b))


def _in_three(boxes: Ints, major: Ints, minor: Ints) -> Ints:
    begin, corner, a, b = boxes[:, :1], boxes[:, 1:3], boxes[:, 3:5], boxes[:, 5:7]
    left = np.sign(a) * (major // 2)[:, None]
    near = np.sign(b) * _half(minor)[:, None]
    first = (abs(left).sum(1) * abs(near).sum(1))[:, None]
    second = first + (major * abs(b - near).sum(1))[:, None]
    end = corner + a - np.sign(a) + near - np.sign(b)
    return _rows(
        (begin, corner, near, left),
        (begin + first, corner + near, a, b - near),
        (begin + second, end, -near, left - a),
    )


def _rows(*boxes: tuple[Ints, ...]) -> Ints:
    return np.concatenate([np.concatenate(columns, axis=1) for columns in boxes])
