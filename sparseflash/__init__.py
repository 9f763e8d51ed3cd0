"""Block-sparse attention at the speed that its density promises."""

from sparseflash import cost, select
from sparseflash.attention import attention, explain, plan
from sparseflash.cache import clear_cache
from sparseflash.decoding.call import decode
from sparseflash.layers import BlockSparseAttention, Rotary
from sparseflash.terms import Terms

__all__ = [
    "BlockSparseAttention",
    "Rotary",
    "Terms",
    "attention",
    "clear_cache",
    "cost",
    "decode",
    "explain",
    "plan",
    "select",
]
