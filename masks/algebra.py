"""Mask expressions: leaves joined by `|`, `&`, `~` and `-`, with no length and no device.

`mask >> transform` is in `masks.transforms`, masks that differ from head to head or from layer to
layer in `masks.structure`.

A mask is a set of allowed (query, key) pairs for every length. Two masks are equal when their
canonical texts are; the text is Python, and `masks.parse` reads it back.
"""

import inspect
import math
from dataclasses import dataclass, fields
from functools import reduce
from itertools import chain
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np

from masks import runs as rl
from masks.analysis.check import Report, check
from masks.analysis.partition import Partition, partition
from masks.analysis.reach import Reach, built, reach
from masks.analysis.stats import Stats
from masks.block_mask import BlockMask
from masks.build import build
from masks.checks import integer
from masks.looks import joined
from masks.registry import Keyed, remember
from masks.runs import Grid
from masks.types import Changes, Moves, Placed, Repeats

if TYPE_CHECKING:
    from matplotlib.axes import Axes


_OF_A_BUILT_MASK = frozenset({*vars(BlockMask), *BlockMask.__annotations__})


class Mask(Keyed):
    """An immutable, hashable, picklable expression. Make one with the functions of `masks`.

    Attributes:
        key: canonical text; equality and hash go by it.
        kind: what is on top: the name of a pattern or of a transform, or "|", "&" or "~".
        parts: the masks that it is made of; none for a pattern.
        batch, heads: the extent that an array leaf fixes, None when any count fits.
        per_head: whether it differs from head to head, so that `build` needs `heads=`.
        period: heads after which it repeats, or 0 when it never does; `build` takes it for `heads=`
            where that is not given.
        per_layer: whether it differs from layer to layer: take `layer(i)` before `build`.
        spelled: whether `parse(key)` gives it back: no array is in it.
    """

    kind: str
    parts: "tuple[Mask, ...]" = ()
    batch: int | None = None
    heads: int | None = None
    per_head: bool = False
    period: int = 1
    per_layer: bool = False
    spelled: bool = True
    binding = 3  # of the operator on top: | 0, & 1, >> 2, calls and ~ 3

    def place(self, grid: Grid) -> Placed:
        """Classify every block of `grid`."""
        raise NotImplementedError

    def repeats(self, grid: Grid) -> Repeats | None:
        """Return which block rows of `grid` look the same, or None where that is not known."""
        return joined([part.repeats(grid) for part in self.parts])

    def moves(self) -> Moves | None:
        """Return how far the mask moves along the diagonal and stays the same, or None."""
        found = [moves for part in self.parts if (moves := part.moves())]
        if not found or len(found) < len(self.parts):
            return None
        periods, cuts, firsts = zip(*found, strict=True)
        return Moves(math.lcm(*periods), tuple(sorted({*chain(*cuts)})), max(firsts))

    def layer(self, index: int) -> "Mask":
        """Return the mask of layer `index`, >= 0; the mask itself where all layers share it."""
        index = integer("index", index, min=0)
        return self._layer(index) if self.per_layer else self

    def _layer(self, index: int) -> "Mask":
        """Return the mask of a layer, where they differ."""
        raise NotImplementedError

    def build(
        self,
        n_q: int,
        n_k: int | None = None,
        block_size: int | tuple[int, int] = 128,
        *,
        batch: int | None = None,
        heads: int | None = None,
    ) -> BlockMask:
        """Return the exact block mask for one length; the last ones are kept.

        Args:
            n_q, n_k: tokens; n_k defaults to n_q.
            block_size: (block_q, block_k) or one int for both; multiples of 16 between 16 and 256.
            batch, heads: extents of q; needed only where the mask differs along them.

        Raises:
            ValueError: an argument out of range, an array leaf of another length or extent, a mask
                that differs from head to head without `heads`, or one that differs from layer to
                layer.
        """
        return build(self, n_q, n_k, block_size, batch=batch, heads=heads)

    def draw(
        self,
        n_q: int,
        n_k: int | None = None,
        block_size: int | tuple[int, int] = 128,
        path: Any = None,
        ax: "Axes | None" = None,
        *,
        heads: int | None = None,
        **options: Any,
    ) -> "Axes":
        """Build and draw a slice; see `BlockMask.draw`. `heads` as in `build`."""
        return self.build(n_q, n_k, block_size, heads=heads).draw(path, ax, **options)

    def stats(
        self,
        n_q: int,
        n_k: int | None = None,
        block_size: int | tuple[int, int] = 128,
        *,
        heads: int | None = None,
    ) -> Stats:
        """Build, and count: densities, loads, holes, distances; see `BlockMask.stats`."""
        return self.build(n_q, n_k, block_size, heads=heads).stats()

    def reach(
        self,
        seq_len: int,
        layers: int | None = None,
        *,
        block_size: int | tuple[int, int] = 128,
        heads: int | None = None,
        **options: Any,
    ) -> Reach:
        """Build, and return what is seen after 1, 2, .. layers; see `masks.analysis.reach.reach`.

        A mask that differs from layer to layer needs `layers`.
        """
        return reach(built(self, seq_len, layers, block_size, heads), layers, **options)

    def partition(
        self, n: int, ranks: int, block_size: int = 128, *, heads: int | None = None, **options: Any
    ) -> Partition:
        """Build, and share the sequence among devices: what each computes, receives and sends.

        See `masks.analysis.partition.partition`; heads: those of the queries.
        """
        per_head = heads or 32 if self.per_head else None
        return partition(
            self.build(n, None, block_size, heads=per_head), ranks, heads=heads, **options
        )

    def check(
        self, seq_len: int, layers: int | None = None, causal: bool | None = None, **options: Any
    ) -> Report:
        """Return what is wrong with the mask, in words; see `masks.analysis.check.check`."""
        return check(self, seq_len, layers, causal, **options)

    __array_ufunc__ = None  # array | mask is no elementwise operation

    def __or__(self, other: "Mask") -> "Mask":
        return Or.of(self, other) if isinstance(other, Mask) else _no_operand(other)

    def __and__(self, other: "Mask") -> "Mask":
        return And.of(self, other) if isinstance(other, Mask) else _no_operand(other)

    def __sub__(self, other: "Mask") -> "Mask":
        return And.of(self, other.__invert__()) if isinstance(other, Mask) else _no_operand(other)

    def __ror__(self, other: Any) -> "Mask":
        return _no_operand(other)

    __rand__ = __rsub__ = __ror__

    def __add__(self, other: Any) -> NoReturn:
        raise TypeError("+ and * join masks in texts alone: write | and & here")

    __mul__ = __add__

    def __invert__(self) -> "Mask":
        return Not(self)

    def __bool__(self) -> NoReturn:
        raise TypeError(
            "a mask has no truth value: write | & ~ for or, and, not; `is None` in an if"
        )

    def __setattr__(self, name: str, *value: Any) -> NoReturn:
        raise AttributeError(f"a mask is immutable: cannot change {name!r}")

    __delattr__ = __setattr__

    if not TYPE_CHECKING:  # type checkers name the missing attribute themselves

        def __getattr__(self, name: str) -> NoReturn:
            if name in _OF_A_BUILT_MASK:
                raise AttributeError(f"a mask has no length, so no {name}: build(n).{name} has it")
            raise AttributeError(f"a mask has no attribute {name!r}")

    def __reduce__(self):
        return type(self), tuple(getattr(self, f.name) for f in fields(self))  # type: ignore[arg-type]


def _no_operand(other: Any) -> Any:
    """NotImplemented, or TypeError with the remedy for what can become a mask."""
    if isinstance(other, str):
        raise TypeError(f"a mask and the text {other!r} do not combine: write masks.parse(text)")
    if isinstance(other, BlockMask):
        raise TypeError("a mask and a block mask do not combine: combine masks, then build")
    if isinstance(other, np.ndarray):
        raise TypeError("a mask and an array do not combine: write masks.mask_from(array)")
    if inspect.isfunction(other):
        raise TypeError(f"{other.__name__} is a function: call it, or write masks.where(function)")
    return NotImplemented


@dataclass(frozen=True, init=False, repr=False, eq=False)
class _Join(Mask):
    """Operands joined by an associative operator; nested joins of the same kind are flattened."""

    parts: tuple[Mask, ...]
    kind = ""
    operator = np.maximum  # of block codes, and of booleans as well

    def __init__(self, parts: tuple[Mask, ...]):
        # no str() and no generators here: torch.compile traces the making of a mask
        words = [f"({p.key})" if p.binding < 3 else p.key for p in parts]
        object.__setattr__(self, "parts", parts)
        object.__setattr__(self, "key", f" {self.kind} ".join(words))
        inherit(self, parts)

    def _layer(self, index: int) -> Mask:
        return type(self).of(*[part.layer(index) for part in self.parts])

    @classmethod
    def of(cls, *operands: Mask) -> Mask:
        parts: list[Mask] = []
        for operand in operands:
            parts += operand.parts if isinstance(operand, cls) else [operand]
        return cls(tuple(parts))

    def place(self, grid: Grid) -> Placed:
        placed = [part.place(grid) for part in self.parts]
        return Placed(
            runs=reduce(lambda a, b: rl.merge(a, b, self.operator), (p.runs for p in placed)),
            allowed=lambda s, q, k: reduce(self.operator, (p.allowed(s, q, k) for p in placed)),
            signature=lambda x: [column for p in placed for column in p.signature(x)],
            changes=any_changes(placed),
        )


class Or(_Join):
    kind, operator, binding = "|", np.maximum, 0


class And(_Join):
    kind, operator, binding = "&", np.minimum, 1


@dataclass(frozen=True, init=False, repr=False, eq=False)
class Not(Mask):
    part: Mask
    kind = "~"

    def __init__(self, part: Mask):
        object.__setattr__(self, "part", part)
        word = f"~({part.key})" if part.binding < 3 else f"~{part.key}"
        object.__setattr__(self, "key", word)
        inherit(self, (part,))

    @property
    def parts(self) -> tuple[Mask, ...]:  # type: ignore[override]
        return (self.part,)

    def _layer(self, index: int) -> Mask:
        return ~self.part.layer(index)

    def __invert__(self) -> Mask:
        return self.part

    def place(self, grid: Grid) -> Placed:
        inner = self.part.place(grid)
        return Placed(
            rl.Runs(inner.runs.starts, rl.FULL - inner.runs.codes),
            lambda s, q, k: ~inner.allowed(s, q, k),
            inner.signature,
            inner.changes,
        )


def any_changes(placed: list[Placed]) -> tuple[Changes | None, Changes | None]:
    """`Placed.changes` of what is made of others, pair by pair."""

    def of(side: int) -> Changes | None:
        known = [changes for p in placed if (changes := p.changes[side]) is not None]
        if len(known) < len(placed):
            return None
        return lambda s, token: reduce(np.logical_or, (changes(s, token) for changes in known))

    return of(0), of(1)


def inherit(
    mask: Mask, parts: tuple[Mask, ...], others: tuple[Mask, ...] = (), *, spelled: bool = True
) -> None:
    """Give a mask made of others what follows from theirs: extents and flags.

    Args:
        others: masks of which it has the extents only.
        spelled: whether the text of what is done to the parts can be parsed.
    """
    own = object.__setattr__
    own(mask, "batch", _common_extent("batch", (*parts, *others)))
    own(mask, "heads", _common_extent("heads", (*parts, *others)))
    own(mask, "per_head", any([part.per_head for part in parts]))
    own(mask, "period", math.lcm(*[part.period for part in parts]))  # 0 if any is 0
    own(mask, "per_layer", any([part.per_layer for part in parts]))
    own(mask, "spelled", spelled and all([part.spelled for part in parts]))
    if not mask.spelled:
        remember(mask)


def _common_extent(name: str, parts: tuple[Mask, ...]) -> int | None:
    extents = {getattr(part, name) for part in parts} - {None}
    if len(extents) > 1:
        sizes = " and ".join(map(str, sorted(extents)))
        raise ValueError(
            f"masks with {name} extents {sizes} do not combine: give arrays of one extent, or of 1"
        )
    return extents.pop() if extents else None
