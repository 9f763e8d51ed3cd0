"""Triton kernels of the selectors and of padding. Each names its counterpart in plain torch."""

from sparseflash.select.kernels.antidiagonals import antidiagonal_sums
from sparseflash.select.kernels.choose import choose_blocks
from sparseflash.select.kernels.lists import block_lists
from sparseflash.select.kernels.padding import cut_blocks
from sparseflash.select.kernels.picked import (
    inverse,
    inverse_sizes,
    picked_backward,
    picked_forward,
)
from sparseflash.select.kernels.pool import pool_blocks
from sparseflash.select.kernels.tokens import MAX_CHUNKS, pick_chunks, union_of_picks

__all__ = [
    "MAX_CHUNKS",
    "antidiagonal_sums",
    "block_lists",
    "choose_blocks",
    "cut_blocks",
    "inverse",
    "inverse_sizes",
    "pick_chunks",
    "picked_backward",
    "picked_forward",
    "pool_blocks",
    "union_of_picks",
]
