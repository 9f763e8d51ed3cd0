"""Selectors: block masks that depend on q and k, made on their device.

`sparseflash.attention` takes `selection = selector(q, k)` for its mask; `&`, `|` and `-` join it
with static masks. A selector of one's own is a `BlockSelector` with `scores`, and a `Rule` for how
many blocks a row takes. See docs/guide/selectors.md.
"""

from sparseflash.dynamic.selection import Selection
from sparseflash.picks.picks import Picks
from sparseflash.select.base import BlockSelector, Rule, Selector
from sparseflash.select.blocks import mass, top_k
from sparseflash.select.tokens import moba, nsa

__all__ = [
    "BlockSelector",
    "Picks",
    "Rule",
    "Selection",
    "Selector",
    "mass",
    "moba",
    "nsa",
    "top_k",
]
