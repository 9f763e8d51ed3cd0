"""Attention masks that compose: shape-free expressions, and the exact block mask of a length."""

from masks.algebra import Mask
from masks.block_lists import BlockLists
from masks.block_mask import BlockMask
from masks.patterns.array import mask_from
from masks.patterns.band import causal, local, sliding
from masks.patterns.butterfly import butterfly
from masks.patterns.dense import dense
from masks.patterns.global_tokens import global_tokens
from masks.patterns.random_blocks import random_blocks
from masks.spec import parse, pattern, transform
from masks.structure import heads, layers

__all__ = [
    "BlockLists",
    "BlockMask",
    "Mask",
    "butterfly",
    "causal",
    "dense",
    "global_tokens",
    "heads",
    "layers",
    "local",
    "mask_from",
    "parse",
    "pattern",
    "random_blocks",
    "sliding",
    "transform",
]
