"""Random token blocks, and hubs whose degrees follow a power law."""

import sys
from typing import Any

import numpy as np

from masks.algebra import Mask
from masks.checks import flag, integer
from masks.leaves.draws import Drawn, Stream, choose, permutation
from masks.leaves.graphs import Graph
from masks.registry import canonical, pattern
from masks.runs import Ints

__all__ = ["hubs", "random_blocks"]
SECTION = "Graphs of token blocks"  # of the gallery


@pattern(
    "random_blocks(0.25, block=16)",
    "as many random blocks in every row",
    "n*4*B**2",
    "2007.14062",
    short="random",
    written=1,
)
def random_blocks(
    density: float | None = None,
    *,
    count: int | None = None,
    block: int = 128,
    causal: bool = False,
    seed: int = 0,
    per_head: bool = False,
    per_layer: bool = False,
    layer: int | None = None,
) -> Mask:
    """Return a uniformly drawn set of distinct key token blocks for every query token block.

    The draw is a hash of (seed, layer, head, row), free of global state: the same on every
    platform, and in every process of a distributed run. With n key token blocks every row has
    `count`, or max(1, round(density * n)) of them.

    Args:
        density: share of the key token blocks, in (0, 1]; at least one block is drawn.
        count: their number instead; `build` raises when the length holds fewer.
        block: tokens of a token block, >= 1.
        causal: row I draws from the I + 1 columns up to its own instead, their share or the count
            (all of them, where they are fewer), so that a longer sequence changes no draw. Token
            blocks on the diagonal stay whole: compose with `& causal()`.
        seed: 0 <= seed < 2**64.
        per_head: draw for every head; `build` then needs `heads=`.
        per_layer: draw for every layer; take `mask.layer(i)` before `build`.
        layer: the layer, where `per_layer`; `mask.layer(i)` gives it.
    """
    if (density is None) == (count is None):
        raise ValueError(f"density is {density} and count is {count}: give one of them")
    if density is not None:
        density = _positive("density", density, 1, "in (0, 1]")
    count = None if count is None else integer("count", count, min=1)
    block, causal = integer("block", block, min=1), flag("causal", causal)
    stream = Stream.of(seed, per_head, per_layer, layer)
    return canonical(RandomBlocks(block, stream, density, count, causal), density=density)


class RandomBlocks(Drawn):
    density: float | None
    count: int | None
    causal: bool

    def pairs(self, head: int, rows: Ints, n_cols: int) -> tuple[Ints, Ints]:
        n = rows + 1 if self.causal else np.full(len(rows), n_cols)
        if self.count is None:
            count = np.maximum(1, np.rint((self.density or 0) * n).astype(np.int64))
        elif self.causal:
            count = np.minimum(self.count, n)
        elif self.count <= n_cols:
            count = np.full(len(rows), self.count)
        else:
            raise ValueError(
                f"{self} draws {self.count} key blocks of {self.block} tokens, but there are "
                f"{n_cols}: give a smaller count or block, or a density"
            )
        i, col = choose(self.source.keys(head, rows), count, n)
        if self.causal and n_cols <= rows[-1]:
            i, col = i[col < n_cols], col[col < n_cols]
        return i, col


@pattern("hubs(block=16)", "a few blocks see much, most see little", written=1)
def hubs(
    count: int | None = None,
    *,
    alpha: float = 1.0,
    block: int = 128,
    seed: int = 0,
    per_head: bool = False,
    per_layer: bool = False,
    layer: int | None = None,
) -> Mask:
    """Token blocks that see, and are seen by, a share of the others that falls with their rank.

    The pattern is this package's own. The n key token blocks are ranked 1, 2, .. in an order drawn
    at random. The hub of rank r, up to `count`, draws c = max(1, round(n * r**-alpha)) of the n
    token blocks, uniformly and without repetition, and sees them and is seen by them (Zipf's law;
    the first hub is global). Every block sees itself. Expected of n x n are, with sums over the
    hubs and over pairs r < s of them,

        n + 2 (n - 1) / n * sum c_r - 2 / n**2 * sum c_r c_s.

    Where n_q > n_k, query token block I is block I mod n.

    Args:
        count: hubs, >= 1; None ranks all token blocks.
        alpha: how fast the degree falls, > 0.
        block: tokens of a token block, >= 1.
        seed, per_head, per_layer, layer: as in `random_blocks`.
    """
    count = None if count is None else integer("count", count, min=1)
    alpha = _positive("alpha", alpha, sys.float_info.max, "> 0")
    block = integer("block", block, min=1)
    stream = Stream.of(seed, per_head, per_layer, layer)
    return canonical(Hubs(block, stream, count, alpha), alpha=alpha)


def _positive(name: str, value: Any, most: float, where: str) -> float:
    is_number = isinstance(value, int | float | np.floating) and not isinstance(value, bool)
    if not is_number or not 0 < value <= most:
        raise ValueError(f"{name} is {value!r}: give a number {where}")
    return float(value)


class Hubs(Graph):
    count: int | None
    alpha: float

    def edges(self, head: int, n: int) -> tuple[Ints, Ints]:
        hub = permutation(self.source.word(head), n)[: self.count]
        share = n * np.arange(1, len(hub) + 1, dtype=float) ** -self.alpha
        degree = np.maximum(1, np.rint(share)).astype(np.int64)
        rank, other = choose(self.source.keys(head, hub), degree, np.full(len(hub), n))
        return hub[rank], other
