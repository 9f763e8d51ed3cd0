"""The compiled kernel that makes images: random numbers, growth of the snakes, drawing.

The random numbers are Philox4x32-10 (Salmon et al., SC 2011), which depend only on (seed, index).

Growth places the snakes of one image: two long ones side by side, then the short distractors. The
occupancy `mask` of an image holds the masks of all paddles, except the newest of a growing snake,
which would collide with the next at the joint. A frame of `half` pixels saves the bounds checks.
Paddles may extend into the frame.

Numba keeps the compiled kernel and notices changes of this file only. After a change of the
constants in geometry.py, delete experiments/pathfinder/__pycache__.
"""

from typing import NamedTuple

import numpy as np
from numba import njit
from numpy.typing import NDArray

from experiments.pathfinder.geometry import COLLISION, DEAD_END, DRAWS, SNAKE_DRAWS, TAKEN, Tables

KEY, COUNTER, OUTPUT, USED = 0, 2, 6, 10  # places in the state, an array of uint64
STATE = 11
LOW = np.uint64(0xFFFFFFFF)
HALF = np.uint64(32)
MULTIPLIERS = (np.uint64(0xD2511F53), np.uint64(0xCD9E8D57))
WEYL = (np.uint64(0x9E3779B9), np.uint64(0xBB67AE85))
RANDOM_TAILS = 100  # tried before all free ones are counted
# columns of `info`
LABEL, MARGIN, RESTARTS, DISTRACTORS, ORIGIN, MARKERS, INFO = 0, 1, 2, 3, 4, 5, 9


# ---- random numbers


@njit(cache=True, nogil=True)
def start(state, seed, index, kind):
    """Set the state to the beginning of the stream of image `index`.

    kind: below 2**32, different for each size and level.
    """
    state[:] = 0
    state[KEY] = np.uint64(seed) & LOW
    state[KEY + 1] = np.uint64(seed) >> HALF
    state[COUNTER + 1] = np.uint64(kind)
    state[COUNTER + 2] = np.uint64(index) & LOW
    state[COUNTER + 3] = np.uint64(index) >> HALF
    state[USED] = 4


@njit(cache=True, nogil=True)
def word(state):
    """Return the next word of 32 bits; four are drawn at a time."""
    if state[USED] == np.uint64(4):
        k0, k1 = state[KEY], state[KEY + 1]
        c0, c1, c2, c3 = state[COUNTER], state[COUNTER + 1], state[COUNTER + 2], state[COUNTER + 3]
        for _ in range(10):
            a = MULTIPLIERS[0] * c0
            b = MULTIPLIERS[1] * c2
            c0, c1, c2, c3 = (b >> HALF) ^ c1 ^ k0, b & LOW, (a >> HALF) ^ c3 ^ k1, a & LOW
            k0 = (k0 + WEYL[0]) & LOW
            k1 = (k1 + WEYL[1]) & LOW
        state[OUTPUT], state[OUTPUT + 1], state[OUTPUT + 2], state[OUTPUT + 3] = c0, c1, c2, c3
        state[COUNTER] += np.uint64(1)  # no image draws 2**34 numbers
        state[USED] = 0
    value = state[OUTPUT + np.int64(state[USED])]
    state[USED] += np.uint64(1)
    return value


@njit(cache=True, nogil=True)
def uniform(state):
    """Return a float in [0, 1)."""
    return float(word(state)) * 2.0**-32


@njit(cache=True, nogil=True)
def below(state, n):
    """Return an integer in [0, n), for n < 2**32."""
    return np.int64((word(state) * np.uint64(n)) >> HALF)


# ---- growth


class Board(NamedTuple):
    """The occupancy of an image, and the values that pasting overwrote."""

    mask: NDArray[np.float64]  # (W * W,)
    # (paddles + 1, 2): direction, place; last: how many since the last snake that stays
    pasted: NDArray[np.int64]
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
    board.pasted[-1, 0] = 0
    placed = 0
    for _ in range(wanted):
        for _ in range(SNAKE_DRAWS):
            before = paddles.count[0]
            if _distractor(t, board, paddles, snakes[0], state, size, distractor, 2 + placed):
                placed += 1
                break
            _undo(t, board)
            paddles.count[0] = before
        board.pasted[-1, 0] = 0
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
    """Take off what was pasted since the last snake that stays."""
    for n in range(board.pasted[-1, 0] - 1, -1, -1):
        direction, corner = board.pasted[n, 0], np.uint64(board.pasted[n, 1])
        old, first = board.old[n], t.mask_start[direction]
        for i in range(first, t.mask_start[direction + 1]):
            board.mask[corner + t.mask_cell[i]] = old[i - first]
    board.pasted[-1, 0] = 0


# ---- drawing, and many images


@njit(cache=True, nogil=True)
def make_images(
    t, which, margins, seed, first, frame, contour, distractor, wanted, contrast,
    images, info, placed, counts,
):  # fmt: skip
    """Make those of the images first, first + 1, ... of a seed that draw margin number `which`.

    Args:
        t: the Tables of that margin.
        frame: pixels at the border that the first seed leaves free.
        contour, distractor, wanted: paddles of a long snake and of a distractor, how many of these.
        contrast: of the two long snakes; distractors have 1.
        images: (n, N, N), out.
        info: (n, INFO), out: label, which margin, restarts, distractors placed, the snake that the
            first marker is on, then row and column of both markers.
        placed, counts: (n, paddles, 4) and (n,), out: see Paddles.
    """
    size, most = images.shape[1], placed.shape[1]
    board = Board(
        np.empty(len(t.border), np.float64),
        np.zeros((most + 1, 2), np.int64),
        np.empty((most, (2 * t.half + 1) ** 2), np.float64),
        np.empty(len(t.ring), np.float64),
    )
    canvas = np.empty((size, size), np.float32)
    state = np.empty(STATE, np.uint64)
    for n in range(len(images)):
        start(state, seed, first + n, size * 256 + contour)
        label, margin, origin = below(state, 2), below(state, margins), below(state, 2)
        if margin != which:
            continue
        for i in range(len(t.border)):  # a slice would make numba compile its error messages
            board.mask[i] = t.border[i]
        board.pasted[-1, 0] = 0
        paddles = Paddles(placed[n], counts[n : n + 1])
        paddles.count[0] = 0
        restarts, distractors = grow_image(
            t, board, paddles, state, size, frame, contour, distractor, wanted
        )
        other = origin if label == 1 else 1 - origin
        # The seeds come first, then the snakes' paddles in turn.
        tail, head = paddles.placed[origin], paddles.placed[2 * (contour - 1) + other]
        row = info[n]
        row[0], row[1], row[2], row[3], row[4] = label, margin, restarts, distractors, origin
        row[5], row[6], row[7], row[8] = tail[2], tail[3], head[2], head[3]
        _paint(canvas, t, placed[n, : counts[n]], row, contrast, images[n])


@njit(cache=True, nogil=True)
def _paint(canvas, t, placed, row, contrast, image):
    """Paint an image from its paddles and its row of `info`.

    The brightest pixel of its paddles is as bright as the inside of a marker. The edge of a marker
    is brighter. Greys are truncated, and the background is 0 always.
    """
    canvas[:] = 0
    size, half = canvas.shape[0], t.half
    for snake, direction, y, x in placed:
        patch, times = t.stroke[direction], np.float32(1 if snake > 1 else contrast)
        for i in range(max(y - half, 0), min(y + half + 1, size)):
            for j in range(max(x - half, 0), min(x + half + 1, size)):
                canvas[i, j] = max(canvas[i, j], patch[i - y + half, j - x + half] * times)
    canvas *= np.float32(1) / canvas.max()
    for i in range(2):
        _mark(canvas, t, row[5 + 2 * i], row[6 + 2 * i])
    scale = 255.0 / canvas.max()
    for i in range(size):
        for j in range(size):
            image[i, j] = np.uint8(min(np.float64(canvas[i, j]) * scale, 255.0))


@njit(cache=True, nogil=True)
def _place(centre, reach, size):
    """Where a marker's window begins, and the marker's place in it."""
    begin = min(max(centre - reach, 0), size - 2 * reach - 1)
    return begin, centre - begin


@njit(cache=True, nogil=True)
def _mark(canvas, t, y, x):
    size, width = canvas.shape[0], 2 * t.reach + 1
    top, row = _place(y, t.reach, size)
    left, column = _place(x, t.reach, size)
    disk = t.marker[row, column]
    for i in range(width):
        for j in range(width):
            canvas[top + i, left + j] = max(canvas[top + i, left + j], disk[i, j])
