"""Masks of packed sequences, made on the device from tensors such as `cu_seqlens`.

Every function returns a `Selection`, which `sparseflash.attention` takes for its mask. No function
waits for the device. Other values in tensors of the same shapes compile nothing again, and a CUDA
graph follows them. See docs/guide/packed.md.
"""

from sparseflash.packed.sequences import block_diffusion, documents, prefix_tree
from sparseflash.packed.spans import pad

__all__ = ["block_diffusion", "documents", "pad", "prefix_tree"]
