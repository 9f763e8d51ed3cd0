"""Windows with global or random tokens: BigBird, also as Google draws it, Longformer and ETC."""

from collections.abc import Callable
from functools import lru_cache

import numpy as np

from masks.algebra import Mask
from masks.checks import integer
from masks.leaves.draws import Drawn, Stream, choose, union
from masks.leaves.leaf import ByLength
from masks.leaves.token_blocks import TokenBlocks
from masks.patterns.bands import dilated, local
from masks.patterns.columns import global_at, global_tokens
from masks.registry import BLOCKS, pattern
from masks.runs import Grid, Ints

__all__ = ["bigbird", "bigbird_compat", "etc_", "longformer"]
SECTION = "Graphs of token blocks"  # of the gallery


@pattern(
    "bigbird(16)",
    "window, global and random blocks",
    "(2*n + 2*(4 + r) + (n - 4)*(5 + r))*B**2",
    "2007.14062",
    BLOCKS | {"r": 3},
    written=2,
)
def bigbird(
    block: int = 64,
    random: int = 3,
    *,
    window: int = 3,
    global_blocks: int = 1,
    seed: int = 0,
    per_head: bool = True,
    per_layer: bool = False,
    layer: int | None = None,
) -> Mask:
    """BigBird's internal construction (ITC): its global tokens are part of the sequence.

    Of n token blocks, the first and the last `global_blocks` see all and are seen by all. The rows
    between also see a window around themselves, and `random` other blocks, drawn uniformly for
    every row and head. Rows that have fewer blocks left take all of them, so a short sequence is
    dense. n counts the keys; where n_q != n_k, a query is global by its number.

    The external construction (ETC), with global tokens of its own in front, is
    `bigbird(global_blocks=0) | global_tokens(n)`. The draw is this package's hash;
    `bigbird_compat` repeats that of Google's code.

    Args:
        block: tokens of a token block, >= 1.
        random: random blocks of a row, >= 0.
        window: width of the window in blocks, odd; the row itself is its middle.
        global_blocks: global blocks at either end, >= 0.
        seed, per_head, per_layer, layer: as in `random_blocks`.
    """
    block, random = integer("block", block, min=1), integer("random", random, min=0)
    window = integer("window", window, min=1)
    if window % 2 == 0:
        raise ValueError(f"window is {window}: give an odd number of blocks")
    global_blocks = integer("global_blocks", global_blocks, min=0)
    stream = Stream.of(seed, per_head, per_layer, layer)
    return BigBird(block, stream, random, window // 2, global_blocks)


class BigBird(Drawn):
    random: int
    radius: int
    global_blocks: int

    def pairs(self, head: int, rows: Ints, n_cols: int) -> tuple[Ints, Ints]:
        low, high = self.global_blocks, max(n_cols - self.global_blocks, self.global_blocks)
        is_global = (rows < low) | (rows >= high) & (rows < n_cols)
        i, whole = np.flatnonzero(~is_global), np.flatnonzero(is_global)
        # Random blocks come from [low, left) and [right, high), on the sides of the window.
        left = np.clip(rows[i] - self.radius, low, high)
        right = np.clip(rows[i] + self.radius + 1, low, high)
        free = left - low + high - right
        row, rank = choose(self.source.keys(head, rows[i]), np.minimum(self.random, free), free)
        gap = np.where(rank < (left - low)[row], 0, (right - left)[row])
        drawn = low + rank + gap
        zero, every = np.array(0), np.arange(len(rows))
        return union(
            [
                (every, zero, np.array(low)),
                (every, np.array(high), np.array(n_cols)),
                (whole, zero, np.array(n_cols)),
                (i, rows[i] - self.radius, rows[i] + self.radius + 1),
                (i[row], drawn, drawn + 1),
            ],
            n_cols,
        )


@pattern(
    "longformer(48)",
    "a window and global tokens",
    "N*(2*w + 1) - w*(w + 1) + 2*(N - 1 - w)",
    "2004.05150",
    {"w": 24},
)
def longformer(window: int, dilation: int = 1, global_tokens: tuple[int, ...] = (0,)) -> Mask:
    """Return a window of window // 2 keys to either side, and global tokens.

    The window of Beltagy et al. (arXiv 2004.05150) counts keys: with the query itself an inner row
    has window // 2 * 2 + 1 of them, every `dilation`-th token. Dilation differs from head to head
    in the upper layers there: `heads(longformer(w), longformer(w, 2))`. Its text is that of the
    union, such as `local(256) | global_at((0,))`.

    Args:
        window: keys, >= 1.
        dilation: >= 1; the window then reaches window // 2 * dilation tokens.
        global_tokens: tuple of token numbers; () gives the window alone.
    """
    radius = integer("window", window, min=1) // 2
    dilation = integer("dilation", dilation, min=1)
    inner = local(radius) if dilation == 1 else dilated(radius * dilation, dilation)
    return inner if global_tokens == () else inner | global_at(global_tokens)


@pattern("etc_(8, 24)", "global tokens in front of a long input", "", "2004.08483", short="etc")
def etc_(n: int, radius: int) -> Mask:
    """`n` global tokens in front of a long input, whose tokens see `radius` others to either side.

    Extended Transformer Construction (Ainslie et al., arXiv 2004.08483) with both inputs in one
    sequence: global-to-global, global-to-long and long-to-global attention are dense, long-to-long
    is local. The text is that of `global_tokens(n) | local(radius)`.

    Args:
        n: global tokens, >= 0.
        radius: tokens, >= 0.
    """
    return global_tokens(n) | local(integer("radius", radius, min=0))


LONGEST = 4096  # tokens for which the paper's plan is drawn, and then cut
FOCUS = 1024  # tokens among which it draws


@pattern(
    "bigbird_compat(16)", "`bigbird`, drawn as Google's code does", "", "2007.14062", written=2
)
def bigbird_compat(block: int = 64, random: int = 3, *, seed: int | None = 0) -> Mask:
    """Return the mask of Google's BigBird, random blocks included.

    As `bigbird`, with the random blocks of NumPy's legacy generator, which is private here and
    global there. The heads draw from one stream, so `build` needs `heads=`, and beyond 4096 tokens
    the blocks of a head depend on it. Quirks that are kept: with 1024, 2048, 3072 or 4096 tokens
    the plan of the paper is drawn for 4096 and cut, takes random blocks from the first 1024 tokens
    only, and may repeat a block of the window; any other length takes them from its first
    2 * random + 5 blocks.

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
                    "fewer left: give a smaller random or block"
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
    def drawn(n: int, heads: int) -> list[Ints]:
        return draw(np.random.RandomState(seed), n, heads)

    def make(grid: Grid) -> Table:
        n = count(max(grid.n_q, grid.n_k))
        return Table(block, n, drawn(n, grid.heads))

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
    """Window, global blocks, and random ones that are listed head by head."""

    n: int
    random: list[Ints]

    def pairs(self, head: int, rows: Ints, n_cols: int) -> tuple[Ints, Ints]:
        every, zero, end = np.arange(len(rows)), np.array(0), np.array(self.n)
        if not self.random:
            return union([(every, zero, end)], n_cols)
        inner = (0 < rows) & (rows < self.n - 1)
        whole, i = np.flatnonzero(~inner), np.flatnonzero(inner)
        random = self.random[head][rows[i] - 1]
        i, random = np.repeat(i, random.shape[1]), random.ravel()
        spans = [
            (every, zero, zero + 1),
            (every, end - 1, end),
            (whole, zero, end),
            (every, rows - 1, rows + 2),
            (i, random, random + 1),
        ]
        return union(spans, n_cols)
