"""Presets: quirks of the published code."""

import numpy as np

from masks.presets.lra import lra_bigbird


def test_lra_bigbird():
    """1000 tokens make 16 blocks of 64, and 1024 make 17, the last one without a token."""
    for n, blocks_ in ((1000, 16), (1024, 17), (4000, 63), (4096, 65)):
        layout = lra_bigbird().build(n, block_size=64, heads=2).layout()[0] > 0
        rows = layout.shape[1]
        assert rows == -(-n // 64) and layout[:, 0].all() and layout[:, :, 0].all()
        assert layout[:, -1].all() == layout[:, :, -1].all() == (blocks_ == rows)
        far = layout & (abs(np.arange(rows)[:, None] - np.arange(rows)) > 1)
        random = far[:, 1 : blocks_ - 1, 1 : blocks_ - 1]
        assert (random.sum(2) <= 3).all() and (random.sum(2)[:, : min(12, rows - 4)] == 3).all()
        assert not random[:, :, 15:].any()  # the first 1024 tokens
        # the last two rows draw from 4 and 3 blocks less
        assert not random[:, blocks_ - 4, 11:].any() and not random[:, blocks_ - 3, 12:].any()
    assert lra_bigbird(seed=None).layer(4) == lra_bigbird(seed=4)
