"""Hubs whose degrees follow a power law."""

from dataclasses import dataclass
from typing import Any

import numpy as np

from masks.algebra import Mask
from masks.checks import integer
from masks.patterns.draws import Stream, choose, permutation
from masks.patterns.graphs import Graph
from masks.runs import Ints
from masks.spec import call_text, pattern


@pattern()
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
    count = None if count is None else integer("count", count, least=1)
    alpha, block = _positive("alpha", alpha), integer("block", block, least=1)
    stream = Stream.of(seed, per_head, per_layer, layer)
    key = call_text(
        "hubs",
        *([] if count is None else [count]),
        alpha=(alpha, 1.0),
        block=(block, 128),
        **stream.options(),
    )
    return Hubs(key, block, stream, count, alpha)


def _positive(name: str, value: Any) -> float:
    is_number = isinstance(value, int | float | np.floating) and not isinstance(value, bool)
    if not is_number or not 0 < value < float("inf"):
        raise ValueError(f"{name} is {value!r}: give a number > 0")
    return float(value)


@dataclass(frozen=True, repr=False, eq=False)
class Hubs(Graph):
    count: int | None
    alpha: float

    def edges(self, head: int, n: int) -> tuple[Ints, Ints]:
        hub = permutation(self.source.word(head), n)[: self.count]
        share = n * np.arange(1, len(hub) + 1, dtype=float) ** -self.alpha
        degree = np.maximum(1, np.rint(share)).astype(np.int64)
        rank, other = choose(self.source.keys(head, hub), degree, np.full(len(hub), n))
        return hub[rank], other
