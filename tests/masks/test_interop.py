"""Round trips through FlexAttention's BlockMask, and what it does with the masks it is given."""

import inspect
import random

import numpy as np
import pytest

import masks
from masks import BlockMask, interop
from tests.masks.helpers import any_blocks
from tests.notes import each_seed

torch = pytest.importorskip("torch")
flex = pytest.importorskip("torch.nn.attention.flex_attention")
make_fx = pytest.importorskip("torch.fx.experimental.proxy_tensor").make_fx
LISTS = [
    f"{full}{side}_{what}"
    for full in ("", "full_")
    for side in ("kv", "q")
    for what in ("num_blocks", "indices")
]


@each_seed(25)
def test_round_trip(seed: int):
    """Every tensor, unused entries included, is the one of create_block_mask."""
    blocks = any_blocks(random.Random(seed))
    dense = torch.from_numpy(blocks.to_dense())
    theirs = flex.create_block_mask(
        lambda b, h, q, k: dense[b, h, q, k], *dense.shape, "cpu", blocks.block_size
    )
    ours = interop.to_flex(blocks)
    for name in LISTS:
        a, b = getattr(ours, name), getattr(theirs, name)
        assert a.dtype == b.dtype and torch.equal(a, b), name
    assert ours.seq_lengths == theirs.seq_lengths and ours.BLOCK_SIZE == theirs.BLOCK_SIZE
    assert interop.from_flex(theirs) == interop.from_flex(ours) == blocks
    # The lookup alone is the whole mask, with no lists to help it.
    tokens = flex.create_mask(ours.mask_mod, *dense.shape, device="cpu")
    assert torch.equal(tokens, dense)


@pytest.mark.skipif(
    "separate_full_blocks" not in inspect.signature(flex.create_block_mask).parameters,
    reason="this torch always makes full lists",
)
def test_a_mask_without_full_lists():
    """Everything is looked at then, and full blocks are found."""
    options = {"device": "cpu", "BLOCK_SIZE": 32, "separate_full_blocks": False}
    theirs = flex.create_block_mask(lambda b, h, q, k: q >= k, None, None, 200, 150, **options)
    assert theirs.full_kv_num_blocks is None
    assert interop.from_flex(theirs) == masks.causal().build(200, 150, 32)


def test_only_partial_blocks_are_looked_at():
    blocks = masks.causal().build(1 << 14)
    seen = []

    def formula(b, h, q, k):
        seen.append(1)
        return (q >= k) & (q // 128 == k // 128)  # wrong in full blocks, which are trusted

    flex_mask = interop.to_flex(blocks, mask_mod=formula)
    assert flex_mask.mask_mod is formula and interop.from_flex(flex_mask) == blocks
    assert len(seen) <= 4  # 128 diagonal blocks, some at a time


def test_masks_that_index_what_they_capture():
    """One index after the other, as a formula for scalars may do."""
    documents = torch.tensor([[0] * 50 + [1] * 46, [0] * 20 + [1] * 76])

    def formula(b, h, q, k):
        return documents[b][q] == documents[b][k]

    theirs = flex.create_block_mask(formula, 2, None, 96, 96, device="cpu", BLOCK_SIZE=16)
    dense = (documents[:, :, None] == documents[:, None, :])[:, None].numpy()
    assert np.array_equal(interop.from_flex(theirs).to_dense(), dense)


def test_a_slice_of_a_mask():
    array = np.random.default_rng(0).random((2, 3, 64, 80)) < 0.3
    blocks = BlockMask.from_dense(array, 16)
    head = interop.to_flex(blocks)[:, 1:2]
    head.mask_mod = lambda b, h, q, k: torch.from_numpy(array[:, 1])[b, q, k]
    assert interop.from_flex(head) == BlockMask.from_dense(array[:, 1:2], 16)
    blocks = masks.causal().build(64, 80, 16)
    only = interop.to_flex(blocks)
    for name in LISTS:  # some versions of torch drop the extents of [0, 0]
        setattr(only, name, getattr(only, name)[0, 0])
    assert interop.from_flex(only) == blocks


def test_too_large():
    blocks = masks.local(64).build(1 << 22, block_size=64)
    with pytest.raises(
        ValueError, match=r"square lists would take 80\.0 GiB, more than limit_gib=8"
    ):
        interop.to_flex(blocks)
    with pytest.raises(ValueError, match=r"limit_gib=0\.001"):
        interop.to_flex(masks.local(64).build(1 << 16), limit_gib=0.001)


def test_lists_that_contradict():
    blocks = masks.causal().build(128, block_size=32)
    flex_mask = interop.to_flex(blocks)
    flex_mask.full_kv_num_blocks = flex_mask.full_kv_num_blocks + 1
    flex_mask.full_kv_indices = flex_mask.full_kv_indices.flip(-1)
    with pytest.raises(ValueError, match="listed twice"):
        interop.from_flex(flex_mask)
    flex_mask = interop.to_flex(blocks)
    flex_mask.seq_lengths = (500, 128)
    with pytest.raises(ValueError, match="4 query blocks, but 500 queries need 16"):
        interop.from_flex(flex_mask)
    flex_mask = interop.to_flex(blocks)
    flex_mask.kv_indices = flex_mask.kv_indices + 4
    with pytest.raises(ValueError, match="blocks 4 to 7 are listed: give 0 to 3"):
        interop.from_flex(flex_mask)
    flex_mask.BLOCK_SIZE = (1024, 1024)
    with pytest.raises(ValueError, match="16 and 256"):
        interop.from_flex(flex_mask)
