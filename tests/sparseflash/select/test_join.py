"""Selections joined with masks and with each other, without waiting for the device."""

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import masks
from sparseflash import select
from sparseflash.schedule import as_tensors
from sparseflash.select.schedule import schedule_from_selection
from sparseflash.testing import make_qkv
from tests.sparseflash.select.oracle import dense, expanded

HEADS = 2
SELECTORS = {
    "top_k": lambda block: select.top_k(2, block_size=block),
    "causal": lambda block: select.top_k(2, "bound", block, within=masks.causal()),
    "mass": lambda block: select.mass(0.6, block_size=block, always=masks.local(0)),
    "moba": lambda block: select.moba(64, 2, block, capacity=40),
    "union": lambda block: select.moba(64, 2, block, union=True),
    "nsa": lambda block: select.nsa(3, block[1], block[0], capacity=40),
    "antidiagonal": lambda block: select.antidiagonal(8, 0.5, block, within=masks.causal()),
    "gate": lambda block: select.gate(select.Gate(HEADS, 16, 1, block_size=block), threshold=0.2),
}
MASKS = [
    masks.causal(),
    masks.local(20) | masks.global_tokens(3),
    masks.random_blocks(0.5, block=16, per_head=True),
    masks.mask_from(np.random.default_rng(0).random((2, 1, 100, 100)) < 0.5),
    masks.dense(),
    masks.causal() & ~masks.causal(),
]


def dense_of(selection: select.Selection) -> np.ndarray:
    return expanded(selection.to_block_mask(), 2, HEADS)


def dense_mask(mask, n: int) -> np.ndarray:
    blocks = mask if isinstance(mask, masks.BlockMask) else None
    if blocks is None:
        blocks = mask.build(n, n, 16, heads=HEADS if mask.per_head else None)
    return expanded(blocks, 2, HEADS)


@pytest.mark.parametrize("name", SELECTORS)
@pytest.mark.parametrize("block", [(16, 16), (32, 64)])
def test_with_static_masks(name, block):
    q, k, _ = make_qkv(2, HEADS, 100, 100, 16, kv_heads=1)
    torch.manual_seed(0)
    picked = SELECTORS[name](block)(q, k)
    found = dense_of(picked)
    for mask in MASKS:
        if mask.per_head and picked.heads == 1:
            with pytest.raises(ValueError, match="differs from head to head, the selection does"):
                picked & mask
            continue
        other = dense_mask(mask, 100)
        operands = [mask]
        if not mask.per_head:
            operands.append(mask.build(100, 100, block))
        for operand in operands:
            assert np.array_equal(dense_of(picked & operand), found & other)
            assert np.array_equal(dense_of(picked | operand), found | other)
            assert np.array_equal(dense_of(picked - operand), found & ~other)
    mask = MASKS[1]
    other, third = dense_mask(mask, 100), dense_mask(masks.sliding(30), 100)
    for joined, expected in (
        (mask & picked, found & other),
        (mask | picked, found | other),
        (((picked - mask) | masks.sliding(30)) & mask, ((found & ~other) | third) & other),
    ):
        assert np.array_equal(dense_of(joined), expected)
        assert (joined.codes != -2).sum() <= joined.max_blocks


def test_with_each_other():
    q, k, _ = make_qkv(2, HEADS, 100, 100, 16)
    whole = select.top_k(3, block_size=16)(q, k)
    cut = select.mass(0.9, block_size=16, within=masks.causal())(q, k)
    token = select.moba(32, 2, 16)(q, k)
    a, b, c = dense_of(whole), dense_of(cut), dense_of(token)
    for joined, expected in (
        (whole & cut, a & b),
        (whole | cut, a | b),
        (cut - whole, b & ~a),
        (token & cut, c & b),
        (cut | token, b | c),
        (token - whole, c & ~a),
        ((token & whole) | cut, (c & a) | b),
    ):
        assert np.array_equal(dense_of(joined), expected)
    with pytest.raises(ValueError, match="partial blocks: subtract one of whole blocks"):
        whole - cut
    with pytest.raises(ValueError, match="tiles make too many"):
        token & select.moba(32, 2, 16)(q, k)
    with pytest.raises(ValueError, match="select with the same"):
        whole & select.top_k(1, block_size=32)(q, k)
    with pytest.raises(ValueError, match="heads 2 and 3"):
        whole & select.top_k(1, block_size=16)(*make_qkv(2, 3, 100, 100, 16)[:2])
    with pytest.raises(TypeError):
        whole & np.ones((100, 100), bool)


def test_tiles_are_made_canonical():
    """Tiles that are empty, full or equal come out as the block mask of the same pairs has them."""
    q, k, _ = make_qkv(2, HEADS, 100, 100, 16)
    picked = select.top_k(1.0, block_size=16)(q, k)
    joined = ((picked & masks.causal()) | (picked - masks.causal())) & masks.local(30)
    again = masks.BlockMask.from_dense(dense_of(joined), 16)
    assert joined.to_block_mask().layout().max() == 2
    found = joined.to_block_mask()
    assert np.array_equal(np.broadcast_to(found.to_dense(), (2, 2, 100, 100)), again.to_dense())
    assert found == masks.mask_from(found.to_dense()).build(100, 100, 16) or found.heads == 2


class NoSync(TorchDispatchMode):
    """Fails on the operators that make the host wait for the device."""

    waiting = ("_local_scalar_dense", "nonzero", "masked_select", "is_nonzero", "equal", "unique")

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        assert name not in self.waiting, f"{name} waits for the device"
        if name in ("index", "index_put", "index_put_"):
            assert all(i is None or i.dtype != torch.bool for i in args[1]), "boolean index"
        if name == "repeat_interleave":
            assert (kwargs and kwargs.get("output_size") is not None) or len(args) > 1
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("name", SELECTORS)
@pytest.mark.parametrize("n", [96, 100])
def test_nothing_waits_for_the_device(name, n):
    q, k, _ = make_qkv(2, HEADS, n, n, 16, kv_heads=1)
    selector = SELECTORS[name]((16, 32))
    with NoSync():
        picked = selector(q, k)
        for joined in (picked, picked & MASKS[1], picked | MASKS[1], picked - MASKS[1]):
            joined.density()
            as_tensors(schedule_from_selection(joined, n, n, 2, HEADS, "cpu"))


def test_the_guard_sees_a_wait():
    q, k, _ = make_qkv(2, HEADS, 100, 100, 16, kv_heads=1)
    with NoSync(), pytest.raises(AssertionError, match="waits for the device"):
        select.moba(64, 2, 16)(q, k)  # documented: it counts its tiles


def test_selector_has_no_gradient_and_no_trace_of_inference_mode():
    q, k, _ = make_qkv(2, HEADS, 100, 100, 16, requires_grad=True)
    assert not any(
        t.requires_grad for t in as_tensors(
            schedule_from_selection(
                select.top_k(2, block_size=16)(q, k), 100, 100, 2, HEADS, "cpu"
            )
        )[0]
    )  # fmt: skip
    selector = select.top_k(2, block_size=16, within=masks.sliding(77), always=masks.local(0))
    with torch.inference_mode():
        selector(q, k)
    picked = selector(q, k)  # the static masks are remembered
    assert not picked.bits.is_inference() and not picked.codes.is_inference()


def test_dense_helper_agrees_with_itself():
    assert np.array_equal(dense(masks.causal(), 9, 9, 1)[0], np.tril(np.ones((9, 9), bool)))
