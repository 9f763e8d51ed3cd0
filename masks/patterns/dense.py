"""Everything."""

from dataclasses import dataclass

import numpy as np

from masks import runs as rl
from masks.algebra import Leaf, Mask
from masks.runs import Bools, Grid, Ints, Runs
from masks.spec import call_text, pattern


@pattern()
def dense() -> Mask:
    """Every key is allowed for every query; `~dense()` is nothing."""
    return Dense(call_text("dense"))


@dataclass(frozen=True, repr=False, eq=False)
class Dense(Leaf):
    key: str
    prefix_stable = True

    def runs(self, grid: Grid) -> Runs:
        return rl.constant(rl.FULL)

    def allowed(self, grid: Grid, s: Ints, q: Ints, k: Ints) -> Bools:
        return np.ones(np.broadcast_shapes(s.shape, q.shape, k.shape), bool)
