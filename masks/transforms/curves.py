"""Orders in which the tokens of a canvas can follow each other: tiles and space-filling curves.

Every function gives int64 (n,), read-only: the row-major number of the token at each place.
"""

from functools import lru_cache
from math import prod

import numpy as np

from masks.runs import Ints, expand


def given_order(order: Ints) -> Ints:
    """Return the order itself."""
    return order


@lru_cache(maxsize=8)
def tiled_order(canvas: tuple[int, ...], tile: tuple[int, ...]) -> Ints:
    """Tile by tile, and row by row within a tile and among the tiles; border tiles are cut."""
    places = np.indices(canvas, sparse=True)
    number: Ints = np.zeros(1, np.int64)
    for place, size, extent in zip(places, tile, canvas, strict=True):  # of the tile
        number = number * -(-extent // size) + place // size
    for place, size in zip(places, tile, strict=True):  # of the token in it
        number = number * size + place % size
    return _sorted_by(number)


@lru_cache(maxsize=8)
def morton_order(canvas: tuple[int, ...]) -> Ints:
    """By the interleaved bits of the places along the axes, the last axis lowest (Morton, 1966)."""
    bits = max(canvas).bit_length()
    number: Ints = np.zeros(1, np.int64)
    for axis, place in enumerate(np.indices(canvas, sparse=True)):
        for bit in range(bits):
            at = bit * len(canvas) + len(canvas) - 1 - axis
            number = number | (place >> bit & 1) << at
    return _sorted_by(number)


def _sorted_by(number: Ints) -> Ints:
    return _frozen(np.argsort(number.ravel(), kind="stable"))


def _frozen(order: Ints) -> Ints:
    order.flags.writeable = False
    return order


@lru_cache(maxsize=8)
def hilbert_order(canvas: tuple[int, ...]) -> Ints:
    """Along a Hilbert curve (1891), generalised to any rectangle.

    The curve crosses a box from a corner to the far end of its major side. A box that is long is
    two boxes one after the other; any other one is three: half of the near edge crossed sideways,
    the other half along the major side, and the rest of the near half sideways back. Halves are
    rounded to even lengths, for then no step of the curve is diagonal. All boxes of one depth are
    cut together.
    """
    height, width = canvas
    order = np.empty(prod(canvas), np.int64)
    # One row a box: place in the order, corner (y, x), major and minor side as vectors (y, x).
    across, down = (0, width), (height, 0)
    first = max(across, down, key=lambda side: (sum(side) % 2 == 0, sum(side)))
    boxes = np.array([[0, 0, 0, *first, *(down if first is across else across)]])
    while len(boxes):
        major, minor = abs(boxes[:, 3:5]).sum(1), abs(boxes[:, 5:7]).sum(1)
        thin = (major == 1) | (minor == 1)
        _walk(boxes[thin], width, order)
        boxes, major, minor = boxes[~thin], major[~thin], minor[~thin]
        long_box = 2 * major > 3 * minor
        boxes = np.concatenate(
            [
                _in_two(boxes[long_box], major[long_box]),
                _in_three(boxes[~long_box], major[~long_box], minor[~long_box]),
            ]
        )
    return _frozen(order)


def _walk(boxes: Ints, width: int, order: Ints) -> None:
    """Write the tokens of boxes that are one token wide."""
    length = abs(boxes[:, 3:7]).max(1)
    along = np.where(abs(boxes[:, 3:5]).sum(1) == length, 0, 2)  # the major side, or the minor
    unit = np.sign(np.take_along_axis(boxes[:, 3:7], along[:, None] + np.arange(2), axis=1))
    box, step = expand(np.zeros_like(length), length)
    place = boxes[box, 1:3] + unit[box] * step[:, None]
    order[boxes[box, 0] + step] = place[:, 0] * width + place[:, 1]


def _half(length: Ints) -> Ints:
    """About one half, and even where that leaves something."""
    half = length // 2
    return half + ((half % 2 == 1) & (length > 2))


def _in_two(boxes: Ints, major: Ints) -> Ints:
    begin, corner, a, b = boxes[:, :1], boxes[:, 1:3], boxes[:, 3:5], boxes[:, 5:7]
    near = np.sign(a) * _half(major)[:, None]
    area = (abs(near).sum(1) * abs(b).sum(1))[:, None]
    return np.concatenate(
        [
            np.concatenate([begin, corner, near, b], axis=1),
            np.concatenate([begin + area, corner + near, a - near, b], axis=1),
        ]
    )


def _in_three(boxes: Ints, major: Ints, minor: Ints) -> Ints:
    begin, corner, a, b = boxes[:, :1], boxes[:, 1:3], boxes[:, 3:5], boxes[:, 5:7]
    left = np.sign(a) * (major // 2)[:, None]
    near = np.sign(b) * _half(minor)[:, None]
    first = (abs(left).sum(1) * abs(near).sum(1))[:, None]
    second = first + (major * abs(b - near).sum(1))[:, None]
    end = corner + a - np.sign(a) + near - np.sign(b)
    return np.concatenate(
        [
            np.concatenate([begin, corner, near, left], axis=1),
            np.concatenate([begin + first, corner + near, a, b - near], axis=1),
            np.concatenate([begin + second, end, -near, left - a], axis=1),
        ]
    )
