"""Base of the patterns on a canvas: a line, an image or a video whose tokens come row by row."""

from functools import cached_property, partial
from math import prod
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from masks import runs as rl
from masks.checks import flag, integer
from masks.leaves.geometry import row_numbers
from masks.leaves.leaf import Leaf
from masks.looks import Squares, classify
from masks.runs import Bools, Grid, Ints, Runs, quotient
from masks.types import Repeats


class Window(NamedTuple):
    """The keys of every query along one axis: first[q], first[q] + step, .., last[q]."""

    first: Ints  # (extent,) may lie before the canvas
    last: Ints  # (extent,) and after it
    step: int = 1


class OnCanvas(Leaf):
    """Key k is allowed for query q when it lies in the window of q along every axis."""

    canvas: tuple[int, ...]

    def window(self, axis: int) -> Window:
        """Return the windows along one axis."""
        raise NotImplementedError

    @cached_property
    def windows(self) -> list[Window]:
        return [self.window(axis) for axis in range(len(self.canvas))]

    def allowed(self, grid: Grid, s: Ints, q: Ints, k: Ints) -> Bools:
        allowed = np.ones(np.broadcast_shapes(s.shape, q.shape, k.shape), bool)
        places = zip(self._coordinates(q), self._coordinates(k), self.windows, strict=True)
        for at_q, at_k, (first, last, step) in places:
            low, high, at_k = (x.astype(np.int32) for x in (first[at_q], last[at_q], at_k))
            allowed &= low <= at_k
            allowed &= at_k <= high
            if step > 1:
                allowed &= low % step == at_k % step
        return allowed

    def _coordinates(self, token: Ints) -> list[Ints]:
        """Place of the tokens along every axis."""
        places = []  # np.unravel_index of NumPy 2.3.5 errs beyond the first 8192 of an (n, 1) array
        for extent in reversed(self.canvas[1:]):
            token, place = quotient(token, extent)
            places.append(place)
        return [token, *reversed(places)]

    def runs(self, grid: Grid) -> Runs:
        first, last, ends, stride = grid.k_first, grid.k_last, [], prod(self.canvas)
        for extent in self.canvas:
            stride //= extent
            low, high = first // stride, last // stride
            whole = low // extent < high // extent  # the keys of a block go beyond a line's end
            low, high = np.where(whole, 0, low % extent), np.where(whole, extent - 1, high % extent)
            ends.append([low, high])
        return self._runs(grid, None, *np.array(ends).swapaxes(0, 1))

    def runs_in_order(self, grid: Grid, q: Ints, k: Ints) -> Runs:
        """Return the code of every block when query i is token q[i], and key j token k[j]."""
        begins, places = self._places(grid.k_first, grid.k_last, k)
        ends = [[f.reduceat(at, begins) for at in places] for f in (np.minimum, np.maximum)]
        return self._runs(grid, q, *np.array(ends))

    def _runs(self, grid: Grid, q: Ints | None, first: Ints, last: Ints) -> Runs:
        """Codes, from the ends (axes, cols) of the places of the keys of every block column."""
        self._check(grid)
        low, high, shared_low, shared_high, steps = self._boxes(grid, q)
        stepped = bool((steps > 1).any())
        # Of squares of 1, 2, 4, .. blocks: the boxes around what they touch, and within what fills.
        count = max(grid.rows, grid.cols).bit_length() + 1
        least = [_levels(box, np.minimum, count) for box in (low, shared_high, first)]
        most = [_levels(box, np.maximum, count) for box in (high, shared_low, last)]

        def codes(squares: Squares) -> rl.Codes:
            size, _, row, col = squares
            level, at = size.bit_length() - 1, (row // size, row // size, col // size)
            low, shared_high, first = (x[level][:, i] for x, i in zip(least, at, strict=True))
            high, shared_low, last = (x[level][:, i] for x, i in zip(most, at, strict=True))
            begin = np.maximum(low, first)
            if stepped and size == 1:
                begin += (low - begin) % steps[:, row]
            met = (begin <= np.minimum(high, last)).all(axis=0)
            if not self._fills:
                return np.where(met, rl.MIXED, rl.EMPTY).astype(np.uint8)
            inside = ((shared_low <= first) & (last <= shared_high)).all(axis=0)
            return np.where(met, np.where(inside, rl.FULL, rl.MIXED), rl.EMPTY).astype(np.uint8)

        return classify(grid, codes)

    def repeats(self, grid: Grid) -> Repeats:
        # A row moves with the first key of its first window. It follows from where its queries wrap
        # and from the windows of all places that they can have, relative to the first one. Windows
        # end with the canvas, or on the first axis with the keys.
        self._check(grid)
        q = np.clip(grid.q_token(np.arange(grid.rows)), 0, grid.n_q - 1)
        origin, columns, stride = np.zeros_like(q), [], prod(self.canvas)
        for axis, (place, window) in enumerate(
            zip(self._coordinates(q), self.windows, strict=True)
        ):
            low, high, extent = window.first, window.last, self.canvas[axis]
            if axis:
                low = low - np.minimum(low, 0) // window.step * window.step
                high = np.minimum(high, extent - 1)
            stride //= extent
            span = (q + grid.block_q - 1) // stride - q // stride
            met = np.arange(min(int(span.max()) + 1, extent))
            first, which = np.unique(place, return_inverse=True)
            at, start = (first[:, None] + met) % extent, low[first, None]
            wrap = np.minimum(extent - first, len(met))[:, None]
            content = [low[at] - start, high[at] - start, wrap]
            columns.append(_kinds(np.concatenate(content, axis=1))[which])
            origin = origin * extent + low[place]
        moved, phase = quotient(origin, grid.block_k)
        return Repeats(_kinds(np.stack([*columns, phase], axis=1)), moved)

    def _check(self, grid: Grid) -> None:
        n = prod(self.canvas)
        if (grid.n_q, grid.n_k) != (n, n):
            raise ValueError(
                f"n_q is {grid.n_q} and n_k {grid.n_k}, but {self} has {n} tokens: "
                f"build it for {n}, or give a canvas of another size; with m tokens in front, "
                "such as a class token, write mask >> shift(m)"
            )

    @property
    def _fills(self) -> bool:
        """Whether every key inside the windows is allowed."""
        return all(window.step == 1 for window in self.windows)

    def _boxes(self, grid: Grid, q: Ints | None) -> NDArray[np.int64]:
        """Return low and high of boxes of a block row, and the steps of keys between them.

        (5, axes, rows): the box around all windows, the one that they share, clipped to the canvas,
        and steps. Query i is token q[i], by default token i.
        """
        begins, places = self._places(grid.q_first, grid.q_last, q)
        lowest, highest = (partial(f.reduceat, indices=begins) for f in (np.minimum, np.maximum))
        boxes = []
        for at, window, extent in zip(places, self.windows, self.canvas, strict=True):
            low, high = np.maximum(window.first, 0)[at], np.minimum(window.last, extent - 1)[at]
            steps = np.where(lowest(at) == highest(at), window.step, 1)
            boxes.append([lowest(low), highest(high), highest(low), lowest(high), steps])
        return np.array(boxes).swapaxes(0, 1)

    def _places(self, first: Ints, last: Ints, order: Ints | None) -> tuple[Ints, list[Ints]]:
        """Return where each block begins among the places of the tokens of all, and these."""
        token = np.arange(first[0], last[-1] + 1)
        return first - first[0], self._coordinates(token if order is None else order[token])

    def signature(self, grid: Grid, s: Ints, row: Ints, col: Ints) -> list[Ints]:
        return self.alike(grid, None, None, row, col)

    def alike(self, grid: Grid, q: Ints | None, k: Ints | None, row: Ints, col: Ints) -> list[Ints]:
        """Return a signature of queries and keys that may be in another order.

        A tile follows from the windows of its queries and the places of its keys, each relative to
        those of its first token, and from the difference of the two.
        """
        rows, i = np.unique(row, return_inverse=True)
        cols, j = np.unique(col, return_inverse=True)
        at = np.clip(grid.q_token(rows)[:, None] + np.arange(grid.block_q), 0, grid.n_q - 1)
        places = zip(self._coordinates(at if q is None else q[at]), self.windows, strict=True)
        ends = [(window.first[place], window.last[place]) for place, window in places]
        first, last = np.array(ends, np.int32).transpose(1, 2, 0, 3)  # (rows, axes, block_q)
        at = np.clip(grid.k_token(cols)[:, None] + np.arange(grid.block_k), 0, grid.n_k - 1)
        keys = np.stack(self._coordinates(at if k is None else k[at]), axis=1)
        # Of no matter along an axis whose keys are all in the windows.
        extents = np.array(self.canvas)
        whole = (first.max(axis=2) <= 0) & (last.min(axis=2) >= extents - 1) & self._fills
        origin, origin_k = first[:, :, :1], keys[:, :, :1]
        kinds_q = _kinds(np.concatenate([first - origin, last - origin], axis=1))
        apart = origin[i, :, 0] - origin_k[j, :, 0]
        return [kinds_q[i], _kinds(keys - origin_k)[j], *np.where(whole[i], 0, apart).T]


def _levels(values: Ints, extreme: np.ufunc, count: int) -> list[Ints]:
    """Return the extremes of (axes, n) over aligned stretches of 1, 2, 4, .. columns."""
    levels = [values]
    while len(levels) < count:
        even, odd = levels[-1][:, ::2].copy(), levels[-1][:, 1::2]
        extreme(even[:, : odd.shape[1]], odd, out=even[:, : odd.shape[1]])
        levels.append(even)
    return levels


def _kinds(content: NDArray) -> Ints:
    """(R,) numbers, equal where content[r] is; content has small integers."""
    return row_numbers(content.reshape(len(content), -1).astype(np.int32))


def canvas_extents(canvas: Any) -> tuple[int, ...]:
    """One to three extents, slowest first."""
    if not isinstance(canvas, tuple | list) or not 1 <= len(canvas) <= 3:
        raise ValueError(f"canvas is {canvas!r}: give one to three extents, (height, width)")
    return tuple(integer("canvas extent", extent, min=1) for extent in canvas)


def per_axis(name: str, value: Any, canvas: tuple[int, ...], *, min: int | None) -> tuple:
    """Return an integer >= min for every axis, or a flag where min is None."""
    values = tuple(value) if isinstance(value, tuple | list) else (value,) * len(canvas)
    if len(values) != len(canvas):
        kind = "flag" if min is None else "integer"
        raise ValueError(f"{name} is {value!r}: give one {kind}, or {len(canvas)} for the canvas")
    return tuple(flag(name, x) if min is None else integer(name, x, min=min) for x in values)


def shortest(values: tuple) -> Any:
    """Return the shortest way to write the values of the axes: one where all are equal."""
    return values[0] if len(set(values)) == 1 else values
