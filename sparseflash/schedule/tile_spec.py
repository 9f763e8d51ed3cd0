"""Parameters of a work list."""

from collections.abc import Sequence
from typing import Literal, NamedTuple

from torch import Tensor

from sparseflash.problem import Problem
from sparseflash.schedule.blocks import Schedule, ScheduleFacts, TileLists
from sparseflash.schedule.order import Work

Side = Literal["rows", "cols"]
SPARE = 8  # entries that a kernel may read beyond the last one; they mean nothing


class TileSpec(NamedTuple):
    """Parameters of a work list: the tiles of a kernel, and the extents of q and k.

    major: a multiple of 16. minor: a power of two, at most 128. sms: multiprocessors to fill.
    traffic: bytes that an entry moves for each of its minor tokens, if its tile may be split to
    keep them in L2.
    """

    by_rows: bool
    major: int
    minor: int
    n_q: int
    n_k: int
    batch: int
    heads: int
    kv_heads: int
    sms: int
    traffic: int = 0

    @staticmethod
    def of(
        problem: Problem, side: Side, major: int, minor: int, sms: int, traffic: int = 0
    ) -> "TileSpec":
        """For the rows or the columns of the mask of a problem."""
        extents = problem.n_q, problem.n_k, problem.batch, problem.heads, problem.kv_heads
        return TileSpec(side == "rows", major, minor, *extents, sms, traffic)

    @staticmethod
    def of_ints(fields: Sequence[int]) -> "TileSpec":
        """Return the spec whose fields these are, with the bool as an int."""
        return TileSpec._make([bool(fields[0]), *fields[1:]])

    def block_sizes(self, schedule: Schedule | ScheduleFacts) -> tuple[int, int]:
        """Tokens of the blocks of a schedule: major, minor."""
        block_q, block_k = schedule.block_q, schedule.block_k
        return (block_q, block_k) if self.by_rows else (block_k, block_q)

    @property
    def tokens(self) -> tuple[int, int]:
        """Of the sequences: major, minor."""
        return (self.n_q, self.n_k) if self.by_rows else (self.n_k, self.n_q)

    @property
    def group(self) -> int:
        """Query heads in one list."""
        return 1 if self.by_rows else self.heads // self.kv_heads

    @property
    def n_tiles(self) -> int:
        return -(-self.tokens[0] // self.major)

    def list_heads(self, mask_heads: int) -> int:
        return 1 if mask_heads == 1 else self.heads // self.group

    def copies(self, slices: int) -> int:
        """(batch, head)s that run a slice."""
        return self.batch * (self.heads if self.by_rows else self.kv_heads) // slices

    def matches(self, lists: TileLists) -> bool:
        """Whether lists made of a dynamic schedule have these parameters."""
        mine = self.by_rows, self.major, self.minor, *self.tokens, self.group
        its = lists.by_rows, lists.major, lists.minor, lists.n_major, lists.n_minor, lists.group
        return mine == its

    def lists(
        self, work: Work, idx: Tensor, bit: Tensor, bits: Tensor, batch: int, heads: int, *,
        partial: bool,
    ) -> TileLists:  # fmt: skip
        return TileLists(
            work.items, idx, bit, bits, work.merge, work.items.shape[1], work.n_long, work.n_parts,
            self.major, self.minor, idx.shape[1], batch, heads, partial, *self.tokens, self.group,
            self.by_rows,
        )  # fmt: skip
