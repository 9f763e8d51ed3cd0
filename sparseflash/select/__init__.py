"""Selectors: block masks that depend on q and k, made on their device.

`sparseflash.attention` takes `selection = selector(q, k)` for its mask; `&`, `|` and `-` join it
with static masks. See docs/guide/selectors.md.
"""

from sparseflash.dynamic.selection import Selection
from sparseflash.picks.picks import Picks
from sparseflash.select.antidiagonals import antidiagonal
from sparseflash.select.base import Selector
from sparseflash.select.blocks import mass, top_k
from sparseflash.select.gates import Gate, attention_map, distillation_loss, gate
from sparseflash.select.tokens import moba, nsa

__all__ = [
    "Gate",
    "Picks",
    "Selection",
    "Selector",
    "antidiagonal",
    "attention_map",
    "distillation_loss",
    "gate",
    "mass",
    "moba",
    "nsa",
    "top_k",
]
