"""The attention patterns of Long Range Arena's models (google-research/long-range-arena).

Long Range Arena (Tay et al., arXiv 2011.04006) names its patterns after papers, but its code
differs from them. These are the patterns of the code, without padding. Importing this module
registers them for `masks.parse`.
"""

from typing import Any

import numpy as np

import masks
from masks import Mask, pattern
from masks.checks import flag, integer
from masks.leaves.leaf import ByLength
from masks.patterns.bigbird import FOCUS, legacy_bigbird, paper_plan
from masks.predicate.where import Rule
from masks.runs import Ints

__all__ = ["lra_bigbird", "lra_fixed", "lra_local", "lra_longformer", "lra_strided"]
SECTION = "Presets"  # of the gallery


@pattern(
    "lra_local(50)", "Long Range Arena's local attention", "5*50**2 + 6**2", "2011.04006", written=1
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
        return masks.block_diagonal(block)

    def make(grid: Any) -> Rule:
        chunks = max(grid.n_q, grid.n_k) // block + 1
        return Rule(lambda q, k: (q - k) % chunks == 0)

    return ByLength(make)


@pattern("lra_fixed(50, 10)", "its Sparse Transformer", "", "2011.04006", written=2)
def lra_fixed(stride: int = 50, summary: int = 10) -> Mask:
    """`fixed(stride, summary)`, where the first key of every chunk is a summary too.

    So k <= q, and k // stride == q // stride or k % stride == 0 or k % stride >= stride - summary.
    Encoders are causal as well. With n = 1000 tokens, .1300 of the pairs are allowed.

    Args:
        stride, summary: as in `fixed`; all of the benchmark's tasks have the defaults.
    """
    stride = integer("stride", stride, min=1)
    summary = integer("summary", summary, min=0, max=stride)

    def rule(q: Any, k: Any) -> Any:
        phase = k % stride
        chosen = (phase == 0) | (phase >= stride - summary)
        return (k <= q) & (chosen | (k // stride == q // stride))

    return Rule(rule)


@pattern("lra_strided(16)", "`strided`, which no task uses", "", "2011.04006")
def lra_strided(stride: int = 50) -> Mask:
    """Return the same as `strided(stride)`; encoders are causal as well. No task uses it."""
    return masks.strided(stride)


@pattern("lra_longformer(48)", "its Longformer", "", "2011.04006")
def lra_longformer(window: int = 512, n_global: int = 0) -> Mask:
    """Exactly `window` keys: one more after the query than before it if `window` is even.

    The result is the union of a window and global tokens. The paper's window has window // 2 keys
    on either side. The docstring of the code names the sides the other way round.

    Args:
        window: keys of an inner query, >= 1.
        n_global: tokens at the beginning that see all and are seen by all, >= 0.
    """
    window = integer("window", window, min=1)
    mask = masks.local(window - window // 2 - 1, window // 2)
    return mask | masks.global_tokens(n_global) if integer("n_global", n_global, min=0) else mask


@pattern("lra_bigbird(16)", "its BigBird", "", "2011.04006", written=2)
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
    block, random = integer("block", block, min=1), integer("random", random, min=1)

    def draw(generator: np.random.RandomState, n: int, heads: int) -> list[Ints]:
        focus = min(n * block, FOCUS)
        plans = [
            paper_plan(generator, n, block, random, focus=focus, cuts=(4, 3)) for _ in range(heads)
        ]
        return plans if n > 2 and all(len(rows) == n - 2 for rows in plans) else []

    return legacy_bigbird(block, seed, lambda n_tokens: n_tokens // block + 1, draw)
