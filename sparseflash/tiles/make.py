"""What tile lists are to be made for."""

from typing import NamedTuple

from torch import Tensor

from sparseflash.schedule import Schedule
from sparseflash.tiles.order import Work
from sparseflash.tiles.tile_lists import TileLists

EMPTY, FULL = -2, -1
SPARE = 8  # entries that a kernel may read beyond the last one; they mean nothing


class Make(NamedTuple):
    """What lists are to be made."""

    by_rows: bool
    major: int
    minor: int
    n_q: int
    n_k: int
    batch: int
    heads: int
    kv_heads: int
    sms: int

    def blocks(self, schedule: Schedule) -> tuple[int, int]:
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

    def gave(self, lists: TileLists) -> bool:
        """Whether lists of a dynamic schedule are what this makes of it."""
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
