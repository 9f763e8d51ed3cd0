"""What masks and functions over masks pass to each other."""

from collections.abc import Callable
from typing import Any, NamedTuple

from masks.runs import Bools, Ints, Runs

Changes = Callable[[Ints, Ints], Bools]  # of (slice, token)


class Placed(NamedTuple):
    """A mask on a grid."""

    runs: Runs  # the code of every block
    allowed: Callable[[Ints, Ints, Ints], Bools]  # of (slice, query, key) arrays, broadcasting
    signature: Callable[[Ints], list[Ints]]  # columns for block positions; equal rows: equal tiles
    # Whether a query may have other keys than the one before it, and a key other queries; None: any
    changes: tuple[Changes | None, Changes | None] = (None, None)


class Moves(NamedTuple):
    """A mask stays the same when queries and keys both move by `period` tokens.

    This holds for keys from `first_k` on, and for queries that stay between the same two tokens of
    `cuts`, which ascend.
    """

    period: int
    cuts: tuple[int, ...] = (0,)
    first_k: int = 0


class Repeats(NamedTuple):
    """Which block rows of a mask look the same.

    In rows of one kind, blocks of columns that differ as the moves of the rows do have equal codes
    and tiles, apart from those in the first `head` columns and those that an end cuts.
    """

    kind: Ints  # (rows,)
    move: Ints | None  # (rows,) in block columns; None where any moves will do
    head: int = 0


# `masks.BlockMask` and `masks.Mask`, whose modules import the functions that are written for them.
BlockMask = Any
Mask = Any
