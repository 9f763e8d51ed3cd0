"""Windows with global or random tokens: BigBird, Longformer and ETC."""

import numpy as np

from masks.algebra import Mask
from masks.checks import integer
from masks.leaves.draws import Drawn, Stream, choose, union
from masks.patterns.bands import dilated, local
from masks.patterns.columns import global_at, global_tokens
from masks.registry import BLOCKS, pattern
from masks.runs import Ints

__all__ = ["bigbird", "etc_", "longformer"]
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
    `bigbird(global_blocks=0) | global_tokens(n)`. The draw is this package's hash, not
    that of Google's code.

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
