"""`where`: the mask of a function of query and key numbers."""

import itertools
import warnings
from collections.abc import Callable, Hashable, Sequence
from functools import cached_property, partial
from typing import Any
from weakref import WeakKeyDictionary, WeakValueDictionary

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view

from masks import runs as rl
from masks.checks import argument_places, flag, integer
from masks.leaves.geometry import rectangle_runs
from masks.leaves.leaf import Leaf, aligned
from masks.looks import Copies, Squares, classify
from masks.predicate.alike import BlockSignature, moves_of, tables_of
from masks.predicate.bounds import Bounds, check_known, check_size
from masks.predicate.expression import BOOL, INDEXED, Expression, Unsupported, atom, lift, walk
from masks.predicate.table import Table
from masks.registry import canonical, pattern
from masks.runs import Bools, Codes, Grid, Ints, Runs, expand, quotient
from masks.types import Moves, Placed

__all__ = ["where"]
SECTION = "Composition"  # of the gallery

PAIRS_OF_KINDS = 1 << 24  # that a rule of tables is evaluated for at most
PAIRS = 1 << 34  # that a predicate which cannot be bounded is evaluated for at most
_FEW = 1 << 10  # tokens; block origins before the first token are less than this
_REMEDY = (
    "for one of q and k write where(fn), for fn(h, q, k) where(fn, per_head=True), for fn(b, q, k)"
    " where(fn, batch=B), and for a mask_mod(b, h, q, kv) that uses neither b nor h where(lambda q,"
    " k: mask_mod(0, 0, q, k))"
)
_NO_TENSORS = "masks.table(ids)[q] for a torch tensor ids[q]"

# by function and by what it computes: name#number
_words: "WeakKeyDictionary[Any, dict[Hashable, str]]" = WeakKeyDictionary()
_functions: "WeakValueDictionary[str, Any]" = WeakValueDictionary()
_counter = itertools.count(1)


@pattern("where(lambda q, k: (q - k) % 24 < 6)", "any formula")
def where(
    fn: Callable[..., Any], *, per_head: bool = False, batch: int | None = None
) -> "Predicate":
    """Key k is allowed for query q where fn(q, k) is True.

    fn is called with integer NumPy arrays that broadcast, and once with symbols in place of them:
    so it finds out which blocks are full or empty without a look at every pair. The result is
    exact either way. These are understood: + - * // % / ** << >> abs, comparisons, & | ^ ~,
    np.minimum, maximum, clip, where, isin, sqrt, square, floor, ceil, and arrays in
    `masks.table`. A function that does anything else is evaluated for every pair in question,
    with a UserWarning.

    Args:
        fn: fn(q, k) -> booleans. With `per_head` the number of the head comes first, fn(h, q, k),
            and with `batch` that of the batch entry: fn(b, q, k) or fn(b, h, q, k). Parameters
            that are named so (or q_idx, kv_idx, query, key, head, batch, ..) may come in another
            order. Its result must depend only on these numbers; write & | ~ for and, or, not.
        per_head: whether the mask differs from head to head; `build` then needs `heads=`.
        batch: the number of batch entries, where the mask differs among them.

    The text of the mask means something in this process only, while the function lives, and two
    masks are equal when their functions are one object, which still computes the same. Where a
    function with `@masks.pattern()` returns the mask, the text is the call of that function, which
    `parse` reads.

    Raises:
        ValueError: fn does not take arrays, a parameter has the name of another one, or the result
            is not boolean. At `build`: a
            `masks.table` too short for the tokens, or more than 2**34 pairs to evaluate.
    """
    per_head = flag("per_head", per_head)
    batch = None if batch is None else integer("batch", batch, min=1)
    text = None if callable(fn) else fn  # of a mask
    if text is not None:
        fn = _function(text)
    name = getattr(fn, "__qualname__", type(fn).__name__)
    places = ("b",) * (batch is not None) + ("h",) * per_head + ("q", "k")
    places = argument_places(fn, name, places, _REMEDY)
    axes = reversed(range(len(places)))
    _call(fn, name, tuple(np.zeros((axis + 2,) + (1,) * axis, np.int64) for axis in axes))
    rule, reason = _trace(fn, places)
    period = 0 if per_head else 1
    mask = Predicate(fn, places, period, batch, name, rule, reason)
    word = _word(fn, name, rule)
    if text not in (None, word):
        raise ValueError(f"where() is given {text!r}, whose function has changed: give fn(q, k)")
    return canonical(mask, fn=word)


def _word(fn: Callable[..., Any], name: str, rule: Expression | None) -> str:
    """name#number, the same for the same object while its rule is the same, and for no other."""
    word = f"{name}#{next(_counter)}"
    try:
        word = _words.setdefault(fn, {}).setdefault(_content(rule), word)
        _functions[word] = fn
    except TypeError:  # no weak reference, or no hash
        pass
    return word


def _content(rule: Expression | None) -> Hashable:
    """Return what is equal for rules that are node for node alike."""
    number: dict[Expression, int] = {}
    nodes: dict[Hashable, int] = {}
    for node in walk(rule) if rule is not None else ():
        data: Any = node.data
        if isinstance(data, Table):
            data = data.digest
        elif isinstance(data, np.ndarray):
            data = data.dtype.str, data.tobytes()
        entry = node.op, node.kind, data, *(number[arg] for arg in node.args)
        number[node] = nodes.setdefault(entry, len(nodes))
    return tuple(nodes)


def _function(word: Any) -> Callable[..., Any]:
    """Return the living function of a word."""
    if not isinstance(word, str) or word not in _functions:
        raise ValueError(f"where() is given {word!r}, no function of this process: give fn(q, k)")
    return _functions[word]


def _call(fn: Callable[..., Any], name: str, arrays: tuple[Ints, ...]) -> Bools:
    """fn(*arrays), checked."""
    shape = np.broadcast_shapes(*(array.shape for array in arrays))
    try:
        result = np.asarray(fn(*arrays))
    except Exception as error:
        raise ValueError(
            f"{name} fails on integer arrays of shapes {[a.shape for a in arrays]}: {error}. "
            "Write & | ~ for `and`, `or`, `not` and chained comparisons, np.where, np.minimum, "
            f"np.maximum for if, min, max, abs(d) for d.abs(), and {_NO_TENSORS}"
        ) from error
    if result.dtype != bool:
        raise ValueError(
            f"{name} gives {result.dtype}: give booleans, True where allowed, and {_NO_TENSORS}"
        )
    try:
        return np.broadcast_to(result, shape)
    except ValueError:
        raise ValueError(
            f"{name} gives shape {result.shape}: the shapes {[a.shape for a in arrays]} of its "
            f"arguments broadcast to {shape}, so give that, or less"
        ) from None


def _trace(fn: Callable[..., Any], places: Sequence[str]) -> tuple[Expression | None, str]:
    """Return what fn computes, or None and what it does not take to symbols."""
    try:
        rule = lift(fn(*map(atom, places)))
        if rule.kind != BOOL:
            raise Unsupported("the result is no truth value")
        check_known(rule)
    except IndexError:  # of a NumPy array, whatever error the symbol raises
        return None, INDEXED
    except Exception as error:
        return None, str(error) or type(error).__name__
    return rule, ""


class Rule(Leaf):
    """A pattern that is given by its definition alone: everything follows from the formula.

    Attributes:
        fn: whether a key is allowed for a query, for arrays and for symbols.
        places: its arguments in order: q and k, for a mask that differs among them also the head h
            and the batch entry b.
        period, batch: as in `Mask`.
    """

    fn: Callable[..., Any]
    places: Sequence[str] = "qk"
    period: int = 1
    batch: int | None = None

    @property
    def per_head(self) -> bool:  # type: ignore[override]
        return "h" in self.places

    @cached_property
    def expression(self) -> Expression | None:
        """What the rule computes."""
        return lift(self.fn(*map(atom, self.places)))

    def allowed(self, grid: Grid, s: Ints, q: Ints, k: Ints) -> Bools:
        given = {"b": s // grid.heads, "h": s % grid.heads, "q": q, "k": k}
        shape = np.broadcast_shapes(s.shape, q.shape, k.shape)
        return np.broadcast_to(self.call(*[given[place] for place in self.places]), shape)

    def call(self, *arrays: Ints) -> Bools:
        """Return whether the keys are allowed for the queries."""
        return self.fn(*arrays)

    def runs(self, grid: Grid) -> Runs:
        rule, rectangles = self.expression, self._rectangles(grid)
        if rectangles is not None:
            return rectangles

        def look(window: Grid) -> tuple[Ints, Codes]:
            with np.errstate(all="ignore"):
                return classify(window, lambda squares: self._bounds(window, squares).of(rule))  # pyright: ignore[reportArgumentType]

        repeats = self.repeats(grid) if grid.whole else None
        copies = Copies(grid, repeats) if repeats else None
        starts, codes = copies.runs(look) if copies and copies.worthwhile else look(grid)
        return Runs(starts, codes.astype(np.uint8))

    def moves(self) -> Moves | None:
        return None if self.expression is None else moves_of(self.expression)

    @cached_property
    def _tables(self) -> dict[str, list[Table] | None]:
        """The tables through which queries and keys are seen; None if otherwise."""
        rule = self.expression
        return {side: None if rule is None else tables_of(rule, side) for side in "qk"}

    def token_kinds(self, side: str, n: int) -> Ints | None:
        tables = self._tables[side]
        if tables is None:
            return None
        for table in tables:
            table.check(0, n - 1)
        columns = [table.data[:n] for table in set(tables)]
        if len(columns) == 1 and columns[0].dtype == np.int64:
            return columns[0]
        begins = np.zeros(n, bool)
        for column in columns:
            begins[1:] |= column[1:] != column[:-1]
        return np.cumsum(begins)

    def _rectangles(self, grid: Grid) -> Runs | None:
        """Codes from a pair of tokens of each kind, where the tables tell them; None if not."""
        q_kinds, k_kinds = self.token_kinds("q", grid.n_q), self.token_kinds("k", grid.n_k)
        if self.per_head or self.batch or q_kinds is None or k_kinds is None:
            return None
        q, k = (np.flatnonzero(np.diff(x, prepend=x[0] - 1)) for x in (q_kinds, k_kinds))
        _, shown, kind = np.unique(q_kinds[q], return_index=True, return_inverse=True)
        if len(shown) * len(k) > PAIRS_OF_KINDS:
            return None
        step, found, zero = max(1, (1 << 20) // len(k)), [], np.zeros((1, 1, 1), np.int64)
        for begin in range(0, len(shown), step):
            part = q[shown[begin : begin + step]]
            met = np.zeros((len(part), len(k) + 2), np.int8)
            met[:, 1:-1] = self.allowed(grid, zero, part[None, :, None], k[None, None])[0]
            change = np.diff(met, axis=1)
            row, first = np.nonzero(change == 1)
            found.append((begin + row, first, np.nonzero(change == -1)[1]))
        row, first, stop = map(np.concatenate, zip(*found, strict=True))
        low, high = (np.searchsorted(row, kind, side) for side in ("left", "right"))
        if int((high - low).sum()) > PAIRS_OF_KINDS:
            return None
        at, which = expand(low, high)
        q_ends, k_ends = np.append(q, grid.n_q), np.append(k, grid.n_k)
        sides = q[at], q_ends[at + 1], k_ends[first[which]], k_ends[stop[which]]
        return rectangle_runs(grid, np.zeros_like(at), *sides)

    def signature(self, grid: Grid, s: Ints, row: Ints, col: Ints) -> list[Ints]:
        if None not in self._tables.values():
            return super().signature(grid, s, row, col)
        origins = {"q": grid.q_token(row), "k": grid.k_token(col)}
        origins |= {"b": s // grid.heads, "h": s % grid.heads}
        with np.errstate(all="ignore"):
            bounds = self._bounds(grid, Squares(1, s, row, col))
            alike = BlockSignature(bounds, origins, {"q": grid.block_q, "k": grid.block_k})
            return alike.columns(self.expression)  # pyright: ignore[reportArgumentType]

    def _bounds(self, grid: Grid, squares: Squares) -> Bounds:
        size, s, row, col = squares
        last_row = np.minimum(row + size, grid.rows) - 1
        last_col = np.minimum(col + size, grid.cols) - 1
        entry, head = quotient(s, grid.heads)
        return Bounds(
            {
                "q": (grid.q_first[row], grid.q_last[last_row]),
                "k": (grid.k_first[col], grid.k_last[last_col]),
                "h": (head, head),
                "b": (entry, entry),
            }
        )


def by_distance(fn: Callable[[Any], Any], align: str = "top_left") -> Leaf:
    """Return the mask of fn(d) for the distance d = q - k, counted as `align` says."""
    return aligned(align, lambda shift: ByDistance(lambda q, k: fn(q + shift - k)))


class ByDistance(Rule):
    """A rule of the distance alone, which pairs of tokens share."""

    def allowed(self, grid: Grid, s: Ints, q: Ints, k: Ints) -> Bools:
        size = np.broadcast(q, k).size
        if not size:
            return super().allowed(grid, s, q, k)
        lowest, highest = int(np.min(q) - np.max(k)), int(np.max(q) - np.min(k))
        if highest - lowest >= size:
            return super().allowed(grid, s, q, k)
        here = self.fn(np.arange(highest, lowest - 1, -1), 0)
        if np.shape(q)[-1:] == (1,) and (np.diff(k) == 1).all():  # keys in a row
            start = highest - (q - k[..., :1])[..., 0]
            return sliding_window_view(here, k.shape[-1])[start]
        return here[highest - q + k]


class Predicate(Rule):
    """A function of token numbers, with what it computes, or the `reason` why that is not known."""

    name: str = ""
    traced: Expression | None = None
    reason: str = ""
    anonymous: bool = True  # not returned by a function with @masks.pattern()
    spelled = False

    @property
    def expression(self) -> Expression | None:  # type: ignore[override]
        return self.traced

    def call(self, *arrays: Ints) -> Bools:
        return _call(self.fn, self.name, arrays)

    def _place(self, grid: Grid) -> Placed:
        if self.traced is not None and _content(_trace(self.fn, self.places)[0]) != self._content:
            raise ValueError(
                f"{self.name} computes something else than when where() took it, because a variable"
                " that it reads has changed: give it an own value, such as lambda q, k, w=w: .."
            )
        reason = self._unbounded(grid)
        if not reason:
            return super()._place(grid)
        warnings.warn(
            f"{self.name} is evaluated for up to {grid.n_q * grid.n_k * grid.slices:,} pairs, one "
            f"by one: {reason}",
            UserWarning,
            stacklevel=2,
        )
        pairs = 0

        def allowed(s: Ints, q: Ints, k: Ints) -> Bools:
            nonlocal pairs
            result = self.allowed(grid, s, q, k)
            pairs += result.size
            if pairs > PAIRS:
                raise ValueError(
                    f"{self.name} would be evaluated for more than {PAIRS:,} pairs: build for "
                    f"fewer tokens, or mend this: {reason}"
                )
            return result

        return Placed(rl.constant(rl.MIXED), allowed, lambda x: [x])

    @cached_property
    def _content(self) -> Hashable:
        return _content(self.traced)

    def _unbounded(self, grid: Grid) -> str:
        """Return why the blocks of this grid cannot be bounded, or ""."""
        if self.traced is None:
            return self.reason
        try:
            greatest = {"q": grid.n_q, "k": grid.n_k, "h": grid.heads, "b": grid.batch}
            check_size(self.traced, {name: max(n, _FEW) for name, n in greatest.items()})
        except Unsupported as error:
            return str(error)
        return ""

    def __reduce__(self):
        if not self.anonymous:
            return super().__reduce__()
        # pickle raises where it cannot find fn by name
        return partial(where, per_head=self.per_head, batch=self.batch), (self.fn,)
