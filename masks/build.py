"""From an expression to the exact `BlockMask` of one length, without an N x N array.

Of a mask whose rows repeat (`masks.looks`) a few rows are evaluated, and the others copied.

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
from masks.block_mask import BlockMask
from masks.checks import block_sizes, integer
from masks.leaves.geometry import row_numbers
from masks.looks import Copies
from masks.registry import by_text
from masks.runs import Grid, Ints
from masks.tiles import EMPTY, FULL, Tiles, pack_bits
from masks.types import Changes, Mask, Placed

BLOCKS_AT_ONCE = 1 << 16  # bounds the memory for signatures
RUNS_AT_ONCE = 1 << 17  # arrays that stay in cache, where larger ones pay for new pages
DECIDED = np.array([EMPTY, EMPTY, FULL], np.int32)  # by code


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
        blocks = resolve(mask, grid)
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


def resolve(mask: Mask, grid: Grid) -> BlockMask:
    """Evaluate the mixed blocks, and join everything to the block mask of the grid's tokens."""
    tiles = Tiles(grid)

    def look(window: Grid) -> tuple[Ints, NDArray[np.int32]]:
        placed = mask.place(window)
        return settle(placed, window, DECIDED, lambda x: _evaluate(placed, window, x, tiles))

    repeats = mask.repeats(grid)
    copies = Copies(grid, repeats) if repeats else None
    starts, codes = copies.runs(look) if copies and copies.worthwhile else look(grid)
    return BlockMask.of(grid, starts, codes, tiles.bits, mask.key)


def settle(
    placed: Placed, grid: Grid, decided: NDArray, look: Callable[[Ints], NDArray]
) -> tuple[Ints, NDArray]:
    """Return (starts, codes) of runs: decided[code] where that is not MIXED, and look(x) for the
    MIXED blocks x.

    `look` gets one block of each kind, ascending, in chunks.
    """
    found, seen, looked = [], np.zeros(0, np.int64), np.zeros(0, decided.dtype)
    for x, known in _portions(placed.runs, grid):
        codes = decided[known]
        if len(at := np.flatnonzero(known == rl.MIXED)):
            blocks = np.append(seen, x[at])
            _, row, col = grid.split(blocks)
            first, group = _groups([grid.cut(row, col), *placed.signature(blocks)])
            looked = np.append(looked, look(blocks[first[len(seen) :]]))
            codes[at] = looked[group[len(seen) :]]
            few = len(first) if 4 * len(first) < len(at) else 0
            seen, looked = blocks[first[:few]], looked[:few]
        found.append(rl.joined(x, codes))
    return rl.concatenated(found)


def _portions(runs: rl.Runs, grid: Grid) -> Iterator[tuple[Ints, rl.Codes]]:
    """Yield (x, code) of all MIXED blocks and the first of each other run, BLOCKS_AT_ONCE each."""
    for at in range(0, len(runs.starts), RUNS_AT_ONCE):
        codes, starts = runs.codes[at : at + RUNS_AT_ONCE], runs.starts[at : at + RUNS_AT_ONCE + 1]
        starts = starts if len(starts) > len(codes) else np.append(starts, grid.size)
        stops = np.append(0, np.cumsum(np.where(codes == rl.MIXED, np.diff(starts), 1)))
        for begin in range(0, int(stops[-1]), BLOCKS_AT_ONCE):
            ends = np.clip(stops, begin, begin + BLOCKS_AT_ONCE)
            count = np.diff(ends)
            yield rl.ranges((starts + ends - stops)[:-1], count), np.repeat(codes, count)


def _evaluate(placed: Placed, grid: Grid, x: Ints, tiles: Tiles) -> NDArray[np.int32]:
    """(T,) tile codes of the blocks at `x`; new tiles go to `tiles` in the order of x."""
    codes = np.empty(len(x), np.int32)
    few = None not in placed.changes
    for part in tiles.parts(len(x), few * 16 * (grid.block_q + grid.block_k)):
        s, row, col = grid.split(x[part])
        # A token beyond the ends is taken for the last one; `tiles` drops it.
        q = grid.q_token(row)[:, None, None] + np.arange(grid.block_q)[:, None]
        k = grid.k_token(col)[:, None, None] + np.arange(grid.block_k)
        q, k = np.clip(q, 0, grid.n_q - 1), np.clip(k, 0, grid.n_k - 1)
        rows, seen = _stretches(placed.changes[0], s, q)
        cols, keys = _stretches(placed.changes[1], s, k.swapaxes(1, 2))
        allowed = placed.allowed(s[:, None, None], seen, keys.swapaxes(1, 2))
        allowed = np.broadcast_to(allowed, (len(s), seen.shape[1], keys.shape[1]))
        bits = pack_bits(_spread(allowed, cols, 2))
        codes[part] = tiles.codes(_spread(bits, rows, 1), grid.cut(row, col))
    return codes


def _stretches(changes: Changes | None, s: Ints, token: Ints) -> tuple[Ints | None, Ints]:
    """(which, seen): token[t, i] is like seen[t, which[t, i]]; all are their own like if None.

    Args:
        s, token: (T,) and (T, n, 1).
    """
    if changes is None:
        return None, token
    new = changes(s[:, None], token[:, :, 0])
    new[:, 0] = False
    which = np.cumsum(new, axis=1, dtype=np.int64)
    count = int(which[:, -1].max()) + 1
    if 2 * count > token.shape[1]:
        return None, token
    seen = np.repeat(token[:, :1], count, axis=1)
    line, place = np.nonzero(new)
    seen[line, which[line, place]] = token[line, place]  # the first of each stretch
    return which, seen


def _spread(values: NDArray, which: Ints | None, axis: int) -> NDArray:
    """values[t, which[t, i]], or values[t, :, which[t, i]] for axis 2; all of them if None."""
    if which is None:
        return values
    count, rows, cols = values.shape
    if axis == 1:
        line = which + np.arange(count)[:, None] * rows
        return values.reshape(-1, cols).take(line, axis=0)
    line = np.arange(count * rows).reshape(count, rows, 1) * cols
    return np.ascontiguousarray(values).ravel().take(line + which[:, None])


def _groups(columns: list[Ints]) -> tuple[Ints, Ints]:
    """(first, group): the first members of the groups of equal rows, ascending, and all numbers."""
    number = _joined(columns)
    if number is None:
        number = row_numbers(np.stack(columns, axis=1))
    count = len(number)
    seen = np.full(int(number.max()) + 1, count)
    seen[number[::-1]] = np.arange(count - 1, -1, -1)  # the first place of each number
    first = np.sort(seen[seen < count])
    rank = np.empty(count, np.int64)
    rank[first] = np.arange(len(first))
    return first, rank[seen[number]]


def _joined(columns: list[Ints]) -> Ints | None:
    """One number >= 0 for the columns, equal for equal rows; None where it may be large."""
    number, extent = np.zeros_like(columns[0]), 1
    for column in columns:
        low, high = int(column.min()), int(column.max())
        extent *= high - low + 1
        if extent > 4 * BLOCKS_AT_ONCE:
            return None
        number = number * (high - low + 1) + (column - low)
    return number


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
