"""What tests of masks made on the device share."""

import numpy as np
import torch

import masks
from masks.tiles import FULL
from sparseflash import packed

BLOCKS = [16, 32, (16, 48), (64, 16), 128]


def assert_same_blocks(found, expected: masks.BlockMask) -> None:
    """Block by block empty, partial or full alike, with the same pairs, within the bounds."""
    codes, theirs = found.codes.numpy(), expected.codes()
    for kind in (codes == FULL, theirs == FULL), (codes >= 0, theirs >= 0):
        assert np.array_equal(*kind)
    assert found.to_block_mask() == expected
    assert (codes != -2).sum() <= found.max_blocks and codes.max() < len(found.bits)


def as_tensor(rng, offsets) -> torch.Tensor:
    """Offsets of either type, some padded."""
    dtype = (torch.int32, torch.int64)[rng.integers(2)]
    return packed.pad(torch.tensor(offsets, dtype=dtype), len(offsets) + int(rng.integers(3)))
