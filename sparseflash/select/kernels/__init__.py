"""Triton kernels of the selectors. Each names its counterpart in plain torch."""

from sparseflash.select.kernels.choose import choose_blocks
from sparseflash.select.kernels.pool import pool_blocks
from sparseflash.select.kernels.tokens import MAX_CHUNKS, pick_chunks, union_of_picks

__all__ = [
    "MAX_CHUNKS",
    "choose_blocks",
    "pick_chunks",
    "pool_blocks",
    "union_of_picks",
]
