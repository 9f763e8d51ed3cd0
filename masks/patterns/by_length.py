"""Base of the patterns that are another one at every length."""

from masks.algebra import Leaf
from masks.runs import Bools, Grid, Ints, Runs


class ByLength(Leaf):
    """A pattern for which `at` stands."""

    def at(self, grid: Grid) -> Leaf:
        """The leaf of the grid's n_q, n_k and heads; called often."""
        raise NotImplementedError

    def runs(self, grid: Grid) -> Runs:
        return self.at(grid).runs(grid)

    def allowed(self, grid: Grid, s: Ints, q: Ints, k: Ints) -> Bools:
        return self.at(grid).allowed(grid, s, q, k)

    def signature(self, grid: Grid, s: Ints, row: Ints, col: Ints) -> Ints:
        return self.at(grid).signature(grid, s, row, col)
