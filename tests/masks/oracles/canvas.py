"""Patterns on a canvas, and videos frame after frame."""

import math
import random
from functools import reduce

import numpy as np

import masks
from masks import Mask
from masks.patterns.canvas import Local, Neighborhood, Radial, SlidingTiles, frame_causal, radial
from tests.masks.oracles import leaf, oracle

SIZES = (1, 12, 48, 64, 97, 128, 150)  # tokens


def any_canvas(rng: random.Random, n: int) -> tuple[int, ...]:
    """One to three extents whose product is n."""
    canvas: list[int] = []
    for _ in range(rng.randrange(3)):
        canvas.append(rng.choice([d for d in range(1, n + 1) if n % d == 0]))
        n //= canvas[-1]
    canvas.append(n)
    rng.shuffle(canvas)
    return tuple(canvas)


def any_per_axis(rng: random.Random, most: list[int], least: int = 1) -> tuple[int, ...]:
    return tuple(rng.randint(least, max(least, rng.choice([m, min(m, 5)]))) for m in most)


def any_canvas_mask(rng: random.Random, canvas: tuple[int, ...]) -> Mask:
    extents = list(canvas)
    match rng.randrange(5):
        case 0 | 1:
            dilation = any_per_axis(rng, extents)
            kernel = any_per_axis(rng, [e // d for e, d in zip(extents, dilation, strict=True)])
            stride = any_per_axis(rng, list(kernel))
            causal = tuple(rng.random() < 0.3 for _ in canvas)
            return masks.neighborhood(
                canvas, kernel, dilation=dilation, stride=stride, causal=causal
            )
        case 2:
            return masks.local_2d(canvas, any_per_axis(rng, extents, 0))
        case 3:
            tile = any_per_axis(rng, extents)
            tiles = [-(-e // t) for e, t in zip(extents, tile, strict=True)]
            return masks.sliding_tiles(canvas, tile, any_per_axis(rng, tiles))
        case _:
            return masks.axial(canvas)


@leaf
def _(rng: random.Random, n_q: int, n_k: int) -> Mask:
    if n_q != n_k:
        return ~masks.dense()  # a canvas has as many queries as keys
    return any_canvas_mask(rng, any_canvas(rng, n_q))


def joined(axes: list[np.ndarray]) -> np.ndarray:
    """bool (n, n) from one (extent, extent) an axis: all of the axes must allow."""
    return reduce(np.kron, axes)


@oracle(Neighborhood)
def _(mask: Neighborhood, n_q: int, n_k: int, heads: int) -> np.ndarray:
    options = zip(
        mask.canvas, mask.kernels, mask.dilations, mask.strides, mask.causals, strict=True
    )
    axes = []
    for extent, kernel, dilation, stride, causal in options:
        axis = np.zeros((extent, extent), bool)
        for i in range(extent):
            group = list(range(i % dilation, extent, dilation))
            place = group.index(i)
            first_of_stride = place - place % stride
            if causal:
                leader = min(first_of_stride + stride - 1, len(group) - 1)
                seen = [j for j in range(leader - kernel + 1, place + 1) if j >= 0]
            else:
                leader = min(first_of_stride + stride // 2, len(group) - 1)
                seen = list(range(leader - kernel // 2, leader - kernel // 2 + kernel))
                while seen[0] < 0:
                    seen = [j + 1 for j in seen]
                while seen[-1] >= len(group):
                    seen = [j - 1 for j in seen]
            axis[i, [group[j] for j in seen]] = True
        axes.append(axis)
    return joined(axes)


@oracle(SlidingTiles)
def _(mask: SlidingTiles, n_q: int, n_k: int, heads: int) -> np.ndarray:
    axes = []
    for extent, tile, size in zip(mask.canvas, mask.tiles, mask.sizes, strict=True):
        tiles = max(range(extent)) // tile + 1
        axis = np.zeros((extent, extent), bool)
        for q, k in np.ndindex(extent, extent):
            first = q // tile - size // 2
            first = 0 if first < 0 else tiles - size if first > tiles - size else first
            axis[q, k] = k // tile in range(first, first + size)
        axes.append(axis)
    return joined(axes)


@oracle(Local)
def _(mask: Local, n_q: int, n_k: int, heads: int) -> np.ndarray:
    return joined(
        [
            abs(np.subtract.outer(np.arange(extent), np.arange(extent))) <= radius
            for extent, radius in zip(mask.canvas, mask.radii, strict=True)
        ]
    )


@leaf
def _(rng: random.Random, n_q: int, n_k: int) -> Mask:
    chunk = rng.choice([1, 1, 2, 3])
    window = rng.choice([None, *range(chunk, 8)])
    sinks = rng.randrange(4) if window else 0
    return frame_causal(rng.choice([1, 4, 10, 16, 32]), window, sinks=sinks, chunk=chunk)


@leaf
def _(rng: random.Random, n_q: int, n_k: int) -> Mask:
    tokens = rng.choice([1, 2, 5, 8, 16, 20, 24, 50])
    return radial(tokens, least=rng.choice([1, 1, rng.randint(1, tokens)]))


@oracle(Radial)
def _(mask: Radial, n_q: int, n_k: int, heads: int) -> np.ndarray:
    """The paper's equation 4, pair of frames by pair, and wider than one token where told."""
    s, least = mask.tokens, mask.least
    place = abs(np.subtract.outer(np.arange(s), np.arange(s)))
    frames = -(-max(n_q, n_k) // s)
    pairs = []  # of frames, by their distance
    for apart in range(frames):
        power = 2 ** math.floor(math.log2(max(apart, 1)))
        near = (place + 1 <= s / power) if s / power >= least else np.zeros_like(place, bool)
        if apart % math.ceil(least * power / s) == 0:
            near = near | (place < least)
        pairs.append(near)
    rows = [[pairs[abs(i - j)] for j in range(frames)] for i in range(frames)]
    return np.block(rows)[:n_q, :n_k]
