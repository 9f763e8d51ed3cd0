"""BigBird as Google's code draws it (google-research/bigbird, `bigbird/core/attention.py`)."""

from collections.abc import Callable
from functools import lru_cache

import numpy as np

from masks.algebra import Mask
from masks.checks import integer
from masks.leaves.graphs import Adjacency, union
from masks.leaves.leaf import ByLength
from masks.leaves.token_blocks import TokenBlocks
from masks.registry import pattern
from masks.runs import Grid, Ints

__all__ = ["bigbird_compat"]
SECTION = "Graphs of token blocks"  # of the gallery

LONGEST = 4096  # tokens for which the paper's plan is drawn, and then cut
FOCUS = 1024  # tokens among which it draws


@pattern(
    "bigbird_compat(16)", "`bigbird`, drawn as Google's code does", "", "2007.14062", written=2
)
def bigbird_compat(block: int = 64, random: int = 3, *, seed: int | None = 0) -> Mask:
    """Return the block mask of Google's BigBird, random blocks included: rows and heads of one
    stream.

    As `bigbird`, with the random blocks of NumPy's legacy generator, which is private here and
    global there. The heads draw from one stream, so `build` needs `heads=`, and beyond 4096 tokens
    the blocks of a head depend on it. Quirks that are kept: with 1024, 2048, 3072 or 4096 tokens
    the plan of the paper is drawn for 4096 and cut, takes random blocks from the first 1024 tokens
    only, and may repeat a block of the window; any other length takes them from its first
    2 * random + 5 blocks. Beyond 4096 tokens, 2n + 2(4 + r) + (n - 4)(5 + r) of n x n token blocks
    are allowed.

    A length that the block does not divide counts as the next one that it does, and where
    n_q != n_k the longer one counts and the mask is cropped. Up to 2 * random + 5 blocks it is
    dense, as in Hugging Face's port.

    Args:
        block: tokens of a token block, >= 1.
        random: random blocks of a row, >= 1.
        seed: of the stream, 0 <= seed < 2**32, which is the number of the layer there. None makes
            it so: take `mask.layer(i)` before `build`.

    Raises:
        ValueError: of `build`, when a row of the paper's plan has fewer than `random` blocks.
    """
    block, random = integer("block", block, min=1), integer("random", random, min=1)

    def draw(generator: np.random.RandomState, n: int, heads: int) -> list[Ints]:
        if n <= 2 * random + 5:
            return []
        if n * block in range(1024, LONGEST + 1, 1024):
            longest = LONGEST // block
            plans = [paper_plan(generator, longest, block, random) for _ in range(heads)]
            if any(len(rows) < longest - 2 for rows in plans):
                raise ValueError(
                    f"bigbird_compat draws {random} of the blocks in {FOCUS} tokens, and a row has "
                    f"fewer left: give a random smaller than {random} or a block below {block}"
                )
            return [rows[: n - 2] for rows in plans]
        blocks = np.empty((heads, n, random), np.int64)
        for row in range(1, n):  # the last one is not used, and moves nothing after it
            for head in range(heads):
                blocks[head, row] = _row(generator, row, random)
        return list(blocks[:, 1 : n - 1])

    return legacy_bigbird(block, seed, lambda n_tokens: -(-n_tokens // block), draw)


def _row(generator: np.random.RandomState, row: int, random: int) -> Ints:
    """Return random blocks of a row: the first of a shuffle outside window and global blocks."""
    n = 2 * random + 5
    taken = {row - 1, row, row + 1, 0, n - 1, {1: n - 2, n - 2: 1}.get(row, 0)}
    legal = [col for col in generator.permutation(n).tolist() if col not in taken]
    return np.array(legal[:random])


def legacy_bigbird(
    block: int,
    seed: int | None,
    count: Callable[[int], int],
    draw: Callable[[np.random.RandomState, int, int], list[Ints]],
) -> Mask:
    """Return a mask that differs from head to head as the draws of NumPy's legacy generator do.

    Args:
        count: tokens -> token blocks of a sequence.
        draw: (generator, n, heads) -> (n - 2, random) random blocks of the rows 1..n-2 of n token
            blocks for every head; an empty list makes the mask dense.
    """
    seed = None if seed is None else integer("seed", seed, min=0, max=(1 << 32) - 1)

    @lru_cache(maxsize=4)
    def tables(n: int, heads: int) -> list[Adjacency]:
        return _tables(draw(np.random.RandomState(seed), n, heads), n, heads)

    def make(grid: Grid) -> Table:
        return Table(block, tables(count(max(grid.n_q, grid.n_k)), grid.heads))

    return Legacy(make, period=0, seed=seed)


class Legacy(ByLength):
    seed: int | None = None

    @property
    def per_layer(self) -> bool:  # type: ignore[override]
        return self.seed is None

    def _layer(self, index: int) -> Mask:
        return self.again(seed=index)


def paper_plan(
    generator: np.random.RandomState,
    n: int,
    block: int,
    random: int,
    *,
    focus: int = FOCUS,
    cuts: tuple[int, int] = (0, 0),
) -> Ints:
    """Random blocks of the rows 1..n-2 of n token blocks, up to the first row that has too few.

    Args:
        focus: tokens from whose blocks they are drawn.
        cuts: blocks that the last two of the rows have less.

    Returns:
        (n - 2, random), or fewer rows.
    """
    middle = np.arange(1, n - 1)
    last = (focus // block if focus > 2 * block else n) - 1
    rows = []
    for row in range(1, n - 1):
        if row <= 2:
            candidates = middle[row + 1 : last]
        elif row >= n - 3:
            candidates = middle[: last - cuts[row - (n - 3)]]
        elif row - 2 > last:
            candidates = middle[:last]
        else:
            candidates = np.concatenate([middle[: row - 2], middle[row + 1 : last]])
        if len(candidates) < random:
            break
        rows.append(generator.permutation(candidates)[:random])
    return np.array(rows, np.int64) if rows else np.empty((0, 0), np.int64)


class Table(TokenBlocks):
    """Token blocks that are listed head by head."""

    tables: list[Adjacency]

    def pairs(self, head: int, rows: Ints, n_cols: int) -> tuple[Ints, Ints]:
        i, col = self.tables[head].rows(rows)
        return i[col < n_cols], col[col < n_cols]


def _tables(drawn: list[Ints], n: int, heads: int) -> list[Adjacency]:
    """Return the draws of every head with the global blocks and the window."""
    every, zero, end = np.arange(n), np.array(0), np.array(n)
    if not drawn:
        return [Adjacency(np.arange(n + 1) * n, np.tile(every, n))] * heads
    tables = []
    for random in drawn:
        row = np.repeat(every[1:-1], random.shape[1])
        spans = [
            (every, zero, zero + 1),
            (every, end - 1, end),
            (every[[0, -1]], zero, end),
            (every, every - 1, every + 2),
            (row, random.ravel(), random.ravel() + 1),
        ]
        i, col = union(spans, n)
        tables.append(Adjacency(np.searchsorted(i, np.arange(n + 1)), col))
    return tables
