"""Block-sparse attention at the speed that its density promises."""

# ruff: noqa: E402 (what is found as `masks` is checked before it is imported)

from importlib.util import find_spec

found = find_spec("masks")
if found and (not found.submodule_search_locations or not find_spec("masks.block_mask")):
    raise ImportError(
        f"sparseflash needs its package masks, but 'import masks' finds {found.origin or found}: "
        "give that file or folder another name"
    )

from sparseflash import select
from sparseflash.attention import attention, explain, plan
from sparseflash.cache import clear_cache
from sparseflash.decoding.call import decode
from sparseflash.layers import BlockSparseAttention, Rotary
from sparseflash.linear import BlockSparseLinear, BlockSparseMLP, linear
from sparseflash.score import Bound, Score, score
from sparseflash.score import rules as score_rules

__all__ = [
    "BlockSparseAttention",
    "BlockSparseLinear",
    "BlockSparseMLP",
    "Bound",
    "Rotary",
    "Score",
    "attention",
    "clear_cache",
    "decode",
    "explain",
    "linear",
    "plan",
    "score",
    "score_rules",
    "select",
]
