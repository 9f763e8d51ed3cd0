"""Draws a grown image, and the kernel that makes many images.

Numba keeps the compiled kernel and notices changes of this file only. After a change of grow.py,
philox.py or parameters.py, delete experiments/pathfinder/__pycache__.
"""

import numpy as np
from numba import njit

from experiments.pathfinder.grow import Board, Paddles, grow_image
from experiments.pathfinder.philox import STATE, below, start

# columns of `info`
LABEL, MARGIN, RESTARTS, DISTRACTORS, ORIGIN, MARKERS, INFO = 0, 1, 2, 3, 4, 5, 9


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
    size = images.shape[1]
    board = _board(t, placed.shape[1])
    canvas = np.empty((size, size), np.float32)
    every = np.ones(placed.shape[1], np.bool_)
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
        _paint(canvas, t, placed[n], counts[n], every, row, contrast, images[n])


@njit(cache=True, nogil=True)
def draw_images(t, which, contrast, info, placed, counts, kept, images):
    """Draws images of margin number `which` again, with only the paddles that `kept` names.

    kept: bool (n, paddles). The others as in make_images.
    """
    canvas = np.empty(images.shape[1:], np.float32)
    for n in range(len(images)):
        if info[n, 1] == which:
            _paint(canvas, t, placed[n], counts[n], kept[n], info[n], contrast, images[n])


@njit(cache=True, nogil=True)
def _board(t, most):
    return Board(
        np.empty(len(t.border), np.float64),
        np.zeros((most + 1, 2), np.int64),
        np.empty((most, (2 * t.half + 1) ** 2), np.float64),
        np.empty(len(t.ring), np.float64),
    )


@njit(cache=True, nogil=True)
def _paint(canvas, t, placed, count, kept, row, contrast, image):
    """Paint an image from its paddles and its row of `info`.

    The brightest pixel of all its paddles, kept or not, is as bright as the inside of a marker. The
    edge of a marker is brighter.
    """
    _draw(canvas, t, placed[:count], contrast)
    scale = np.float32(1) / _most(canvas)
    if not kept[:count].all():
        _draw(canvas, t, placed[:count][kept[:count]], contrast)
    for i in range(len(canvas)):
        for j in range(len(canvas)):
            canvas[i, j] *= scale
    for i in range(2):
        _mark(canvas, t, row[5 + 2 * i], row[6 + 2 * i])
    _to_grey(canvas, image)


@njit(cache=True, nogil=True)
def _draw(canvas, t, placed, contrast):
    canvas[:] = 0
    size, half = canvas.shape[0], t.half
    for snake, direction, y, x in placed:
        patch, times = t.stroke[direction], np.float32(1 if snake > 1 else contrast)
        for i in range(max(y - half, 0), min(y + half + 1, size)):
            for j in range(max(x - half, 0), min(x + half + 1, size)):
                canvas[i, j] = max(canvas[i, j], patch[i - y + half, j - x + half] * times)


@njit(cache=True, nogil=True)
def _most(canvas):
    most = np.float32(0)
    for row in canvas:
        for value in row:
            most = max(most, value)
    return most


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


@njit(cache=True, nogil=True)
def _to_grey(canvas, image):
    """Scaled to 0..255 and truncated; the background is 0 always."""
    size = canvas.shape[0]
    scale = 255.0 / _most(canvas)
    for i in range(size):
        for j in range(size):
            image[i, j] = np.uint8(min(np.float64(canvas[i, j]) * scale, 255.0))
