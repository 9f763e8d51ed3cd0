"""`where`: the mask of a function of query and key numbers."""

import itertools
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary, WeakValueDictionary

import numpy as np

from masks import runs as rl
from masks.algebra import Mask
from masks.checks import argument_places, flag, integer
from masks.leaves.leaf import Leaf
from masks.predicate.block_signature import BlockSignature, combine
from masks.predicate.bounds import Bounds, check_size
from masks.predicate.expression import BOOL, INDEXED, Expression, Unsupported, atom, lift
from masks.predicate.moves import moves
from masks.predicate.quadtree import Squares, classify
from masks.registry import PATTERNS, Example, canonical, pattern
from masks.runs import Bools, Codes, Grid, Ints, Runs
from masks.types import Placed

__all__ = ["where"]
SECTION = "Composition"  # of the gallery

PAIRS = 1 << 34  # that a predicate which cannot be bounded is evaluated for at most
_FEW = 1 << 10  # tokens; block origins before the first token are less than this
_REMEDY = (
    "for one of q and k write where(fn), for fn(h, q, k) where(fn, per_head=True), for fn(b, q, k)"
    " where(fn, batch=B), and for a mask_mod(b, h, q, kv) that uses neither b nor h where(lambda q,"
    " k: mask_mod(0, 0, q, k))"
)
_NO_TENSORS = "masks.table(ids)[q] for a torch tensor ids[q]"

_words: "WeakKeyDictionary[Any, str]" = WeakKeyDictionary()  # the functions seen, by name#number
_functions: "WeakValueDictionary[str, Any]" = WeakValueDictionary()
_counter = itertools.count(1)


@pattern(Example("where(lambda q, k: (q - k) % 24 < 6)", "any formula"))
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
    masks are equal when their functions are one object. Where a function with `@masks.pattern()`
    returns the mask, the text is the call of that function, which `parse` reads.

    Raises:
        ValueError: fn does not take arrays, a parameter has the name of another one, or the result
            is not boolean. At `build`: a
            `masks.table` too short for the tokens, or more than 2**34 pairs to evaluate.
    """
    per_head = flag("per_head", per_head)
    batch = None if batch is None else integer("batch", batch, min=1)
    if not callable(fn):
        fn = _function(fn)  # of the text of a mask
    name = getattr(fn, "__qualname__", type(fn).__name__)
    places = ("b",) * (batch is not None) + ("h",) * per_head + ("q", "k")
    places = argument_places(fn, name, places, _REMEDY)
    axes = reversed(range(len(places)))
    _call(fn, name, tuple(np.zeros((axis + 2,) + (1,) * axis, np.int64) for axis in axes))
    try:
        rule, reason = _trace(fn, places), ""
    except Exception as error:
        rule, reason = None, str(error) or type(error).__name__
    return canonical(Predicate(fn, name, places, rule, reason, per_head, batch), fn=_word(fn, name))


def _word(fn: Callable[..., Any], name: str) -> str:
    """name#number, the same for the same object, and for no other."""
    word = f"{name}#{next(_counter)}"
    try:
        word = _words.setdefault(fn, word)
        _functions[word] = fn
    except TypeError:  # no weak reference, or no hash
        pass
    return word


def _function(word: Any) -> Callable[..., Any]:
    """The living function of a word."""
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


def _trace(fn: Callable[..., Any], places: tuple[str, ...]) -> Expression:
    """What fn computes. Whatever it does not take to symbols comes out as an exception."""
    try:
        rule = lift(fn(*map(atom, places)))
    except IndexError as error:  # of a NumPy array, whatever error the symbol raises
        raise Unsupported(INDEXED) from error
    if rule.kind != BOOL:
        raise Unsupported("the result is no truth value")
    return rule


class Predicate(Leaf):
    """A function of token numbers, and what it computes (`rule`), or the `reason` why not known."""

    fn: Callable[..., Any]
    name: str
    places: tuple[str, ...]  # the arguments of fn, in its order
    rule: Expression | None
    reason: str
    per_head: bool
    batch: int | None
    anonymous: bool = True  # not returned by a function with @masks.pattern()
    spelled = False

    @property
    def period(self) -> int:
        return 0 if self.per_head else 1

    def runs(self, grid: Grid) -> Runs:
        rule, reason = self._rule(grid)
        if rule is None:
            pairs = grid.n_q * grid.n_k * grid.slices
            warnings.warn(
                f"{self.name} is evaluated for up to {pairs:,} pairs, one by one: {reason}",
                UserWarning,
                stacklevel=2,
            )
            return rl.constant(rl.MIXED)

        def codes(squares: Squares) -> Codes:
            with np.errstate(all="ignore"):
                return self._bounds(grid, squares).codes(rule)

        return classify(grid, codes)

    def allowed(self, grid: Grid, s: Ints, q: Ints, k: Ints) -> Bools:
        given = {"b": s // grid.heads, "h": s % grid.heads, "q": q, "k": k}
        shape = np.broadcast_shapes(s.shape, q.shape, k.shape)
        arrays = tuple(given[place] for place in self.places)
        return np.broadcast_to(_call(self.fn, self.name, arrays), shape)

    def signature(self, grid: Grid, s: Ints, row: Ints, col: Ints) -> Ints:
        rule, _ = self._rule(grid)
        if rule is None:
            return super().signature(grid, s, row, col)
        origins = {"q": grid.q_token(row), "k": grid.k_token(col)}
        origins |= {"b": s // grid.heads, "h": s % grid.heads}
        with np.errstate(all="ignore"):
            bounds = self._bounds(grid, Squares(1, s, row, col))
            return combine(BlockSignature(bounds, origins).columns(rule))

    def moves(self) -> tuple[int, ...] | None:
        return None if self.rule is None else moves(self.rule)

    def place(self, grid: Grid) -> Placed:
        placed = super().place(grid)
        if self._rule(grid)[0] is not None:
            return placed
        pairs = 0

        def allowed(s: Ints, q: Ints, k: Ints) -> Bools:
            nonlocal pairs
            result = placed.allowed(s, q, k)
            pairs += result.size
            if pairs > PAIRS:
                raise ValueError(
                    f"{self.name} would be evaluated for more than {PAIRS:,} pairs: build for "
                    f"fewer tokens, or mend this: {self._rule(grid)[1]}"
                )
            return result

        return placed._replace(allowed=allowed)

    def _rule(self, grid: Grid) -> tuple[Expression | None, str]:
        """What can be bounded on this grid, or why it cannot."""
        if self.rule is None:
            return None, self.reason
        try:
            greatest = {"q": grid.n_q, "k": grid.n_k, "h": grid.heads, "b": grid.batch}
            check_size(self.rule, {name: max(n, _FEW) for name, n in greatest.items()})
        except Unsupported as error:
            return None, str(error)
        return self.rule, ""

    def _bounds(self, grid: Grid, squares: Squares) -> Bounds:
        size, s, row, col = squares
        last_row = np.minimum(row + size, grid.rows) - 1
        last_col = np.minimum(col + size, grid.cols) - 1
        entry, head = np.divmod(s, grid.heads)
        return Bounds(
            {
                "q": (grid.q_first[row], grid.q_last[last_row]),
                "k": (grid.k_first[col], grid.k_last[last_col]),
                "h": (head, head),
                "b": (entry, entry),
            }
        )

    def __reduce__(self):
        if not self.anonymous:
            return _made, (self.kind, self.arguments)
        # pickle raises where it cannot find fn by name
        return partial(where, per_head=self.per_head, batch=self.batch), (self.fn,)


def _made(kind: str, arguments: dict[str, Any]) -> Mask:
    """The mask of a registered function."""
    return PATTERNS[kind].function(**arguments)
