"""Selectors: block masks that depend on q and k, picked on their device; needs torch.

`sparseflash.attention` takes `selection = selector(q, k)` for its mask; `&`, `|` and `-` join it
with static masks. See docs/selectors.md.
"""

from masks.select.antidiagonal import antidiagonal
from masks.select.base import Selector
from masks.select.blocks import mass, top_k
from masks.select.gate import Gate, attention_map, distillation_loss, gate
from masks.select.selection import Selection
from masks.select.tokens import moba, nsa

__all__ = [
    "Gate",
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
