"""Protocols that functions over masks are written against; this module imports no class of ours.

The classes `masks.Mask` and `masks.BlockMask` import functions, and the functions import only these
Protocols. A function that makes a block mask returns `BlockData`, which `BlockMask(*data)` checks.
"""

from collections.abc import Callable
from functools import cached_property
from typing import Any, NamedTuple, Protocol

from numpy import int32, uint32
from numpy.typing import NDArray

from masks.runs import Bools, Grid, Ints, Runs

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


class BlockData(NamedTuple):
    """The fields of a `BlockMask`, in its order; see there for what they mean."""

    n_q: int
    n_k: int
    block_size: tuple[int, int]
    batch: int
    heads: int
    starts: Ints
    tiles: NDArray[int32]
    bits: NDArray[uint32]
    text: str = ""

    @classmethod
    def of(
        cls, grid: Grid, starts: Ints, tiles: NDArray[int32], bits: NDArray[uint32], text: str
    ) -> "BlockData":
        """On the tokens of a grid."""
        n_q, n_k = grid.n_q - grid.q_origin, grid.n_k - grid.k_origin
        sizes = grid.block_q, grid.block_k
        return cls(n_q, n_k, sizes, grid.batch, grid.heads, starts, tiles, bits, text)


class BlockMask(Protocol):
    """What functions over block masks use of `masks.BlockMask`; see there."""

    @property
    def n_q(self) -> int: ...
    @property
    def n_k(self) -> int: ...
    @property
    def block_size(self) -> tuple[int, int]: ...
    @property
    def batch(self) -> int: ...
    @property
    def heads(self) -> int: ...
    @property
    def starts(self) -> Ints: ...
    @property
    def tiles(self) -> NDArray[int32]: ...
    @property
    def bits(self) -> NDArray[uint32]: ...
    @property
    def text(self) -> str: ...
    @property
    def key(self) -> str: ...
    @cached_property
    def grid(self) -> Grid: ...
    @property
    def rows(self) -> int: ...
    @property
    def cols(self) -> int: ...
    @cached_property
    def nnz(self) -> int: ...
    @property
    def density(self) -> float: ...
    def to_dense(self) -> Bools: ...


class Mask(Protocol):
    """What functions over mask expressions use of `masks.Mask`; see there."""

    @property
    def key(self) -> str: ...
    @property
    def kind(self) -> str: ...
    @property
    def parts(self) -> "tuple[Mask, ...]": ...
    @property
    def batch(self) -> int | None: ...
    @property
    def heads(self) -> int | None: ...
    @property
    def per_head(self) -> bool: ...
    @property
    def period(self) -> int: ...
    @property
    def per_layer(self) -> bool: ...
    def place(self, grid: Grid) -> Placed: ...
    def repeats(self, grid: Grid) -> Repeats | None: ...
    def moves(self) -> Moves | None: ...
    def layer(self, index: int) -> "Mask": ...
    def build(
        self,
        n_q: int,
        n_k: int | None = None,
        block_size: int | tuple[int, int] = 128,
        *,
        batch: int | None = None,
        heads: int | None = None,
    ) -> BlockMask: ...
    def __or__(self, other: Any) -> "Mask": ...
    def __and__(self, other: Any) -> "Mask": ...
