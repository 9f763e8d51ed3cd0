"""Linear layers with block-sparse weights."""

from sparseflash.linear.layer import BlockSparseLinear, BlockSparseMLP
from sparseflash.linear.operator import linear

__all__ = ["BlockSparseLinear", "BlockSparseMLP", "linear"]
