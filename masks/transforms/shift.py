"""A mask moved along."""

import numpy as np

from masks.algebra import Mask
from masks.checks import integer
from masks.leaves.lengths import FAR, Cuts
from masks.registry import Example, canonical, transform
from masks.runs import Grid
from masks.transforms.base import Placing
from masks.transforms.pieces import Pieces
from masks.types import Placed

__all__ = ["shift"]

MOST = FAR // 4  # so that tokens that are moved stay apart from those of other batch entries


@transform(Example("sliding(48) >> shift(64)", "64 tokens later"), written=2)
def shift(q: int, k: int | None = None) -> "Shift":
    """Move a mask `q` queries down and `k` keys to the right: (i, j) comes from (i - q, j - k).

    The new rows and columns at the upper left are empty. The moved mask has q queries and k keys
    less than the one that is built (more, for negative numbers): both end with the same tokens.

    Args:
        q, k: integers, k defaults to q. `mask >> shift(8)` makes room for 8 tokens before a mask,
            `mask >> shift(-8)` drops its first 8 tokens, `mask >> shift(0, 8)` puts 8 keys before.
    """
    q = integer("q", q, min=-MOST, max=MOST)
    k = q if k is None else integer("k", k, min=-MOST, max=MOST)
    return canonical(Shift(q, k), k=None if k == q else k)


class Shift(Placing):
    q: int
    k: int

    def place(self, part: Mask, grid: Grid) -> Placed:
        return Pieces(part, grid, _piece(self.q, grid.n_q), _piece(self.k, grid.n_k)).place()


def _piece(start: int, stop: int) -> Cuts:
    """The tokens from `start` to the end."""
    return Cuts(np.array([start]), np.array([stop]), np.array([stop]))
