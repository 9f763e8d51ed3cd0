"""Block diffusion made from tensors: the blocks of the static masks, and clear errors."""

import re
from itertools import pairwise

import numpy as np
import pytest
import torch

import masks
from sparseflash import packed
from tests.packing_cases import BLOCKS, as_tensor, assert_same_blocks

SIZES = [1, 3, 4, 16, 20, 32, 100, 1000]


def dense_of(offsets: list[int], n: int, size: int) -> np.ndarray:
    """Bool (n, n) of all noisy copies and then all clean ones, document by document."""
    seen, half = np.zeros((n, n), bool), n // 2
    for start, stop in pairwise(offsets):
        block = np.arange(stop - start) // size
        noisy, clean = slice(start, stop), slice(half + start, half + stop)
        seen[noisy, noisy] = block[:, None] == block
        seen[noisy, clean] = block[:, None] > block
        seen[clean, clean] = block[:, None] >= block
    return seen


def packings(seed: int, count: int):
    """Offsets within n / 2, the last one there or before."""
    rng = np.random.default_rng(seed)
    for _ in range(count):
        half, m = int(rng.integers(1, 300)), int(rng.choice([1, 1, 2, 5, 12, 60]))
        unit = int(rng.choice([1, 16]))
        cuts = np.sort(rng.integers(0, half // unit + 1, m - 1) * unit).tolist()
        end = half if rng.random() < 0.6 else int(rng.integers(max(cuts, default=0), half + 1))
        yield rng, 2 * half, [0, *cuts, end], int(rng.choice(SIZES))


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("seed", range(2))
def test_blocks_of_the_static_masks(seed, interleaved):
    for rng, n, offsets, size in packings(10 * interleaved + seed, 45):
        block_size = BLOCKS[rng.integers(len(BLOCKS))]
        options = {"interleaved": interleaved, "block_size": block_size}
        found = packed.block_diffusion(as_tensor(rng, offsets), n, size, **options)
        dense, end = dense_of(offsets, n, size), 2 * offsets[-1]
        static = masks.block_diffusion(size)
        if interleaved:
            lengths = [2 * length for length in np.diff(offsets).tolist() if length]
            static, dense = static >> masks.packed(lengths or (1,)), np.zeros((n, n), bool)
            if end:
                dense[:end, :end] = static.build(end, end, block_size).to_dense()[0, 0]
        if end == n and (interleaved or len(offsets) == 2):
            assert found.to_block_mask() == static.build(n, n, block_size)
        assert_same_blocks(found, masks.BlockMask.from_dense(dense, block_size))


OFFSETS = torch.tensor([0, 10, 32])
REFUSED = {
    "odd": ((OFFSETS, 63, 4), {}, "n is 63: give an even number, for a noisy and a clean copy"),
    "both copies": ((2 * OFFSETS, 64, 4), {}, "cu_seqlens is 0, 20, 64: it must ascend from 0 to"),
    "interleaved": ((OFFSETS, 64, 4), {"interleaved": 1}, "interleaved is 1: give True or False"),
}


@pytest.mark.parametrize("given, options, message", REFUSED.values(), ids=REFUSED)
def test_refused(given, options, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        packed.block_diffusion(*given, **options)
