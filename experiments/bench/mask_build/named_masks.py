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
NAMED = ("documents & causal", "neighborhood")  # masks that are made for a length
BY_FORMULA = ("where", "flex", "flex_compiled")  # the builders that need one


def make(name: str, n: int) -> Any:
    """The mask of a name, for n tokens: those below, or any text that `masks.parse` reads."""
    if name == "documents & causal":
        return masks.documents(documents(n)) & masks.causal()
    if name == "neighborhood":
        side = math.isqrt(n)
        if side * side != n:
            raise ValueError(f"{n} tokens are no square image: give a square number, as 16384")
        return masks.neighborhood((side, side), KERNEL)
    return masks.parse(name)


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
