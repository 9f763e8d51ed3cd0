"""The algebra: laws of sets, identity by text, and what a mask refuses."""

import gc
import pickle
import random

import numpy as np
import pytest

import masks
from masks import Mask
from masks.spec import find
from tests.masks.cases import composition

N_Q, N_K, BLOCK = 150, 133, (32, 48)


@pytest.fixture(params=range(12))
def abc(request: pytest.FixtureRequest) -> list[Mask]:
    rng = random.Random(request.param)
    return [composition(rng, N_Q, N_K, 1) for _ in range(3)]


def same(a: Mask, b: Mask) -> bool:
    return a.build(N_Q, N_K, BLOCK) == b.build(N_Q, N_K, BLOCK)


def test_laws_of_sets(abc: list[Mask]):
    a, b, c = abc
    everything, nothing = masks.dense(), ~masks.dense()
    assert same(~(a | b), ~a & ~b)
    assert same(~(a & b), ~a | ~b)
    assert same(a - b, a & ~b)
    assert same(a | b, b | a)
    assert same(a & b, b & a)
    assert same(a & (b | c), (a & b) | (a & c))
    assert same(a | (a & b), a)
    assert same(a | a, a)
    assert same(a | ~a, everything)
    assert same(a & ~a, nothing)
    assert not same(a, ~a)


def test_equality_is_by_text():
    a, b, c = masks.local(3), masks.causal(), masks.butterfly(64)
    assert ~~a == a and a - b == a & ~b and (a | b) | c == a | (b | c)
    assert a | b != b | a and a != "local(3)"
    assert len({a, masks.local(3, 3), masks.local(np.int64(3))}) == 1
    assert a.key == str(a) == repr(a)


@pytest.mark.parametrize(
    ("mask", "text"),
    [
        ((masks.local(256) | masks.butterfly(128)) & masks.causal(), None),
        (
            masks.local(1, 2) | masks.causal() & masks.sliding(4),
            "local(1, 2) | (causal() & sliding(4))",
        ),
        (~(masks.dense() - masks.global_tokens(3)), "~(dense() & ~global_tokens(3))"),
        (masks.causal(align="bottom_right"), "causal(align='bottom_right')"),
        (masks.butterfly(64, 3), "butterfly(64, levels=3)"),
        (masks.random_blocks(0.1), "random_blocks(0.1)"),
        (
            masks.random_blocks(count=3, block=64, seed=7, per_head=True),
            "random_blocks(count=3, block=64, seed=7, per_head=True)",
        ),
    ],
)
def test_text(mask: Mask, text: str | None):
    assert str(mask) == (text or "(local(256) | butterfly(128)) & causal()")
    assert masks.parse(str(mask)) == mask


@pytest.mark.parametrize("seed", range(400))
def test_round_trips(seed: int):
    mask = composition(random.Random(seed), N_Q, N_K, 3)
    copy = pickle.loads(pickle.dumps(mask))
    assert copy == mask and hash(copy) == hash(mask) and same(copy, mask)
    if mask.spelled:
        assert masks.parse(str(mask)) == mask
    elif "where(" not in mask.key:  # a living function is found by its number
        with pytest.raises(ValueError, match=r"digest|sha256"):
            masks.parse(str(mask))


def test_no_truth_value():
    a, b = masks.causal(), masks.local(3)
    with pytest.raises(TypeError, match=r"write \| & ~ for"):
        bool(a)
    with pytest.raises(TypeError, match=r"write \| & ~ for"):
        _ = a and b
    with pytest.raises(TypeError, match=r"write \| & ~ for"):
        _ = not a
    with pytest.raises(TypeError):
        _ = a | True  # type: ignore[operator]


def test_immutable():
    for mask in (masks.causal(), masks.causal() | masks.local(3), ~masks.causal()):
        with pytest.raises(AttributeError):
            mask.key = "dense()"


def test_extents():
    data = np.ones((2, 3, 5, 7), bool)
    mask = masks.mask_from(data)
    assert (mask.batch, mask.heads, mask.per_head) == (2, 3, False)
    assert (masks.mask_from(data[:1, :1]).batch, masks.mask_from(data[0, 0]).heads) == (None, None)
    joined = masks.causal() | ~masks.mask_from(data[0]) | masks.mask_from(data[:, :1])
    assert (joined.batch, joined.heads) == (2, 3)
    assert (masks.causal() & masks.random_blocks(0.5, per_head=True)).per_head
    with pytest.raises(ValueError, match="heads extents 2 and 3"):
        mask & masks.mask_from(data[0, :2])


def test_found_by_key():
    data = np.eye(20) > 0
    first, second = (masks.mask_from(data) | masks.causal() for _ in range(2))
    key = second.key
    del first
    gc.collect()
    assert find(key) == second  # that an equal one has died does not matter
    blocks = masks.BlockMask.from_dense(data, 16)
    assert find(blocks.key) == blocks and find("causal()") == masks.causal()
    copy = pickle.loads(pickle.dumps(second))
    del second, blocks
    gc.collect()
    assert find(key) == copy
    del copy
    gc.collect()
    with pytest.raises(ValueError, match="no text"):
        find(key)


def test_array_is_copied():
    data = np.eye(20, dtype=bool)
    mask = masks.mask_from(data)
    data[:] = True
    assert mask.build(20, block_size=16).to_dense().sum() == 20
    assert mask != masks.mask_from(data) and mask == masks.mask_from(np.eye(20) > 0)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: masks.local(-1), "left is -1: give an integer >= 0"),
        (lambda: masks.local(2**70), "left is 1180591620717411303424: give an integer <= "),
        (lambda: masks.local(2.5), "left is 2.5"),
        (lambda: masks.local(True), "left is True"),
        (lambda: masks.local(1, -2), "right is -2"),
        (lambda: masks.sliding(0), "window is 0: give an integer >= 1"),
        (lambda: masks.causal(align="left"), "align is 'left': choose one of 'top_left'"),
        (lambda: masks.butterfly(0), "block is 0"),
        (lambda: masks.butterfly(64, -1), "levels is -1"),
        (lambda: masks.global_tokens("4"), "n is '4'"),
        (lambda: masks.random_blocks(), "give one of them"),
        (lambda: masks.random_blocks(0.5, count=2), "give one of them"),
        (lambda: masks.random_blocks(0.0), r"density is 0.0: give a number in \(0, 1\]"),
        (lambda: masks.random_blocks(float("nan")), "density is nan"),
        (lambda: masks.random_blocks("much"), "density is 'much'"),
        (lambda: masks.random_blocks(count=0), "count is 0"),
        (lambda: masks.random_blocks(0.5, seed=2**64), "seed is"),
        (lambda: masks.random_blocks(0.5, per_head=1), "per_head is 1: give True or False"),
        (lambda: masks.random_blocks(count=5).build(512), "draws 5 key blocks.* but there are 4"),
        (lambda: masks.random_blocks(0.5, per_head=True).build(512), "give heads= to build"),
        (lambda: masks.mask_from(np.ones((4, 4))), "float64: give booleans"),
        (lambda: masks.mask_from(np.ones(4, bool)), r"shape \(4,\)"),
        (lambda: masks.mask_from(np.ones((4, 0), bool)), r"shape \(4, 0\)"),
        (lambda: masks.mask_from(np.eye(4) > 0).build(5), "build it for n_q=4, n_k=4"),
        (lambda: masks.mask_from(np.ones((3, 4, 4), bool)).build(4, heads=2), "heads is 2, but"),
        (lambda: masks.causal().build(0), "n_q is 0: give an integer >= 1"),
        (lambda: masks.causal().build(5, 2.0), "n_k is 2.0"),
        (lambda: masks.causal().build(5, True), "n_k is True"),
        (lambda: masks.causal().build(64, block_size=24), "block_size is 24: give multiples of 16"),
        (lambda: masks.causal().build(64, block_size=(64, 512)), "block_size is 512"),
        (lambda: masks.causal().build(64, block_size=(64, 64, 64)), "block_size is"),
        (lambda: masks.causal().build(64, block_size=64.0), "block_size is 64.0"),
        (lambda: masks.causal().build(64, heads=0), "heads is 0"),
    ],
)
def test_errors_name_value_and_remedy(make, message: str):
    with pytest.raises(ValueError, match=message):
        make()
