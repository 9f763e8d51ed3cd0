"""From an expression to the exact `BlockMask` of one length, without an N x N array.

1. The leaves classify the blocks as runs, and the operators merge the runs (`masks.runs`).
2. Only MIXED blocks are looked at, in chunks. Blocks with equal signatures have equal tiles, so one
   of each is evaluated token by token; the tiles are then deduplicated by content.
3. An evaluated block that turns out empty or full becomes so; equal neighbours are joined.
"""

import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from masks import runs as rl
from masks.block_lists import EMPTY, FULL
from masks.block_mask import BlockMask
from masks.checks import block_sizes, integer
from masks.registry import by_text
from masks.runs import Grid, Ints
from masks.tiles import Tiles, pack_bits
from masks.types import BlockData, Mask, Placed

BLOCKS_AT_ONCE = 1 << 16  # bounds the memory for signatures


def build(
    mask: Mask,
    n_q: int,
    n_k: int | None,
    block_size: int | tuple[int, int],
    *,
    batch: int | None = None,
    heads: int | None = None,
) -> BlockMask:
    """See `Mask.build`."""
    block_q, block_k = block_sizes(block_size)
    if mask.per_layer:
        raise ValueError(f"{mask} differs from layer to layer: build mask.layer(i) instead")
    grid = Grid(
        n_q=integer("n_q", n_q, min=1),
        n_k=integer("n_k", n_q if n_k is None else n_k, min=1),
        block_q=block_q,
        block_k=block_k,
        batch=_extent("batch", mask, mask.batch, 1, batch),
        heads=_extent("heads", mask, mask.heads, mask.period if mask.per_head else 1, heads),
    )
    blocks = cache.get((mask.key, grid))
    if blocks is None:
        blocks = BlockMask(*resolve(mask.place(grid), grid, mask.key))
        cache.put((mask.key, grid), blocks)
    return blocks


def _extent(name: str, mask: Mask, fixed: int | None, period: int, given: int | None) -> int:
    """Extent of the block mask along batch or heads: 1 where the mask is the same for all."""
    if given is not None:
        given = integer(name, given, min=1)
    if fixed is not None:
        if given not in (None, fixed):
            raise ValueError(f"{name} is {given}, but {mask} is made for {name}={fixed}")
        if period and fixed % period:
            raise ValueError(f"{mask} is made for {name}={fixed}, but repeats after {period}")
        return fixed
    if period == 1:
        return 1
    if given is None and not period:
        raise ValueError(f"{mask} differs from head to head: give {name}=")
    if given is not None and period and given % period:
        raise ValueError(f"{name} is {given}, but {mask} repeats after {period}: give a multiple")
    return given or period


def resolve(placed: Placed, grid: Grid, text: str = "") -> BlockData:
    """Evaluate the mixed blocks, and join everything to the block mask of the grid's tokens."""
    tiles = Tiles(grid)
    decided = np.where(placed.runs.codes == rl.FULL, FULL, EMPTY).astype(np.int32)
    starts, codes = settle(placed, grid, decided, lambda x: _evaluate(placed, grid, x, tiles))
    return BlockData.of(grid, starts, codes, tiles.bits, text)


def settle(
    placed: Placed, grid: Grid, decided: NDArray, look: Callable[[Ints], NDArray]
) -> tuple[Ints, NDArray]:
    """(starts, codes) of runs: decided[i] where run i is, and look(x) for the MIXED blocks x.

    `look` gets one block of each kind, ascending, in chunks.
    """
    known = placed.runs.codes != rl.MIXED
    all_starts, all_codes = [placed.runs.starts[known]], [decided[known]]
    for x in _mixed_blocks(placed.runs, grid):
        _, row, col = grid.split(x)
        first, group = _groups([grid.cut(row, col), *placed.signature(x)])
        codes = look(x[first])[group]
        begins = np.append(True, (np.diff(x) != 1) | (codes[1:] != codes[:-1]))
        all_starts.append(x[begins])
        all_codes.append(codes[begins])
    if len(all_starts) == 1:
        return all_starts[0], all_codes[0]
    starts, codes = np.concatenate(all_starts), np.concatenate(all_codes)
    order = np.argsort(starts, kind="stable")
    return rl.compact(starts[order], codes[order], grid.size)


def _mixed_blocks(runs: rl.Runs, grid: Grid) -> Iterator[Ints]:
    """Positions of the MIXED blocks, ascending, in chunks."""
    lengths = np.diff(runs.starts, append=grid.size)
    mixed = runs.codes == rl.MIXED
    starts, lengths = runs.starts[mixed], lengths[mixed]
    stops = np.cumsum(lengths)  # counts mixed blocks
    total = int(stops[-1]) if len(stops) else 0
    for begin in range(0, total, BLOCKS_AT_ONCE):
        rank = np.arange(begin, min(begin + BLOCKS_AT_ONCE, total))
        run = np.searchsorted(stops, rank, "right")
        yield starts[run] + rank - (stops[run] - lengths[run])


def _evaluate(placed: Placed, grid: Grid, x: Ints, tiles: Tiles) -> NDArray[np.int32]:
    """(T,) tile codes of the blocks at `x`; new tiles go to `tiles` in the order of x."""
    codes = np.empty(len(x), np.int32)
    for part in tiles.parts(len(x)):
        s, row, col = grid.split(x[part])
        # A token beyond the ends is taken for the last one; `tiles` drops it.
        q = grid.q_token(row)[:, None, None] + np.arange(grid.block_q)[:, None]
        k = grid.k_token(col)[:, None, None] + np.arange(grid.block_k)
        q, k = np.clip(q, 0, grid.n_q - 1), np.clip(k, 0, grid.n_k - 1)
        allowed = placed.allowed(s[:, None, None], q, k)
        shape = (len(row), grid.block_q, grid.block_k)
        codes[part] = tiles.codes(pack_bits(np.broadcast_to(allowed, shape)), grid.cut(row, col))
    return codes


def _groups(columns: list[Ints]) -> tuple[Ints, Ints]:
    """(first, group): the first members of the groups of equal rows, ascending, and all numbers."""
    order = np.lexsort(columns)  # stable, so each group starts with its first member
    begins = np.zeros(len(order), bool)
    begins[0] = True
    for column in columns:
        column = column[order]
        begins[1:] |= column[1:] != column[:-1]
    first = order[begins]
    rank = np.argsort(np.argsort(first))
    group = np.empty(len(order), np.int64)
    group[order] = rank[np.cumsum(begins) - 1]
    return np.sort(first), group


class Cache:
    """The most recently used block masks, bounded by count and by bytes; safe among threads."""

    def __init__(self, max_items: int, max_bytes: int):
        self.max_items, self.max_bytes = max_items, max_bytes
        self.items: OrderedDict[Any, BlockMask] = OrderedDict()
        self.lock = threading.Lock()

    def get(self, key: Any) -> BlockMask | None:
        with self.lock:
            if key in self.items:
                self.items.move_to_end(key)
            return self.items.get(key)

    def put(self, key: Any, blocks: BlockMask) -> None:
        with self.lock:
            self.items[key] = blocks
            while len(self.items) > self.max_items or self._bytes() > self.max_bytes:
                self.items.popitem(last=False)

    def clear(self) -> None:
        with self.lock:
            self.items.clear()

    def _bytes(self) -> int:
        return sum(blocks.nbytes for blocks in self.items.values())


cache = Cache(max_items=32, max_bytes=256 << 20)


@by_text
def clear() -> None:
    """Forget every block mask."""
    cache.clear()
