"""Masks seen as graphs of token blocks."""

import numpy as np

from masks import Mask

B = 16  # tokens of a token block


def graph(mask: Mask, n: int, heads: int | None = None) -> np.ndarray:
    """bool (heads or 1, n, n), of token blocks of B tokens"""
    return mask.build(n * B, block_size=B, heads=heads).layout()[0] > 0


def nnz(mask: Mask, n: int) -> int:
    """Non-empty blocks of n x n."""
    return mask.build(n * B, block_size=B).nnz
