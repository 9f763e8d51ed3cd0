"""Lists of neighbours."""

import numpy as np

from masks.leaves.graphs import Adjacency, union


def test_union():
    rows, cols = union(
        [(np.array([1, 0, 1]), np.array([2, -3, 3]), np.array([5, 2, 9])), (0, 1, 1)], 6
    )
    assert rows.tolist() == [0, 0, 1, 1, 1, 1] and cols.tolist() == [0, 1, 2, 3, 4, 5]
    pair = Adjacency.of(3, np.array([0]), np.array([2]))
    assert [x.tolist() for x in pair.rows(np.array([2, 1]))] == [[0, 0, 1], [0, 2, 1]]
