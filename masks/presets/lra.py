"""The attention patterns of Long Range Arena's models (google-research/long-range-arena).

Long Range Arena (Tay et al., arXiv 2011.04006) names its patterns after papers, but its code
differs from them. These are the patterns of the code, without padding.
"""

from typing import Any

import numpy as np

from masks.algebra import Mask
from masks.checks import FAR, flag, integer
from masks.leaves.leaf import ByLength
from masks.patterns.bands import local
from masks.patterns.bigbird_compat import FOCUS, LegacyBigBird, paper_plan
from masks.patterns.columns import global_tokens
from masks.patterns.distances import Dilated
from masks.patterns.segments import block_diagonal
from masks.patterns.sparse_transformer import strided
from masks.predicate.where import Rule
from masks.registry import Example, pattern
from masks.runs import Grid, Ints

__all__ = ["lra_bigbird", "lra_fixed", "lra_local", "lra_longformer", "lra_strided"]
SECTION = "Presets"  # of the gallery


@pattern(
    Example("lra_local(50)", "Long Range Arena's local attention", "5*50**2 + 6**2", "2011.04006"),
    written=1,
)
def lra_local(block: int = 50, *, interleaved: bool = False) -> Mask:
    """Return the benchmark's "local attention": token blocks that see themselves only, not a
    window.

    The result is `block_diagonal(block)`: n * block of n x n pairs are allowed for a multiple n of
    the block. The code itself runs `interleaved`. It reshapes the tokens to (block, chunks) and
    attends along the first axis, so a token sees those a multiple of n // block + 1 tokens away.

    Args:
        block: tokens of a block, >= 1.
        interleaved: q and k leave the same remainder modulo n // block + 1; n is the longer of n_q
            and n_k.
    """
    block = integer("block", block, min=1)
    if not flag("interleaved", interleaved):
        return block_diagonal(block)
    return Interleaved(block)


@pattern(Example("lra_fixed(50, 10)", "its Sparse Transformer", "", "2011.04006"), written=2)
def lra_fixed(stride: int = 50, summary: int = 10) -> Mask:
    """`fixed(stride, summary)`, where the first key of every chunk is a summary too.

    So k <= q, and k // stride == q // stride or k % stride == 0 or k % stride >= stride - summary.
    Encoders are causal as well. With n = 1000 tokens, .1300 of the pairs are allowed.

    Args:
        stride, summary: as in `fixed`; all of the benchmark's tasks have the defaults.
    """
    stride = integer("stride", stride, min=1)
    return FixedLRA(stride, integer("summary", summary, min=0, max=stride))


@pattern(Example("lra_strided(16)", "`strided`, which no task uses", "", "2011.04006"))
def lra_strided(stride: int = 50) -> Mask:
    """Return the same as `strided(stride)`; encoders are causal as well. No task uses it."""
    return strided(stride)


@pattern(Example("lra_longformer(48)", "its Longformer", "", "2011.04006"))
def lra_longformer(window: int = 512, n_global: int = 0) -> Mask:
    """Exactly `window` keys: one more after the query than before it if `window` is even.

    The result is the union of a window and global tokens. The paper's window has window // 2 keys
    on either side. The docstring of the code names the sides the other way round.

    Args:
        window: keys of an inner query, >= 1.
        n_global: tokens at the beginning that see all and are seen by all, >= 0.
    """
    window = integer("window", window, min=1)
    mask = local(window - window // 2 - 1, window // 2)
    return mask | global_tokens(n_global) if integer("n_global", n_global, min=0) else mask


@pattern(Example("lra_bigbird(16)", "its BigBird", "", "2011.04006"), written=2)
def lra_bigbird(block: int = 64, random: int = 3, *, seed: int | None = 0) -> Mask:
    """BigBird with the paper's plan, drawn for the length; `bigbird_compat` draws otherwise.

    The quirks of the code are kept. The sequence is padded to n // block + 1 blocks: by a whole
    block where it is divisible, so the last global column may hold no token. Random blocks are
    among the first 1024 tokens. The last two rows draw from 4 and 3 blocks less. Where a row has
    fewer than `random` candidates, the code fails, and the mask here is dense. With causal=True the
    code is plain causal.

    Args:
        block: tokens of a token block, >= 1.
        random: random blocks of a row, >= 1.
        seed: of NumPy's legacy generator, from which all heads draw, 0 <= seed < 2**32. The code
            hashes the name of the layer instead, which differs from run to run. None makes layer i
            draw with seed i: take `mask.layer(i)` before `build`.
    """
    return BigBirdLRA.of(block, random, seed)


class Interleaved(ByLength):
    block: int

    def at(self, grid: Grid) -> Dilated:
        return Dilated("top_left", FAR, max(grid.n_q, grid.n_k) // self.block + 1)


class FixedLRA(Rule):
    stride: int
    summary: int

    def rule(self, h: Any, q: Any, k: Any) -> Any:
        phase = k % self.stride
        summary = (phase == 0) | (phase >= self.stride - self.summary)
        return (k <= q) & (summary | (k // self.stride == q // self.stride))


class BigBirdLRA(LegacyBigBird):
    def blocks(self, n_tokens: int) -> int:
        return n_tokens // self.block + 1

    def drawn(self, n: int, heads: int) -> list[Ints]:
        generator = np.random.RandomState(self.seed)
        focus = min(n * self.block, FOCUS)
        plans = [
            paper_plan(generator, n, self.block, self.random, focus=focus, cuts=(4, 3))
            for _ in range(heads)
        ]
        return plans if n > 2 and all(len(rows) == n - 2 for rows in plans) else []
