"""The patterns of the property tests, one family a file.

A family says of every pattern and transform that is no rule which pairs it allows (`@oracle`), in
the plainest words and independently of the code under test. It also makes random masks of its own
(`@leaf`). Importing this package imports them all.
"""

import importlib
import pkgutil
import random
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np

from masks import Mask

Oracle = Callable[[Mask, int, int, int], np.ndarray]
Maker = Callable[[random.Random, int, int], Mask]

ORACLES: dict[type | str, Oracle] = {}  # by the name of the pattern, or by class
LEAVES: list[Maker] = []
VARIED: list[Maker] = []
BATCH, HEADS = 2, 4  # of the masks that `varied` makes


def oracle(*kinds: type | str) -> Callable[[Oracle], Oracle]:
    """Decorator of (mask, n_q, n_k, heads) -> bool, broadcasting to (batch, heads, n_q, n_k)."""

    def register(function: Oracle) -> Oracle:
        assert ORACLES.keys().isdisjoint(kinds), kinds
        ORACLES.update(dict.fromkeys(kinds, function))
        return function

    return register


def leaf(*makers: Maker) -> Maker:
    """Note (rng, n_q, n_k) -> a random mask, the same for all heads and batch entries."""
    LEAVES.extend(makers)
    return makers[0]


def varied(*makers: Maker) -> Maker:
    """Note the same, for masks that differ among HEADS heads or BATCH batch entries."""
    VARIED.extend(makers)
    return makers[0]


def positions(n_q: int, n_k: int) -> tuple[np.ndarray, np.ndarray]:
    """(query numbers (n_q, 1), key numbers (1, n_k))"""
    return np.arange(n_q)[:, None], np.arange(n_k)[None, :]


def any_align(rng: random.Random) -> str:
    return rng.choice(["top_left", "bottom_right"])


def given(mask: Any) -> SimpleNamespace:
    """The arguments that a mask was made with."""
    return SimpleNamespace(**mask.arguments)


for module in pkgutil.iter_modules(__path__):
    importlib.import_module(f"{__name__}.{module.name}")
