"""Random token blocks, drawn anew for every query token block, as in BigBird (arXiv 2007.14062)."""

from dataclasses import dataclass

import numpy as np

from masks.algebra import Mask
from masks.checks import flag, integer
from masks.patterns.draws import Drawn, Stream, choose
from masks.runs import Ints
from masks.spec import call_text, pattern


@pattern("random")
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
    """A uniformly drawn set of distinct key token blocks for every query token block.

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
        if isinstance(density, bool) or not isinstance(density, int | float | np.floating):
            raise ValueError(f"density is {density!r}: give a number in (0, 1]")
        density = float(density)
        if not 0 < density <= 1:
            raise ValueError(f"density is {density}: give a number in (0, 1]")
    count = None if count is None else integer("count", count, least=1)
    block, causal = integer("block", block, least=1), flag("causal", causal)
    stream = Stream.of(seed, per_head, per_layer, layer)
    key = call_text(
        "random_blocks",
        *([] if density is None else [density]),
        count=(count, None),
        block=(block, 128),
        causal=(causal, False),
        **stream.options(),
    )
    return RandomBlocks(key, block, stream, density, count, causal)


@dataclass(frozen=True, repr=False, eq=False)
class RandomBlocks(Drawn):
    density: float | None
    count: int | None
    causal: bool

    @property
    def prefix_stable(self) -> bool:  # type: ignore[override]
        return self.causal

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
