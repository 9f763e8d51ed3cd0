"""Attention masks that compose: shape-free expressions, and the exact block mask of a length."""

# ruff: noqa: F403, F405, I001 (each file lists its patterns, and the gallery shows them in this order)

from masks import interop
from masks.algebra import Mask
from masks.block_mask import BlockMask
from masks.registry import PATTERNS, TRANSFORMS, Example, pattern, transform
from masks.segments import BlockLists
from masks.spec import parse
from masks.patterns.bands import *
from masks.patterns.columns import *
from masks.patterns.graphs import *
from masks.patterns.bigbird import *
from masks.patterns.segments import *
from masks.patterns.documents import *
from masks.patterns.canvas import *
from masks.patterns.array import *
from masks.transforms.reorder import *
from masks.transforms.packed import *
from masks.transforms.snap import *
from masks.structure import *
from masks.predicate.where import *
from masks.predicate.table import *

__all__ = [
    "BlockLists",
    "BlockMask",
    "Example",
    "Mask",
    "interop",
    "mask_from",
    "parse",
    "pattern",
    "table",
    "transform",
]
__all__ += sorted({entry.function.__name__ for entry in (PATTERNS | TRANSFORMS).values()})  # pyright: ignore[reportUnsupportedDunderAll]
