"""The masks of experiments.mask_build by name, and their formulas for FlexAttention.

It imports no torch, because the process that measures a builder shall hold nothing else.
"""

import math
from collections.abc import Callable
from typing import Any

import numpy as np

import masks

MEAN_DOCUMENT = 2000  # tokens
KERNEL = 17  # of the neighbourhood, on a square image
NAMED = ("documents & causal", "neighborhood")  # masks with a formula that are made for a length
BY_FORMULA = ("where", "flex", "flex_compiled")  # the builders that need one


GALLERY = """
dense()
causal()
local(256)
sliding(4096)
dilated(2048, 4)
diagonals((0, 1024, 65536))
power_of_two()
power_of_two(64)
log_sparse()
log_sparse(64)
log_sparse(4096)
strided(128)
strided(1024)
strided(1024) | global_tokens(64)
fixed(128, 8)
fixed(128, 32, 4)
sinks(64)
keys_at((0, 10000))
prefix_lm(1000)
global_tokens(64)
global_at((0, 10000))
global_rows(64)
last_rows(64)
streaming(4, 4096)
tri_shape(4, 4096, 64)
vertical_slash((0, 40, 1000), (0, 1, 64, 4096))
butterfly(128)
butterfly(64)
butterfly(128, levels=4)
pixelfly(128)
random_blocks(0.01)
random_blocks(0.01, block=64)
hubs()
hubs(block=64)
random_regular(8)
random_regular(8, 64)
expander(8)
bigbird(64, 3)
bigbird(128, 3)
bigbird_compat(64, 3)
longformer(512)
etc_(256, 512)
block_diagonal(1000)
block_causal(1000)
block_diffusion(16)
longnet(2048, 4)
longnet(2048, 4, per_head=True)
local_2d(SQUARE, 8)
local_2d(SQUARE, 8, norm='euclidean')
axial(SQUARE)
axial(VIDEO)
neighborhood(SQUARE, 17)
neighborhood(VIDEO, (5, 9, 9))
neighborhood(SQUARE, 7) | neighborhood(SQUARE, 7, dilation=4)
sliding_tiles(SQUARE, 16, 3)
sliding_tiles(VIDEO, (4, 8, 8), 3)
frame_causal(1560, 21, sinks=3)
radial(256)
radial(1560)
heads(local(256), butterfly(128))
lra_local(50)
lra_local(50, interleaved=True)
lra_fixed(50, 10)
lra_strided(50)
lra_longformer(512)
lra_bigbird(64, 3)
neighborhood(SQUARE, 17) >> tiled(SQUARE, 16)
neighborhood(SQUARE, 17) >> morton(SQUARE)
neighborhood(SQUARE, 17) >> hilbert(SQUARE)
sliding(4096) >> shift(1000)
local(1000) >> snap(128)
""".strip().split("\n")  # every name of docs/gallery.md at sizes of use; OF_LENGTH has the others


def make(name: str, n: int) -> Any:
    """The mask of a name, for n tokens: those below, or any text that `masks.parse` reads.

    A text may have SQUARE and VIDEO, which are canvases of n tokens, a power of two.
    """
    if name == "neighborhood":
        side = math.isqrt(n)
        if side * side != n:
            raise ValueError(f"{n} tokens are no square image: give a square number, as 16384")
        return masks.neighborhood((side, side), KERNEL)
    if name in OF_LENGTH:
        return OF_LENGTH[name](n)
    for word, axes in (("SQUARE", 2), ("VIDEO", 3)):
        if word in name:
            name = name.replace(word, str(canvas(n, axes)))
    return masks.parse(name)


def canvas(n: int, axes: int) -> tuple[int, ...]:
    """n = 2**m tokens as an image or a video, whose first axis is the shortest."""
    bits = n.bit_length() - 1
    if n != 1 << bits:
        raise ValueError(f"{n} tokens are no canvas: give a power of two")
    return tuple(1 << (bits + axis) // axes for axis in range(axes))


def rollouts(n: int) -> Any:
    """A tree of prompts, each with eight answers."""
    lengths = documents(n)
    ends = np.cumsum(lengths)
    last = np.minimum(np.arange(len(ends)) // 9 * 9 + 8, len(ends) - 1)
    leave = np.where(np.arange(len(ends)) % 9, ends, ends[last])
    return masks.prefix_tree(ends - lengths, leave)


def mesh(n: int) -> Any:
    """Cells with their neighbours, as a formula."""
    cell, meets = _mesh(n)
    cells, table = masks.table(cell), masks.table(meets.ravel())
    return masks.where(lambda q, k: table[cells[q] * len(meets) + cells[k]])


def _mesh(n: int) -> tuple[np.ndarray, np.ndarray]:
    """(cell of every token, whether cells meet): 48 x 64 cells on a cylinder."""
    across, down = 64, 48
    cell = np.sort(np.random.default_rng(0).integers(0, across * down, n))
    y, x = np.divmod(np.arange(across * down), across)
    far = np.abs(x[:, None] - x)
    return cell, (np.abs(y[:, None] - y) <= 1) & (np.minimum(far, across - far) <= 1)


def sized(n: int) -> tuple[np.ndarray, list[list[int]]]:
    """The same as `masks.cells` has them: sizes, and lists of neighbours."""
    cell, meets = _mesh(n)
    return np.bincount(cell, minlength=len(meets)), [np.flatnonzero(row).tolist() for row in meets]


def documents(n: int) -> list[int]:
    """Lengths of documents, exponentially distributed, that n tokens are packed with."""
    drawn = np.random.default_rng(0).exponential(MEAN_DOCUMENT, n // 100 + 100)
    ends = np.minimum(np.cumsum(1 + drawn.astype(np.int64)), n)
    ends = ends[: np.searchsorted(ends, n) + 1]
    return np.diff(ends, prepend=0).tolist()


def structured(q: Any, k: Any) -> Any:
    """local:256+butterfly:128+global:64"""
    strides = (q // 128) ^ (k // 128)
    return (abs(q - k) <= 256) | (strides & (strides - 1) == 0) | (q < 64) | (k < 64)


FORMULAS: dict[str, Callable[[Any, Any], Any]] = {
    "causal": lambda q, k: q >= k,
    "local:256": lambda q, k: abs(q - k) <= 256,
    "dilated:2048:4": lambda q, k: (abs(q - k) <= 2048) & ((q - k) % 4 == 0),
    "local:256+butterfly:128+global:64": structured,
    "(local:256+butterfly:128+global:64)*causal": lambda q, k: structured(q, k) & (q >= k),
}


def formula(
    name: str, n: int, table: Callable[[Any], Any], clip: Callable[[Any, int, int], Any]
) -> Callable[[Any, Any], Any]:
    """Whether query q sees key k, in operators that arrays, tensors and `masks.where` all have.

    `table` makes data that q and k can index. Raises ValueError for a mask without a formula.
    """
    if name in FORMULAS:
        return FORMULAS[name]
    if name == "documents & causal":
        lengths = documents(n)
        number = table(np.repeat(np.arange(len(lengths)), lengths))
        return lambda q, k: (number[q] == number[k]) & (q >= k)
    if name == "neighborhood":
        side = math.isqrt(n)

        def near(q: Any, k: Any) -> Any:
            start = clip(q - KERNEL // 2, 0, side - KERNEL)
            return (k >= start) & (k < start + KERNEL)

        return lambda q, k: near(q // side, k // side) & near(q % side, k % side)
    raise ValueError(f"no formula for {name}, only for {', '.join([*FORMULAS, *NAMED])}")


OF_LENGTH: dict[str, Callable[[int], Any]] = {
    "documents & causal": lambda n: masks.documents(documents(n)) & masks.causal(),
    "documents": lambda n: masks.documents(documents(n)),
    "documents_from_offsets": lambda n: masks.documents_from_offsets(
        np.append(0, np.cumsum(documents(n)))
    ),
    "documents_from_ids": lambda n: masks.documents_from_ids(
        np.repeat(np.arange(len(documents(n))) % 100, documents(n))
    ),
    "shared_prefix": lambda n: masks.shared_prefix(1000, documents(n)),
    "prefix_tree": rollouts,
    "hstu": lambda n: masks.hstu(documents(n), context=1),
    "strided(64) >> packed": lambda n: masks.strided(64) >> masks.packed(documents(n)),
    "local(256) >> permuted": lambda n: masks.local(256) >> masks.permuted(np.arange(n)[::-1]),
    "where: every sixth": lambda n: masks.where(lambda q, k: (q - k) % 24 < 6),
    "cells": lambda n: masks.cells(*sized(n)),
    "where: mesh": mesh,
}
