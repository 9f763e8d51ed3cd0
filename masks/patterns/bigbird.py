"""BigBird: global, window and random token blocks (Zaheer et al., arXiv 2007.14062)."""

from dataclasses import dataclass

import numpy as np

from masks.algebra import Mask
from masks.checks import integer
from masks.patterns.draws import Drawn, Stream, choose
from masks.patterns.graphs import union
from masks.runs import Ints
from masks.spec import call_text, pattern


@pattern()
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

    With window 3 and one global block, n >= 5 + random gives 2n + 2(4 + r) + (n - 4)(5 + r) of
    n x n blocks for r random ones. The external construction (ETC), with global tokens of its own
    in front, is `bigbird(global_blocks=0) | global_tokens(n)`. The draw is this package's hash;
    `bigbird_compat` repeats that of Google's code.

    Args:
        block: tokens of a token block, >= 1.
        random: random blocks of a row, >= 0.
        window: width of the window in blocks, odd; the row itself is its middle.
        global_blocks: global blocks at either end, >= 0.
        seed, per_head, per_layer, layer: as in `random_blocks`.
    """
    block, random = integer("block", block, least=1), integer("random", random, least=0)
    window = integer("window", window, least=1)
    if window % 2 == 0:
        raise ValueError(f"window is {window}: give an odd number of blocks")
    global_blocks = integer("global_blocks", global_blocks, least=0)
    stream = Stream.of(seed, per_head, per_layer, layer)
    key = call_text(
        "bigbird",
        block,
        random,
        window=(window, 3),
        global_blocks=(global_blocks, 1),
        **stream.options(per_head=True),
    )
    return BigBird(key, block, stream, random, window // 2, global_blocks)


@dataclass(frozen=True, repr=False, eq=False)
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
