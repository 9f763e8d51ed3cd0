"""Against FlexAttention's create_block_mask, written by other people from the same definitions."""

import numpy as np
import pytest

import masks

flex = pytest.importorskip("torch.nn.attention.flex_attention")

CASES = [
    (masks.causal(), lambda b, h, q, k: q >= k),
    (masks.local(100, 30), lambda b, h, q, k: (q - k <= 100) & (k - q <= 30)),
    (masks.sliding(128), lambda b, h, q, k: (q - k >= 0) & (q - k < 128)),
    (
        (masks.sliding(60) | masks.global_tokens(20)) & masks.causal(),
        lambda b, h, q, k: ((q - k < 60) | (k < 20) | (q < 20)) & (q >= k),
    ),
    (
        masks.butterfly(64) - masks.local(10),
        lambda b, h, q, k: (
            ((((q // 64) ^ (k // 64)) & (((q // 64) ^ (k // 64)) - 1)) == 0)
            & ~((q - k <= 10) & (k - q <= 10))
        ),
    ),
]


@pytest.mark.parametrize(("mask", "mask_mod"), CASES, ids=[str(mask) for mask, _ in CASES])
@pytest.mark.parametrize(("n_q", "n_k"), [(512, 512), (300, 450), (128, 500)])
@pytest.mark.parametrize("block_size", [(64, 64), (128, 32)])
def test_same_blocks(mask, mask_mod, n_q: int, n_k: int, block_size: tuple[int, int]):
    theirs = flex.create_block_mask(
        mask_mod, None, None, n_q, n_k, device="cpu", BLOCK_SIZE=block_size
    )
    layout = np.zeros((-(-n_q // block_size[0]), -(-n_k // block_size[1])), np.uint8)
    for code, counts, columns in (
        (1, theirs.kv_num_blocks, theirs.kv_indices),
        (2, theirs.full_kv_num_blocks, theirs.full_kv_indices),
    ):
        for row, count in enumerate(counts[0, 0].tolist()):
            layout[row, columns[0, 0, row, :count].tolist()] = code

    ours = mask.build(n_q, n_k, block_size).layout()[0, 0]
    ragged = np.zeros(ours.shape, bool)  # blocks that FlexAttention never calls full
    ragged[-1, :] |= n_q % block_size[0] != 0
    ragged[:, -1] |= n_k % block_size[1] != 0
    ours[ragged & (ours == 2)] = 1
    assert np.array_equal(ours, layout)
