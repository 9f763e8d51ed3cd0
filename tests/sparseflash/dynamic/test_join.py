"""Selections joined with masks and with each other, without waiting for the device."""

from dataclasses import replace

import numpy as np
import pytest
import torch

import masks
from masks.tiles import unpack_bits
from sparseflash import select
from sparseflash.dynamic.lists import schedule_from_selection
from sparseflash.schedule.blocks import as_tensors
from sparseflash.testing import make_qkv
from tests.op_cases import NoSync
from tests.sparseflash.select import oracle

HEADS = 2
SELECTORS = {
    "top_k": lambda block: select.top_k(2, block_size=block),
    "causal": lambda block: select.top_k(2, "bound", block, within=masks.causal()),
    "mass": lambda block: select.mass(0.6, block_size=block, always=masks.local(0)),
    "moba": lambda block: select.moba(64, 2, block, capacity=40),
    "union": lambda block: select.moba(64, 2, block, union=True),
    "nsa": lambda block: select.nsa(3, block[1], block[0], capacity=40),
}
MASKS = [
    masks.causal(),
    masks.local(20) | masks.global_tokens(3),
    masks.random_blocks(0.5, block=16, per_head=True),
    masks.mask_from(np.random.default_rng(0).random((2, 1, 100, 100)) < 0.5),
    masks.dense(),
    masks.causal() & ~masks.causal(),
]


def inputs(n=100, kv_heads=HEADS, **options):
    return make_qkv(2, HEADS, n, n, 16, kv_heads=kv_heads, **options)[:2]


def dense_of(given: select.Selection | masks.Mask) -> np.ndarray:
    if isinstance(given, masks.Mask):
        given = given.build(100, 100, 16, heads=HEADS if given.per_head else None)
    return oracle.dense_of(given, 2, HEADS)


def beyond(given: select.Selection) -> np.ndarray:
    """The bits of partial blocks at pairs of tokens that do not exist; kernels rely on zeros."""
    block_q, block_k = given.block_size
    codes = given.codes.numpy()
    *_, row, col = np.nonzero(codes >= 0)
    bits = given.bits.numpy()[codes[codes >= 0]].view(np.uint32)
    seen = unpack_bits(bits, block_k)
    q, k = np.arange(block_q)[:, None], np.arange(block_k)
    row, col = row[:, None, None] * block_q, col[:, None, None] * block_k
    return seen & ((row + q >= given.n_q) | (col + k >= given.n_k))


def agree(*pairs: tuple[select.Selection, np.ndarray]) -> None:
    for joined, expected in pairs:
        assert np.array_equal(dense_of(joined), expected)
        assert (joined.codes != -2).sum() <= joined.max_blocks
        assert not beyond(joined).any()
        assert joined.density().item() == pytest.approx(joined.to_block_mask().density)


@pytest.mark.parametrize("make", SELECTORS.values(), ids=SELECTORS)
@pytest.mark.parametrize("block", [(16, 16), (32, 64)])
def test_with_static_masks(make, block):
    torch.manual_seed(0)
    picked = make(block)(*inputs(kv_heads=1))
    found = dense_of(picked)
    for mask in MASKS:
        if mask.per_head and picked.heads == 1:
            with pytest.raises(ValueError, match="differs from head to head, the selection does"):
                picked & mask
            wide = mask.build(100, 100, block, heads=HEADS)
            assert np.array_equal(dense_of(picked & wide), found & wide.to_dense())
            continue
        other = dense_of(mask)
        for operand in [mask] if mask.per_head else [mask, mask.build(100, 100, block)]:
            agree((picked & operand, found & other), (picked | operand, found | other))
            agree((picked - operand, found & ~other))
    mask, third = MASKS[1], masks.sliding(30)
    other = dense_of(mask)
    agree((mask & picked, found & other), (mask | picked, found | other))
    agree((((picked - mask) | third) & mask, ((found & ~other) | dense_of(third)) & other))


def test_with_each_other():
    q, k = inputs()
    whole = select.top_k(3, block_size=16)(q, k)
    cut = select.mass(0.9, block_size=16, within=masks.causal())(q, k)
    token = select.moba(32, 2, 16)(q, k)
    a, b, c = dense_of(whole), dense_of(cut), dense_of(token)
    agree(
        (whole & cut, a & b),
        (whole | cut, a | b),
        (cut - whole, b & ~a),
        (token & cut, c & b),
        (cut | token, b | c),
        (token - whole, c & ~a),
        ((token & whole) | cut, (c & a) | b),
    )
    with pytest.raises(ValueError, match="partial blocks: subtract one of whole blocks"):
        whole - cut
    with pytest.raises(ValueError, match="tiles make too many"):
        token & select.moba(32, 2, 16)(q, k)
    with pytest.raises(ValueError, match="select with the same"):
        whole & select.top_k(1, block_size=32)(q, k)
    with pytest.raises(ValueError, match="select with the same"):
        whole & replace(whole, codes=whole.codes.to("meta"), bits=whole.bits.to("meta"))
    with pytest.raises(ValueError, match="heads 2 and 3"):
        whole & select.top_k(1, block_size=16)(*make_qkv(2, 3, 100, 100, 16)[:2])
    with pytest.raises(TypeError):
        whole & np.ones((100, 100), bool)


def test_a_mask_of_two_entries_widens_a_selection_of_one():
    """Tiles that belonged to one block belong to two then, which differ."""
    q, k = (x[:1] for x in inputs())
    token = select.moba(32, 2, 16)(q, k)
    wide = masks.mask_from(np.random.default_rng(1).random((2, 1, 100, 100)) < 0.5)
    a, b = dense_of(token), dense_of(wide)
    agree((token & wide, a & b), (token | wide, a | b), (token - wide, a & ~b))


def test_tiles_are_made_canonical():
    """Tiles that are empty, full or equal come out as the block mask of the same pairs has them."""
    picked = select.top_k(1.0, block_size=16)(*inputs())
    joined = ((picked & masks.causal()) | (picked - masks.causal())) & masks.local(30)
    found = joined.to_block_mask()
    assert found.layout().max() == 2
    assert found == masks.BlockMask.from_dense(found.to_dense(), 16)
    assert np.array_equal(dense_of(joined), dense_of(masks.local(30)))


@pytest.mark.parametrize("make", SELECTORS.values(), ids=SELECTORS)
@pytest.mark.parametrize("n", [96, 100])
def test_nothing_waits_for_the_device(make, n):
    q, k = inputs(n, kv_heads=1)
    selector = make((16, 32))
    with NoSync():
        picked = selector(q, k)
        for joined in (picked, picked & MASKS[1], picked | MASKS[1], picked - MASKS[1]):
            joined.density()
            as_tensors(schedule_from_selection(joined, n, n, 2, HEADS, "cpu"))


def test_selector_has_no_gradient_and_no_trace_of_inference_mode():
    q, k = inputs(requires_grad=True)
    selector = select.top_k(2, block_size=16, within=masks.sliding(77), always=masks.local(0))
    with torch.inference_mode():
        selector(q, k)
    picked = selector(q, k)  # the static masks are remembered
    schedule = schedule_from_selection(picked, 100, 100, 2, HEADS, "cpu")
    for t in (picked.bits, picked.codes, *as_tensors(schedule)[0]):
        assert not t.is_inference() and not t.requires_grad
