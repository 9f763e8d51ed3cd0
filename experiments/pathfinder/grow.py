"""Places the snakes of one image: two long ones side by side, then the short distractors.

The occupancy `mask` of an image holds the masks of all paddles, except the newest of a growing
snake, which would collide with the next at the joint. A frame of `half` pixels saves the bounds
checks. Paddles may extend into the frame.
"""

from typing import NamedTuple

import numpy as np
from numba import njit
from numpy.typing import NDArray

from experiments.pathfinder.parameters import COLLISION, DEAD_END, DRAWS, SNAKE_DRAWS, TAKEN
from experiments.pathfinder.philox import below, uniform
from experiments.pathfinder.tables import Tables

RANDOM_TAILS = 100  # tried before all free ones are counted


class Board(NamedTuple):
    """The occupancy of an image, and the values that pasting overwrote."""

    mask: NDArray[np.float64]  # (W * W,)
    pasted: NDArray[np.int64]  # (paddles + 1, 2): direction, place; last: how many
    old: NDArray[np.float64]  # (paddles, P * P)
    weight: NDArray[np.float64]  # (K,) of the turns from where a snake is


class Paddles(NamedTuple):
    """The paddles of an image in the order of their placement."""

    placed: NDArray[np.int64]  # (paddles, 4): snake, direction, row and column where it starts
    count: NDArray[np.int64]  # (1,)


@njit(cache=True, nogil=True)
def grow_image(
    t: Tables, board: Board, paddles: Paddles, state, size, frame, contour, distractor, wanted
):
    """Grows all snakes of an image into `paddles`. Snakes 0 and 1 are the long ones.

    Returns (restarts of the two long snakes, distractors placed).
    """
    snakes = np.empty((2, 5), np.int64)
    restarts = 0
    while not _pair(t, board, paddles, snakes, state, size, frame, contour):
        restarts += 1
        _undo(t, board)
        paddles.count[0] = 0
    _paste(t, board, snakes[1, 2], snakes[1, 3], snakes[1, 4], size + 2 * t.half)
    _keep(board)
    placed = 0
    for _ in range(wanted):
        for _ in range(SNAKE_DRAWS):
            before = paddles.count[0]
            if _distractor(t, board, paddles, snakes[0], state, size, distractor, 2 + placed):
                placed += 1
                break
            _undo(t, board)
            paddles.count[0] = before
        _keep(board)
    return restarts, placed


# A snake is (pivot row, pivot column, direction, row, column) of its newest paddle.


@njit(cache=True, nogil=True)
def _pair(t, board, paddles, snakes, state, size, frame, contour):
    if not _free_seed(t, board, paddles, snakes[0], state, size, 0, frame):
        return False
    tail = snakes[0, 3], snakes[0, 4]
    if not _second_seed(t, paddles, snakes[1], state, size, tail):
        return False
    for _ in range(contour - 1):
        for i in range(2):
            if not _extend(t, board, paddles, snakes[i], state, size, i):
                return False
    return True


@njit(cache=True, nogil=True)
def _distractor(t, board, paddles, snake, state, size, length, number):
    if not _free_seed(t, board, paddles, snake, state, size, number, 0):
        return False
    for _ in range(length - 1):
        if not _extend(t, board, paddles, snake, state, size, number):
            return False
    _paste(t, board, snake[2], snake[3], snake[4], size + 2 * t.half)
    return True


@njit(cache=True, nogil=True)
def _tail_within(t, state, size, degree, frame):
    """Uniform among the tails whose footprint is in the image without a frame; or (-1, -1)."""
    top, bottom, left, right = t.foot_box[degree]
    rows, columns = size - 2 * frame - (bottom - top), size - 2 * frame - (right - left)
    if rows <= 0 or columns <= 0:
        return -1, -1
    return frame - top + below(state, rows), frame - left + below(state, columns)


@njit(cache=True, nogil=True)
def _second_seed(t, paddles, snake, state, size, tail):
    for _ in range(DRAWS):
        degree = below(state, 360)
        side = below(state, 360)
        y, x = tail[0] + t.second[side, 0], tail[1] + t.second[side, 1]
        if _seed(t, paddles, snake, size, 1, degree, y, x):
            return True
    return False


@njit(cache=True, nogil=True)
def _free_seed(t, board, paddles, snake, state, size, number, frame):
    """Return the first seed keeps clear of a frame around the image, those of distractors of the
    mask.
    """
    for _ in range(DRAWS):
        degree = below(state, 360)
        if not t.usable[degree]:
            return False
        if number == 0:
            y, x = _tail_within(t, state, size, degree, frame)
        else:
            y, x = _free_tail(t, board, state, size, degree)
        if y < 0:
            return False
        if _seed(t, paddles, snake, size, number, degree, y, x):
            return True
    return False


@njit(cache=True, nogil=True)
def _moved(y, x, way):
    """Return a place moved and rounded up. A way along one axis has about 1e-16 in the other.
    This counts near the top and the left of an image, where places are small numbers: as in the
    original.
    """
    return np.int64(np.ceil(y + way[0])), np.int64(np.ceil(x + way[1]))


@njit(cache=True, nogil=True)
def _seed(t, paddles, snake, size, number, degree, y, x):
    """Whether the seed's head and pivot lie in the image; it is placed then."""
    head_y, head_x = _moved(y, x, t.head[degree])
    pivot_y, pivot_x = _moved(head_y, head_x, t.pivot[degree])
    if min(head_y, head_x, pivot_y, pivot_x) < 0 or max(head_y, head_x, pivot_y, pivot_x) >= size:
        return False
    snake[0], snake[1] = pivot_y, pivot_x
    _record(paddles, snake, number, len(t.ring) + degree, y, x)
    return True


@njit(cache=True, nogil=True)
def _free_tail(t, board, state, size, degree):
    """Uniform among the tails whose footprint is free and off the image's edge; or (-1, -1)."""
    for _ in range(RANDOM_TAILS):
        y, x = _tail_within(t, state, size, degree, 1)
        if _is_free(t, board, size, degree, y, x):
            return y, x
    top, bottom, left, right = t.foot_box[degree]
    count = 0
    for y in range(1 - top, size - 1 - bottom):
        for x in range(1 - left, size - 1 - right):
            count += _is_free(t, board, size, degree, y, x)
    if count:
        nth = below(state, count)
        for y in range(1 - top, size - 1 - bottom):
            for x in range(1 - left, size - 1 - right):
                if _is_free(t, board, size, degree, y, x):
                    if nth == 0:
                        return y, x
                    nth -= 1
    return -1, -1


@njit(cache=True, nogil=True)
def _is_free(t, board, size, degree, y, x):
    corner = np.uint64(y * (size + 2 * t.half) + x)
    for i in range(t.foot_start[degree], t.foot_start[degree + 1]):
        if board.mask[corner + t.foot[i]] > TAKEN:
            return False
    return True


@njit(cache=True, nogil=True)
def _extend(t, board, paddles, snake, state, size, number):
    """Add a paddle to the snake, if it finds room; its last one enters the mask then."""
    width = size + 2 * t.half
    last = snake[2]
    pivot_y, pivot_x = _moved(snake[0], snake[1], t.step[last])
    first = t.turn_start[last]
    turns = np.int64(t.turn_start[last + 1] - first)
    turn, turn_weight = t.turn[first : first + turns], t.turn_weight[first : first + turns]
    total = 0.0
    for i in range(turns):
        y, x = pivot_y + t.ring[turn[i], 0], pivot_x + t.ring[turn[i], 1]
        board.weight[i] = 0.0
        if min(y, x) >= 0 and max(y, x) < size:
            corner = np.uint64((y + t.half - t.margin) * width + x + t.half - t.margin)
            near = board.mask[corner + t.disk[0]]
            for cell in t.disk:
                value = board.mask[corner + cell]
                near = value if value > near else near
            board.weight[i] = (1.0 - near) * turn_weight[i]
            total += board.weight[i]
    if total < DEAD_END:
        return False
    for _ in range(DRAWS):
        left = uniform(state) * total
        chosen = 0
        for i in range(turns):
            left -= board.weight[i]
            if left < 0:
                chosen = i
                break
        direction = np.int64(turn[chosen])
        y, x = pivot_y + t.ring[direction, 0], pivot_x + t.ring[direction, 1]
        if min(y, x) >= 0 and max(y, x) < size and not _collides(t, board, direction, y, x, width):
            _paste(t, board, last, snake[3], snake[4], width)
            snake[0], snake[1] = pivot_y, pivot_x
            _record(paddles, snake, number, direction, y, x)
            return True
    return False


@njit(cache=True, nogil=True)
def _collides(t, board, direction, y, x, width):
    corner = np.uint64(y * width + x)
    for i in range(t.mask_start[direction], t.mask_solid[direction]):
        if board.mask[corner + t.mask_cell[i]] + t.mask_value[i] >= COLLISION:
            return True
    return False


@njit(cache=True, nogil=True)
def _record(paddles, snake, number, direction, y, x):
    snake[2], snake[3], snake[4] = direction, y, x
    row = paddles.placed[paddles.count[0]]
    row[0], row[1], row[2], row[3] = number, direction, y, x
    paddles.count[0] += 1


# ---- pasting and taking back


@njit(cache=True, nogil=True)
def _paste(t, board, direction, y, x, width):
    n = board.pasted[-1, 0]
    corner = np.uint64(y * width + x)
    board.pasted[n, 0], board.pasted[n, 1] = direction, y * width + x
    board.pasted[-1, 0] = n + 1
    old, first = board.old[n], t.mask_start[direction]
    for i in range(first, t.mask_start[direction + 1]):
        cell, value = corner + t.mask_cell[i], t.mask_value[i]
        before = board.mask[cell]
        old[i - first] = before
        board.mask[cell] = value if value > before else before


@njit(cache=True, nogil=True)
def _undo(t, board):
    """Take off what was pasted since the last _keep."""
    for n in range(board.pasted[-1, 0] - 1, -1, -1):
        direction, corner = board.pasted[n, 0], np.uint64(board.pasted[n, 1])
        old, first = board.old[n], t.mask_start[direction]
        for i in range(first, t.mask_start[direction + 1]):
            board.mask[corner + t.mask_cell[i]] = old[i - first]
    _keep(board)


@njit(cache=True, nogil=True)
def _keep(board):
    board.pasted[-1, 0] = 0
