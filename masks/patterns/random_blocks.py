"""Random token blocks, drawn anew for every query token block, as in BigBird (arXiv 2007.14062)."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from masks.algebra import Mask
from masks.checks import flag, integer
from masks.patterns.token_blocks import TokenBlocks
from masks.runs import Ints
from masks.spec import call_text, pattern

DRAWS_AT_ONCE = 1 << 20
GOLDEN = np.uint64(0x9E3779B97F4A7C15)
HALF, LOW_HALF = np.uint64(32), np.uint64(0xFFFFFFFF)


@pattern("random")
def random_blocks(
    density: float | None = None,
    *,
    count: int | None = None,
    block: int = 128,
    seed: int = 0,
    per_head: bool = False,
) -> Mask:
    """A uniformly drawn set of distinct key token blocks for every query token block.

    The draw is a hash of (seed, head, row), free of global state: the same on every platform, and
    in every process of a distributed run.

    Args:
        density: share of the key token blocks, in (0, 1]; at least one block is drawn.
        count: their number instead; `build` raises when the length holds fewer.
        block: tokens of a token block, >= 1.
        seed: 0 <= seed < 2**64.
        per_head: draw for every head; `build` then needs `heads=`.
    """
    if (density is None) == (count is None):
        raise ValueError(f"density is {density} and count is {count}: give one of them")
    if density is not None:
        if isinstance(density, bool) or not isinstance(density, int | float | np.floating):
            raise ValueError(f"density is {density!r}: give a number in (0, 1]")
        density = float(density)
        if not 0 < density <= 1:
            raise ValueError(f"density is {density}: give a number in (0, 1]")
    count = None if count is None else integer("count", count, least=1)
    block = integer("block", block, least=1)
    seed = integer("seed", seed, least=0, most=(1 << 64) - 1)
    key = call_text(
        "random_blocks",
        *([] if density is None else [density]),
        count=(count, None),
        block=(block, 128),
        seed=(seed, 0),
        per_head=(flag("per_head", per_head), False),
    )
    return RandomBlocks(key, block, density, count, seed, per_head)


@dataclass(frozen=True, repr=False, eq=False)
class RandomBlocks(TokenBlocks):
    density: float | None
    count: int | None
    seed: int
    per_head: bool

    @property
    def period(self) -> int:
        return 0 if self.per_head else 1

    def pairs(self, head: int, rows: Ints, n_cols: int) -> tuple[Ints, Ints]:
        count = self.count or max(1, round((self.density or 0) * n_cols))
        if count > n_cols:
            raise ValueError(
                f"{self} draws {count} key blocks of {self.block} tokens, but there are {n_cols}: "
                "give a smaller count or block, or a density"
            )
        # Beyond one half it is the complement that is drawn.
        drawn = min(count, n_cols - count)
        seed = np.array([self.seed], np.uint64)
        keys = _mix(_mix(_mix(seed) ^ np.uint64(head)) ^ rows.astype(np.uint64))
        step = max(1, DRAWS_AT_ONCE // n_cols)
        parts = [_draw(keys[r : r + step], drawn, n_cols) for r in range(0, len(rows), step)]
        if drawn == count:
            col = np.concatenate(parts)
        else:
            kept = np.ones((len(rows), n_cols), bool)
            np.put_along_axis(kept, np.concatenate(parts), False, axis=1)
            col = np.nonzero(kept)[1].reshape(len(rows), count)
        return np.repeat(np.arange(len(rows)), count), col.ravel()


def _draw(keys: NDArray[np.uint64], count: int, n: int) -> Ints:
    """(R, count) ascending: the first `count` distinct values in the stream of each key.

    The values lie in 0..n-1. By symmetry every set is equally likely. `count` is at most n / 2.
    """
    result = np.empty((len(keys), count), np.int64)
    todo, length = np.arange(len(keys)), count + count // 2 + 8
    while count and len(todo):
        place = np.arange(length, dtype=np.uint64)
        value = (_mix(keys[todo, None] + place * GOLDEN) >> HALF) * np.uint64(n) >> HALF
        # Sorted by value, then by place in the stream: the first of equal values came first.
        drawn = np.sort(value << HALF | place, axis=1)
        value, place = drawn >> HALF, drawn & LOW_HALF
        new = np.ones(value.shape, bool)
        new[:, 1:] = value[:, 1:] != value[:, :-1]
        arrivals = np.where(new, place, np.uint64(length))
        last = np.partition(arrivals, count - 1, axis=1)[:, count - 1]  # the last that is needed
        done = last < length
        chosen = arrivals[done] <= last[done, None]
        result[todo[done]] = value[done][chosen].reshape(-1, count)
        todo, length = todo[~done], 2 * length
    return result


def _mix(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """The output function of SplitMix64 (Steele, Lea and Flood, 2014), after one step."""
    x = x + GOLDEN
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))
