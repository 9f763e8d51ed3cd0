"""How snakes find room, on boards made by hand."""

from collections import Counter

import numpy as np

from experiments.pathfinder import philox
from experiments.pathfinder.grow import Board, _free_tail
from experiments.pathfinder.parameters import TAKEN, spec
from experiments.pathfinder.tables import tables


def test_the_last_free_places_are_equally_likely():
    """Random tries miss four places of hundreds half of the time. All free ones are counted then,
    those in the first and last rows and columns too."""
    size, degree = 32, 0
    t = tables(spec(size), 1)
    top, bottom, left, right = t.foot_box[degree].tolist()
    free = [(y, x) for y in (1 - top, size - 2 - bottom) for x in (1 - left, size - 2 - right)]
    width = size + 2 * t.half
    mask = np.ones(width * width)
    for y, x in free:
        mask[y * width + x + t.foot[t.foot_start[degree] : t.foot_start[degree + 1]]] = TAKEN
    board = Board(mask, np.zeros((1, 2), np.int64), np.zeros((1, 1)), np.zeros(1))
    state, found = np.empty(philox.STATE, np.uint64), Counter()
    for index in range(400):
        philox.start(state, 0, index, 0)
        found[_free_tail(t, board, state, size, degree)] += 1
    assert set(found) == set(free)
    assert all(70 < count < 130 for count in found.values())
